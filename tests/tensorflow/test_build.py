"""The library of operators is compiled once, by whoever comes first, and says why it cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.errors import Unsupported
from tensorwire.tensorflow.build import compiled
from tensorwire.testing.patience import patient

SCRIPT = "from tensorwire.tensorflow.build import compiled; print(compiled('arena'))"


def start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_may_compile_at_the_same_time(tmp_path: Path) -> None:
    ended = [(p, p.communicate(timeout=patient(200.0))) for p in [start(tmp_path), start(tmp_path)]]
    assert [p.returncode for p, _ in ended] == [0, 0], ended
    (library,) = {said.strip() for _, (said, _) in ended}
    assert [str(path) for path in (tmp_path / "tensorwire" / "tensorflow").glob("*.so")] == [library]
    before = Path(library).stat().st_mtime_ns
    assert start(tmp_path).communicate(timeout=patient(100.0))[0].strip() == library
    assert Path(library).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("compiler", "part"),
    [("/nowhere/g++", "no compiler: /nowhere/g++: No such file"), ("/bin/false", "/bin/false could not build")],
)
def test_it_says_why_it_cannot_be_compiled(
    compiler: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Unsupported, match=re.escape(part)):
        compiled("operators")
    assert not any((tmp_path / "tensorwire").rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorwire").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Unsupported, match=f"cannot make {tmp_path}/tensorwire/tensorflow"):
        compiled("operators")
