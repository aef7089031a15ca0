"""What the documentation shows is true: its programs run, their output is as printed, its tables are complete.

Blocks marked ``python`` are one program per page, and those marked ``text`` on such a page are all that it prints.
Blocks marked ``py`` are parts of something larger, and are not run; ``console`` marks the output of a command.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient
from tests.fixtures import allocator_built as allocator_built
from tests.harness.sandbox import PROGRESS
from tests.levels import mostly_slow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def blocks(page: Path, kind: str) -> list[str]:
    """The fenced blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.S)


PAGES = [page.stem for page in sorted(DOCS.glob("*.md")) if blocks(page, "python")]


@pytest.mark.usefixtures("allocator_built")  # the line that says it builds it is not output of the page
@pytest.mark.parametrize("name", mostly_slow(PAGES, {*PAGES} - {"torch", "graph", "from-ddp"}))
def test_programs_run_and_print_what_the_page_says(name: str, tmp_path: Path) -> None:
    page = DOCS / f"{name}.md"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TENSORWIRE_")}
    program = "\n".join(blocks(page, "python"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(240),
    )
    assert (done.returncode, PROGRESS.sub("", done.stderr)) == (0, "")
    assert done.stdout == "".join(blocks(page, "text")), "the page shows another output"


def test_every_environment_variable_is_in_the_table() -> None:
    used = set()
    for path in [*(ROOT / "src" / "tensorwire").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        used.update(re.findall(r"TENSORWIRE_[A-Z_]*[A-Z]", path.read_text()))
    rows = [line.split("|")[1] for line in (DOCS / "running.md").read_text().splitlines() if line.startswith("|")]
    assert used - {name for row in rows for name in re.findall(r"TENSORWIRE_\w+", row)} == set()


def test_every_error_is_in_the_table() -> None:
    from tensorwire import errors

    rows = "\n".join(line.split("|")[1] for line in (DOCS / "errors.md").read_text().splitlines() if line[:1] == "|")
    bases = {"TensorwireError", "DeviceError", "ControlError"}
    assert [name for name in errors.__all__ if name not in bases and f"`{name}`" not in rows] == []


def test_links_between_files_lead_somewhere() -> None:
    broken = []
    for path in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            if not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert broken == []


def test_the_glossary_defines_each_term_once_in_one_sentence() -> None:
    page = (DOCS / "glossary.md").read_text()
    entries = re.findall(r"^- \*\*(.+?)\*\*: (.+(?:\n  .+)*)$", page, re.M)
    assert len(entries) == len(re.findall(r"^- ", page, re.M)) > 50
    terms = Counter(term.strip() for entry, _ in entries for term in entry.split(","))
    assert [term for term, count in terms.items() if count > 1] == []
    assert [term for term, text in entries if re.search(r"[.!?](\s|$)", text)] == []
