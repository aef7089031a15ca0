"""Builds the allocator of ``allocator.cpp``, once per version of torch, and installs it in torch."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorwire.errors import ArgumentError, Unsupported

SWITCH = "TENSORWIRE_BIRTH"
MOST_OUTPUTS = 8  # of one operator, in one call
ONLY_RECORD = 2**32 - 1  # a skip that no allocation reaches

_SOURCE = Path(__file__).with_name("allocator.cpp")
_QUIET_SECONDS = 2.0  # after that a message says what is awaited
_BUILD_SECONDS = 300.0


@dataclass(frozen=True)
class Allocator:
    """The functions of ``allocator.cpp``, where they are described. ``begin`` takes packed bytes."""

    begin: Callable[[int, bytes, bytes], int]
    end: Callable[[], int]
    which: Callable[[int, int], int]
    taken: Callable[[int], int]
    lock: Callable[[int, bytes], None]


def allocator() -> Allocator | None:
    """The allocator, built and installed when this is first called; None where that cannot be.

    Raises `ArgumentError` for another value of ``TENSORWIRE_BIRTH`` than ``on`` and ``off``.
    """
    found = _found()
    return found if isinstance(found, Allocator) else None


def why_not() -> str | None:
    """Why there is no allocator, in one line; None if there is one."""
    found = _found()
    return found if isinstance(found, str) else None


@functools.cache
def _found() -> Allocator | str:
    return _find()


def _find() -> Allocator | str:
    """Looks for it anew: the allocator, or why there is none."""
    if (switch := os.environ.get(SWITCH, "on")) not in ("on", "off"):
        raise ArgumentError(f"{SWITCH} must be on or off, not {switch!r}")
    if switch == "off":
        return f"{SWITCH}=off"
    try:
        library = _load(_path())
    except Unsupported as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or _SOURCE.name}: {error.strerror or error}"
    if library.install() != 0:
        return f"torch {torch.__version__} does not take another allocator"
    library.which.argtypes, library.which.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int64
    library.taken.argtypes = (ctypes.c_void_p,)
    library.lock.argtypes, library.lock.restype = (ctypes.c_void_p, ctypes.c_char_p), None
    # begin and end have no argtypes: ints and bytes go over faster without.
    return Allocator(library.begin, library.end, library.which, library.taken, library.lock)


def _flags() -> list[str]:
    # torch.utils.cpp_extension knows these too, but needs setuptools, which is not everywhere.
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return [
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", abi),
        *(f"-I{root / 'include'}", str(_SOURCE), f"-L{root / 'lib'}", "-lc10"),
    ]


def _tag() -> str:
    """Names what a build depends on. Python is not of it."""
    facts = [torch.__version__, str(torch.version.git_version), platform.machine(), *_flags()]
    return hashlib.sha256(_SOURCE.read_bytes() + "\0".join(facts).encode()).hexdigest()[:16]


def _path() -> Path:
    """Where the build for this torch is, or will be."""
    return _folder() / f"birth-{_tag()}.so"


def _folder() -> Path:
    """Where builds are kept: what lies there is run, so only this user may write there."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        raise Unsupported("this user has no home folder: set XDG_CACHE_HOME") from None
    folder = Path(base) / "tensorwire" / "birth"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise Unsupported(f"cannot make {folder}: {error.strerror}; set XDG_CACHE_HOME") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Unsupported(f"others can write to {folder}: chmod 700 it, or set XDG_CACHE_HOME")
    return folder


def _load(path: Path) -> ctypes.PyDLL:
    """Loads the build at ``path``, which is made first if it is not there or cannot be loaded."""
    if path.exists():
        with contextlib.suppress(OSError):
            return ctypes.PyDLL(str(path))
        path.unlink(missing_ok=True)
    try:
        with _one_at_a_time(path.with_name("lock")):
            if not path.exists():  # another process may have made it meanwhile
                _build(path)
    except OSError as error:
        raise Unsupported(f"cannot write to {path.parent}: {error.strerror}; set XDG_CACHE_HOME") from None
    try:
        return ctypes.PyDLL(str(path))
    except OSError as error:
        raise Unsupported(f"cannot be loaded: {error}") from None


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Lets one process of this user build; the others wait for it, but not longer than a build may take."""
    end = time.monotonic() + _BUILD_SECONDS
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks: two builds do no harm
                break
            else:
                break
        yield
    finally:
        os.close(fd)


def _build(path: Path) -> None:
    """Compiles; ``path`` is there when it is whole, or not at all. Raises `Unsupported` with the compiler's words."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    fd, fresh = tempfile.mkstemp(dir=path.parent, suffix=".new")
    os.close(fd)
    try:
        status, said = _run([*compiler, *_flags(), "-o", fresh])
        if status != 0:
            lines = said.strip().splitlines() or [f"status {status}"]
            raise Unsupported(f"{compiler[0]} could not build {_SOURCE.name}: {lines[-1].strip()}")
        with open(fresh, "rb") as file:
            os.fsync(file)
        Path(fresh).replace(path)
    finally:
        Path(fresh).unlink(missing_ok=True)


def _run(command: list[str]) -> tuple[int, str]:
    """Status and errors of a compiler. It has a session of its own, so that its children end with it."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise Unsupported(f"no compiler: {command[0]}: {error.strerror}; install g++, or set CXX") from None
    try:
        try:
            said = process.communicate(timeout=_QUIET_SECONDS)[1]
        except subprocess.TimeoutExpired:
            print(
                f"tensorwire: building {_SOURCE.name} once for torch {torch.__version__}", file=sys.stderr, flush=True
            )
            said = process.communicate(timeout=_BUILD_SECONDS)[1]
    except subprocess.TimeoutExpired:
        raise Unsupported(f"{command[0]} took longer than {_BUILD_SECONDS:g} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stderr is not None
        process.stderr.close()
    return process.returncode, said.decode(errors="replace")
