"""``make test-versions``: the tests under every Python that we claim, with the oldest, the pinned and the newest torch.

Each pair has an environment of its own in ``.versions/``, which is kept for the next time. Arguments name Pythons, such
as ``3.10``; the others are left out. What follows ``--`` goes to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
OLDEST, NEWEST = "torch==2.11.*", "torch"
VERSIONS = {"3.10": OLDEST, "3.11": PINNED, "3.12": NEWEST, "3.13": NEWEST}
BUILD = ("scikit-build-core", "nanobind", "cmake", "ninja", "setuptools", "wheel")


def main(arguments: list[str]) -> int:
    """Runs the tests for each Python that is named, by default for all, and returns how many failed."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    named, options = arguments[:at] or list(VERSIONS), arguments[at + 1 :]
    if unknown := [name for name in named if name not in VERSIONS]:
        print(f"test-versions: there is no {', '.join(unknown)}; choose from {', '.join(VERSIONS)}")
        return 2
    results = {name: run(name, VERSIONS[name], options) for name in named}
    for name, result in results.items():
        print(f"test-versions: Python {name}: {result}")
    return sum(not result.startswith("passed") for result in results.values())


def run(python: str, torch: str, options: list[str]) -> str:
    """Installs ``torch`` and ours under ``python`` and runs the tests there; what became of it, in words."""
    program = shutil.which(f"python{python}")
    if program is None:
        return f"left out: there is no python{python} on PATH"
    if subprocess.run([program, "--version"], check=False, capture_output=True).returncode != 0:
        return f"left out: {program} does not start"
    home = ROOT / ".versions" / python
    interpreter = home / "bin" / "python"
    constraints = home / "constraints.txt"
    pip = (str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    environment = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    try:
        if not interpreter.exists():
            subprocess.run([program, "-m", "venv", home], check=True)
        constraints.write_text(f"{torch}\n")
        print(f"test-versions: Python {python}: installing {torch} and what the tests need takes minutes", flush=True)
        subprocess.run([*pip, *BUILD], check=True, cwd=ROOT, env=environment)
        ours = ("--no-build-isolation", "-c", str(constraints), "-e", ".[torch,demo,dev]")
        subprocess.run([*pip, *ours], check=True, cwd=ROOT, env=environment)
    except subprocess.CalledProcessError as error:
        return f"could not be set up: {error}"
    found = "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"
    versions = subprocess.run([interpreter, "-c", found], check=True, capture_output=True, text=True).stdout.strip()
    started = time.monotonic()
    command = [interpreter, "-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", *options]
    status = subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode
    minutes = (time.monotonic() - started) / 60
    return f"{'passed' if status == 0 else f'FAILED ({status})'} with {versions} in {minutes:.0f} min"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
