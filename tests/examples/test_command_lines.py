"""The command lines that the documentation shows: each is one, and those that can run here run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from benchmarks.cli import group as group_of_comparisons
from tensorwire.cli import group as group_of_ours
from tensorwire.testing.patience import patient
from tests.examples.test_docs import DOCS, ROOT, blocks
from tests.levels import mostly_slow

PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
# By how a line begins: what needs no other machine, no RDMA and no file of the user's, and takes seconds.
RUN = (
    *("tensorwire doctor", "tensorwire plan vgg16", "python examples/", "torchrun --nproc-per-node 2 examples/"),
    "tensorwire run --workers 2 --servers 1 -- python examples/minimal",
)
NOT_RUN = ("--between", "--peer")


def lines() -> list[tuple[str, str]]:
    """Pages, and the lines of their blocks marked ``sh``, without comments; a line that goes on is one.

    And the benchmarks that the README names in its text.
    """
    text = (ROOT / "README.md").read_text()
    found = [
        ("README", line) for line in re.findall(r"`((?:sudo )?(?:tensorwire bench|python -m benchmarks) .*?)`", text)
    ]
    assert len(found) >= 5
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = re.sub(r"(^|\s)#.*", "", line).strip().removesuffix("&").strip()
                if words:
                    found.append((page.stem, words))
    return found


def command(line: str) -> list[str]:
    """Its words, without what comes in front of a program."""
    words = shlex.split(line)
    while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
        del words[0]
    return [Path(words[0]).name, *words[1:]] if words else []


LINES = [(page, line) for page, line in lines() if "$(" not in line]
TENSORWIRE = sorted({line for _, line in LINES if command(line)[:1] == ["tensorwire"]})
COMPARISONS = sorted({line for _, line in LINES if command(line)[1:3] == ["-m", "benchmarks"]})
MAKE = sorted({words[1] for _, line in LINES if (words := command(line))[:1] == ["make"]})
RUNNABLE = sorted({line for _, line in LINES if line.startswith(RUN) and not any(word in line for word in NOT_RUN)})


@pytest.mark.parametrize("line", TENSORWIRE + COMPARISONS)
def test_every_command_line_of_ours_is_one(line: str) -> None:
    """Its command and options are there, and their values are taken; nothing runs."""
    words = command(line)
    group, arguments = (group_of_ours, words[1:]) if words[0] == "tensorwire" else (group_of_comparisons, words[3:])
    while isinstance(group, click.Group):
        name, *arguments = arguments
        context = click.Context(group)
        found = group.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        group = found
    group.make_context(name, arguments)


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "setup"} <= set(MAKE) <= targets


def test_every_script_of_the_project_is_there() -> None:
    named = {word for _, line in LINES for word in shlex.split(line) if word.startswith(("examples/", "tests/"))}
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("line", mostly_slow(RUNNABLE, {"tensorwire doctor", "tensorwire doctor --json"}))
def test_it_runs(line: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORWIRE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        env={**kept, "PATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
