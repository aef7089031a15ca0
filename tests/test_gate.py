"""The gate, `.ci/run`, ends as its parts do. Stand-ins play the parts: the real ones take three quarters of an hour."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient

GATE = Path(__file__).parents[1] / ".ci" / "run"
GUESTS, LAST = "test-rdma", "demo"
# Says what it is told to make, and fails at what FAILS names. If that runs beside the guests, these outlast it.
MAKE = """#!/bin/sh
echo "making $*"
case "$1 $FAILS" in
"test-rdma check-native") echo $$ >"$GUEST"; exec sleep 1000 ;;
"check-native check-native") until [ -s "$GUEST" ]; do :; done ;;
esac
[ "$1" != "$FAILS" ] || exit 3
"""


@pytest.fixture
def gate(tmp_path: Path) -> dict[str, str]:
    """The environment in which the gate has stand-ins: other tests may run, of which it would find processes."""
    for name, text in {
        "make": MAKE,
        "pgrep": "#!/bin/sh\nexit 1\n",
        "ls": "#!/bin/sh\n",
        "apt-get": "#!/bin/sh\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": "", "GUEST": str(tmp_path / "guest")}


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(GATE)], env=environment, capture_output=True, text=True, timeout=patient(60.0))


def test_it_passes_when_all_parts_do(gate: dict[str, str]) -> None:
    done = run(gate)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"making {GUESTS}" in done.stdout
    assert done.stdout.rstrip().endswith("all good")


@pytest.mark.parametrize("part", ["docs", "test-all", "test-tensorflow", GUESTS, "check", LAST])
def test_it_fails_when_a_part_does(gate: dict[str, str], part: str) -> None:
    done = run({**gate, "FAILS": part})
    assert done.returncode != 0
    assert f"making {part}" in done.stdout
    assert "all good" not in done.stdout


def test_the_guests_end_with_it(gate: dict[str, str]) -> None:
    assert run({**gate, "FAILS": "check-native"}).returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(gate["GUEST"]).read_text()), 0)
