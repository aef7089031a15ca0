"""``python -m tensorwire.testing`` as somebody with a device of his own meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient

DEVICES = """
from tensorwire.device import LoopbackDevice, TcpDevice

class Mine(TcpDevice):
    pass

class Forgetful(LoopbackDevice):
    def allocate(self, nbytes, alignment=4096, *, reserve=True):
        region = super().allocate(nbytes, alignment, reserve=reserve)
        memoryview(region)[:1] = b"x"[:nbytes]  # not zeroed
        return region

nothing = dict
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "mydevices.py").write_text(DEVICES)
    # Settings of the project around must not matter.
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--no-such-option"\n')
    command = [sys.executable, "-m", "tensorwire.testing", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patient(240))


@pytest.mark.long
def test_a_good_device_passes(tmp_path: Path) -> None:
    done = run(tmp_path, "mydevices:Mine", "mydevices:Mine+delays", "-k", "test_order or another_process or orderly")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "mydevices.py",
        "pyproject.toml",
    ]


def test_an_installed_device_has_a_name(tmp_path: Path) -> None:
    done = run(tmp_path, "loopback", "-k", "test_refusals")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_bad_device_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "mydevices:Forgetful", "-k", "test_memory")
    assert done.returncode == 1
    assert "test_memory_is_zeroed_aligned_and_writable[Forgetful]" in done.stdout


@pytest.mark.parametrize(
    "words",
    [(), ("mydevices:Missing",), ("nowhere:Mine",), ("mydevices",), ("mydevices:nothing",), ("-k", "order")],
)
def test_a_wrong_device_name_is_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if words and ":" in words[0]:
        assert len(done.stderr.splitlines()) == 1
    if not words:
        assert done.stderr.startswith("usage: ")


@pytest.mark.slow
def test_in_ones_own_run_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "mydevices.py").write_text(DEVICES)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntensorwire_devices = mydevices:Mine\n")
    plugin = ["-p", "tensorwire.testing.plugin", "--pyargs", "tensorwire.testing.conformance"]
    command = [sys.executable, "-m", "pytest", *plugin, "-k", "test_signals_alone", "-v"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_signals_alone[Mine]" in done.stdout
    (tmp_path / "pytest.ini").unlink()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode != 0
    assert "name a device" in done.stdout
