"""Where the allocator comes from: built once, by one process, and not at all where that cannot be."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tensorwire import builds, progress
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.torch.graph.memory import allocator
from tests.harness.sandbox import Sandbox, wait_for_end

BUILDING = f"tensorwire: building allocator.cpp once for torch {torch.__version__} ...\n"
WHY = "from tensorwire.torch.graph.memory.birthplace import why_not\nprint('why', why_not())"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, where builds go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(allocator.SWITCH, raising=False)
    return tmp_path / "cache" / "tensorwire" / "birth"


def compiler(folder: Path, body: str) -> str:
    """A compiler that does this; it writes a line into ``calls`` each time."""
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\necho called >> {folder / 'calls'}\n{body}\n")
    script.chmod(0o700)
    return str(script)


def reason() -> str:
    found = allocator._find()
    assert isinstance(found, str)
    return found


def left(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


def test_it_is_built_once_into_a_folder_of_this_user(cache: Path) -> None:
    assert allocator._load().begin is not None
    assert cache.stat().st_mode & 0o777 == 0o700
    (path,) = cache.glob("*.so")
    made = path.stat()
    allocator._load()
    assert path.stat().st_ino == made.st_ino
    assert left(cache) == {".so", ""}  # and the lock


def test_what_it_depends_on_names_it(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler(tmp_path, "exit 0")  # mkstemp's empty file stays
    source, header = tmp_path / "some.cc", tmp_path / "some.h"
    monkeypatch.setenv("CXX", made)

    def build(text: str, beside: str, word: str, fact: str) -> Path:
        source.write_text(text)
        header.write_text(beside)
        return builds.build("birth", source, [word], nullcontext, headers=[header], facts=[fact])

    inputs = ("source", "header", "-word", "fact")
    found = {build(*inputs), *(build(*inputs[:at], "other", *inputs[at + 1 :]) for at in range(4))}
    assert len(found) == 5
    assert build(*inputs) in found


def test_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allocator.SWITCH, "off")
    assert reason() == "TENSORWIRE_BIRTH=off"
    assert not cache.exists()
    monkeypatch.setenv(allocator.SWITCH, "maybe")
    with pytest.raises(ArgumentError, match="on or off, not 'maybe'"):
        allocator._find()


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -pipe")
    assert reason() == "no compiler: /nowhere/g++: No such file or directory; install gcc and g++, or set CXX"
    assert left(cache) == {""}


def test_a_compiler_that_fails(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "CXX", compiler(tmp_path, "echo 'allocator.cpp: first' >&2; echo 'No space left on device' >&2; exit 4")
    )
    assert reason().endswith("compiler could not build allocator.cpp: No space left on device")
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 3"))
    assert reason().endswith("compiler could not build allocator.cpp: status 3")
    assert left(cache) == {""}


def test_the_compilers_own_words(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("#include <c10/core/Nothing.h>\n")
    monkeypatch.setattr(allocator, "_SOURCE", source)
    assert "c10/core/Nothing.h: No such file or directory" in reason()


def test_a_build_that_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))  # mkstemp's empty file stays
    assert reason().startswith("cannot be loaded: ")
    path = builds.build("birth", allocator._SOURCE, ["-shared"], nullcontext)
    assert path.stat().st_size == 0  # as after a loss of power
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(allocator, "build", lambda *_, **__: path if path.exists() else builds.build(*_, **__))
    assert allocator._load().begin is not None
    assert not path.exists()


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; wait"))
    monkeypatch.setattr(builds, "_BUILD_SECONDS", 0.2)
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    with pytest.raises(Unsupported, match=r"took longer than 0\.2 s"):
        allocator._load()
    wait_for_end(int((tmp_path / "pid").read_text()), "the compiler's child")
    assert capfd.readouterr().err == BUILDING


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builds.build_folder("birth")
    (folder / "lock").mkdir()
    assert reason() == f"cannot write to {folder}: Is a directory; set XDG_CACHE_HOME"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert reason() == f"cannot make {tmp_path}/file/tensorwire/birth: Not a directory; set XDG_CACHE_HOME"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_cache(cache: Path) -> None:
    folder = builds.build_folder("birth")
    folder.chmod(0o500)
    assert reason() == f"cannot write to {folder}: Permission denied; set XDG_CACHE_HOME"


def test_a_folder_where_others_may_write_is_not_trusted(cache: Path) -> None:
    builds.build_folder("birth").chmod(0o770)
    assert reason() == f"others can write to {cache}: chmod 700 it, or set XDG_CACHE_HOME"


@pytest.mark.slow
def test_processes_that_need_it_at_once_build_it_once(sandbox: Sandbox, tmp_path: Path) -> None:
    script = sandbox.script(WHY, init=False)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": compiler(tmp_path, 'exec g++ "$@"')}
    programs = [sandbox.python(script, **environment) for _ in range(3)]
    for program in programs:
        result = program.finish()
        assert (result.status, result.out.strip()) == (0, "why None")
        assert result.err in ("", BUILDING)  # a machine that is busy takes longer than who waits is told for what
    assert (tmp_path / "calls").read_text() == "called\n"
