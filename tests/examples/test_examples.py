"""The small examples run as they are: alone, by tensorwire run, by torchrun; and the README shows two of them."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient
from tests.fixtures import allocator_built as allocator_built
from tests.harness.sandbox import NAMES, PROGRESS, PUBLISHED
from tests.levels import mostly_long

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "examples" / "minimal.py"
WITH_DDP = ROOT / "examples" / "minimal_ddp.py"
README = (ROOT / "README.md").read_text()
PYTHON = [sys.executable, "-W", "error"]


def run(command: list[str], tmp_path: Path) -> str:
    """What ``command`` prints; fails if it says anything on the side, warnings included."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TENSORWIRE_")},
        "OMP_NUM_THREADS": "1",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0, done.stderr
    assert PUBLISHED.sub("", PROGRESS.sub("", NAMES.sub("", done.stderr))) == ""
    left = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert left == []
    return done.stdout


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
LAUNCHERS = {
    "alone": [],
    "run": [sys.executable, "-m", "tensorwire.cli", "run", "--workers", "2", "--servers", "1", "--"],
    "torchrun": TORCHRUN,
}


def check_accuracy(printed: str, workers: int) -> None:
    """The script says how many workers there were, and that the model learned."""
    found = re.fullmatch(r"workers: (\d+), test accuracy: ([\d.]+)\n", printed)
    assert found is not None, printed
    assert int(found[1]) == workers
    assert float(found[2]) > 0.8


@pytest.mark.parametrize("name", mostly_long(["run", "alone", "torchrun"], ["run"]))
def test_minimal_learns(name: str, tmp_path: Path) -> None:
    printed = run([*LAUNCHERS[name], *PYTHON, str(MINIMAL)], tmp_path)
    check_accuracy(NAMES.sub("", printed), workers=1 if name == "alone" else 2)
    if name == "run":
        (shown,) = re.findall(r"```console\n(.*?)```", README, re.S)
        assert re.sub(r"0\.\d+", "", printed) == re.sub(r"0\.\d+", "", shown)


@pytest.mark.slow
def test_minimal_with_ddp_learns(tmp_path: Path) -> None:
    check_accuracy(run([*TORCHRUN, *PYTHON, str(WITH_DDP)], tmp_path), workers=2)


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_edges_moves_the_tensors(device: str, tmp_path: Path) -> None:
    said = run([*PYTHON, str(ROOT / "examples" / "edges.py"), device], tmp_path)
    sums = ((1, 3200), (2, 6400), (3, 9600))
    assert said == "".join(f"{device}, step {step}: float32[32, 100], sum {total}\n" for step, total in sums)


def test_the_page_about_edges_shows_the_example() -> None:
    shown = (ROOT / "docs" / "edges.md").read_text()
    shown = shown[shown.index("SPEC = Spec(") : shown.index("```", shown.index("SPEC = Spec("))]
    program = (ROOT / "examples" / "edges.py").read_text()
    program = "\n".join(line for line in program.splitlines() if line.strip())
    for part in re.split(r"^(?=def )", shown, flags=re.M):
        assert "\n".join(line for line in part.splitlines() if line.strip()) in program


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["tcp"]))
def test_devices_moves_the_numbers(device: str, tmp_path: Path) -> None:
    said = run([*PYTHON, str(ROOT / "examples" / "devices.py"), device], tmp_path)
    assert said == f"{device}: 1000 numbers arrived, their sum is 499500\n"


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_key_value_fits_the_line(device: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tensorwire.cli", "run", "--workers", "2", "--servers", "1", "--device", device]
    said = NAMES.sub("", run([*command, "--", *PYTHON, str(ROOT / "examples" / "key_value.py")], tmp_path))
    assert said == "workers: 2, w: [ 2. -3.], b: [1.]\n"


@pytest.mark.parametrize(("name", "device"), [("two_workers", "shm"), ("experts", "tcp")])
@pytest.mark.slow
@pytest.mark.usefixtures("allocator_built")
def test_models_over_two_workers_learn(name: str, device: str, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / f"{name}.py")
    command = [sys.executable, "-m", "tensorwire.cli", "run", "--workers", "2", "--servers", "0", "--device", device]
    said = NAMES.sub("", run([*command, "--", sys.executable, example], tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) >= 3
    assert losses[-1] < losses[0]


def program(path: Path) -> list[str]:
    """The lines below the docstring."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    assert docstring.end_lineno is not None
    return text.splitlines()[docstring.end_lineno + 1 :]


def test_the_readme_shows_what_differs_from_ddp() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    differences = difflib.unified_diff(program(WITH_DDP), program(MINIMAL), n=1, lineterm="")
    assert shown.splitlines() == list(differences)[2:]
