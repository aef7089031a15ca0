"""What the plugin brings to a run of pytest: scaled time limits, and the reasons of skipped tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.errors import ArgumentError
from tensorwire.testing.patience import PATIENCE, VARIABLE, patient, read_patience

LIMITS = """
import pytest

@pytest.fixture
def limit(request):
    return request.node.get_closest_marker("timeout")

def test_default(limit):
    assert limit.args == (30.0,)

@pytest.mark.timeout(2, method="thread")
def test_own(limit):
    assert (limit.args, limit.kwargs) == ((6.0,), {"method": "thread"})

@pytest.mark.timeout(timeout=4)
def test_own_by_name(limit):
    assert (limit.args, limit.kwargs) == ((12.0,), {})
"""
FAILS_AND_SKIPS = """
import subprocess
import pytest
from tensorwire.device import ShmDevice
from tensorwire.testing.fixtures import nothing_left, warm

def test_fails():
    subprocess.run(["false"], check=True)  # which is no TimeoutExpired

def test_frames():
    with ShmDevice() as device, device.allocate(8) as region:
        raise ValueError("this alone is to be told")

@pytest.mark.parametrize("i", range(3))
def test_often(i):
    pytest.skip("nobody is there")

@pytest.mark.skipif(True, reason="the moon is full")
def test_once():
    pass
"""
HANGS = """
import threading

def test_hangs():
    threading.Event().wait()
"""


def run(folder: Path, test: str, *words: str, **environment: str) -> tuple[int, str]:
    """pytest with the plugin, in a folder with one file of tests: its exit status, and what it says."""
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 10\n")
    (folder / "test_it.py").write_text(test)
    plugins = ("-p", "no:cacheprovider", "-p", "timeout", "-p", "tensorwire.testing.plugin")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *words]
    environment = {**os.environ, VARIABLE: "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(240),
    )
    return done.returncode, done.stdout + done.stderr


def test_every_limit_is_scaled(tmp_path: Path) -> None:
    status, said = run(tmp_path, LIMITS, **{VARIABLE: "3"})
    assert status == 0, said
    assert "because" not in said  # nothing was skipped


def test_a_limit_of_the_command_line_is_taken_as_it_is(tmp_path: Path) -> None:
    test = "def test_it(request):\n    assert request.node.get_closest_marker('timeout') is None"
    assert run(tmp_path, test, "--timeout", "50", **{VARIABLE: "3"})[0] == 0


def test_a_limit_that_ran_out_is_reported_with_advice(tmp_path: Path) -> None:
    status, said = run(tmp_path, HANGS, "--timeout", "0.1")
    assert status == 1
    assert said.count(f"on a slow or busy machine set {VARIABLE}=4") == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "slow", "1e9"])
def test_a_patience_that_is_none_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(ArgumentError, match=f"{VARIABLE}={text}: give a number"):
        read_patience({VARIABLE: text})


def test_pytest_reports_a_wrong_patience(tmp_path: Path) -> None:
    status, said = run(tmp_path, FAILS_AND_SKIPS, **{VARIABLE: "slow"})
    assert status == pytest.ExitCode.USAGE_ERROR
    assert f"{VARIABLE}=slow: give a number" in said
    assert "Traceback" not in said


def test_patience_is_one_unless_it_is_set() -> None:
    assert read_patience({}) == read_patience({VARIABLE: ""}) == 1.0
    assert patient(60.0) == 60.0 * PATIENCE


def test_skipped_tests_are_counted_by_reason_and_failed_ones_tell_their_own_alone(tmp_path: Path) -> None:
    status, said = run(tmp_path, FAILS_AND_SKIPS)
    assert status == 1
    lines = said.splitlines()
    (at,) = (i for i, line in enumerate(lines) if "4 skipped, because" in line)
    assert lines[at + 1 : at + 3] == ["    3  nobody is there", "    1  the moon is full"]
    assert VARIABLE not in said  # neither failure is one of a limit
    # No test is blamed for what the frames of its failure hold.
    assert lines[-1].startswith("2 failed, 4 skipped in "), said
