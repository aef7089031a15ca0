"""What the files of the project say about installing it is one and the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from tensorwire.extras import Extra, how_to_install

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def extras() -> set[str]:
    """The extras of pyproject.toml."""
    table = PYPROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", table, re.M))


def test_every_file_names_the_same_versions_of_python() -> None:
    """pip and make refuse the same ones, and people are told which."""
    oldest, beyond = map(int, re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', PYPROJECT)[0])
    versions = [f"3.{minor}" for minor in range(oldest, beyond)]
    assert re.findall(r"Python :: (3\.\d+)", PYPROJECT) == versions
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {oldest}) <= sys.version_info[:2] <= (3, {beyond - 1})" in makefile
    for text in (makefile, *((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md"))):
        assert set(re.findall(r"(3\.\d+) to (3\.\d+)", text)) == {(versions[0], versions[-1])}


def test_every_extra_that_a_message_names_is_there() -> None:
    assert set(get_args(Extra)) <= extras()
    assert how_to_install("plot") == "run pip install '.[plot]' in the folder of Tensorwire's source"


def test_extras_are_named_as_they_are_installed_from_the_source() -> None:
    """Tensorwire is on no index: under its name pip would find nothing there, or something else."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {extra for path in texts for extra in re.findall(r"pip install '\.\[([\w,]+)\]'", path.read_text())}
    assert {extra for several in named for extra in several.split(",")} <= extras()
    assert [path.name for path in texts if re.search(r"install '?tensorwire\b", path.read_text())] == []


def test_the_documentation_has_a_row_for_every_extra_of_users() -> None:
    section = (ROOT / "docs" / "quickstart.md").read_text().partition("### Extras")[2].partition("###")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == extras() - {"demo", "docs", "dev"}


def test_without_pytorch_its_adapter_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tensorwire as tw\n"
        "for use in (lambda: tw.torch, lambda: tw.worker, lambda: __import__('tensorwire.torch')):\n"
        "    try: use()\n"
        "    except tw.errors.MissingPackage as error: print(error, isinstance(error, ImportError))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"tensorwire.torch needs PyTorch: {how_to_install('torch')} True"] * 3
