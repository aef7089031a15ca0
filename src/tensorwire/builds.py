"""Programs and libraries that are compiled on this machine: once, by one process, and kept in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tensorwire.errors import Unsupported

_BUILD_SECONDS = 300.0


def cache_folder() -> Path:
    """Where this user's programs keep what can be made again. Raises `OSError` where there is no such place."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tensorwire"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


def build_folder(kind: str) -> Path:
    """Where builds of a kind are kept: they are run, so only this user may write there. Raises `Unsupported`."""
    try:
        folder = cache_folder() / kind
    except OSError:
        raise Unsupported("this user has no home folder: set XDG_CACHE_HOME") from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise Unsupported(f"cannot make {folder}: {error.strerror}; set XDG_CACHE_HOME") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Unsupported(f"others can write to {folder}: chmod 700 it, or set XDG_CACHE_HOME")
    return folder


def build(
    kind: str,
    source: Path,
    words: Sequence[str],
    announced: Callable[[], AbstractContextManager[object]],
    *,
    headers: Iterable[Path] = (),
    facts: Iterable[str] = (),
) -> Path:
    """Compiles ``source``, unless the cache has a build of the same.

    Args:
        kind: Names the folder of the cache.
        source: The program or library, in C or C++.
        words: The compiler's arguments, except for where the build goes.
        announced: Makes the context that the compiler runs in, such as that of `progress`.
        headers: Other files that the build depends on.
        facts: What else it depends on, such as a version.

    Returns:
        The file, which is whole.

    Raises:
        Unsupported: There is no compiler, it fails, or there is no place for builds.
    """
    texts = [platform.machine(), *words, *facts]
    told = [source.read_bytes(), *(path.read_bytes() for path in headers), *(text.encode() for text in texts)]
    tag = hashlib.sha256(b"\0".join(told)).hexdigest()[:16]
    path = build_folder(kind) / f"{source.stem}-{tag}{'.so' if '-shared' in words else ''}"
    if path.exists():
        return path
    try:
        with _one_at_a_time(path.with_name("lock")):
            if not path.exists():  # another process may have made it meanwhile
                with announced():
                    _compile(path, source, words)
    except OSError as error:
        raise Unsupported(f"cannot write to {path.parent}: {error.strerror}; set XDG_CACHE_HOME") from None
    return path


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


def _compile(path: Path, source: Path, words: Sequence[str]) -> None:
    """``path`` is there when it is whole, or not at all. Raises `Unsupported` with the compiler's words."""
    variable, usual = ("CC", "cc") if source.suffix == ".c" else ("CXX", "g++")
    compiler = shlex.split(os.environ.get(variable, "")) or [usual]
    fd, fresh = tempfile.mkstemp(dir=path.parent, suffix=".new")
    os.close(fd)
    try:
        try:
            status, said = _run([*compiler, *words, "-o", fresh])
        except OSError as error:
            why = f"no compiler: {compiler[0]}: {error.strerror}; install gcc and g++, or set {variable}"
            raise Unsupported(why) from None
        if status != 0:
            lines = said.strip().splitlines() or [f"status {status}"]
            error_line = next((line for line in lines if "error" in line), lines[-1])
            raise Unsupported(f"{compiler[0]} could not build {source.name}: {error_line.strip():.300}")
        with open(fresh, "rb") as file:
            os.fsync(file)
        Path(fresh).replace(path)
    finally:
        Path(fresh).unlink(missing_ok=True)


def _run(command: list[str]) -> tuple[int, str]:
    """Status and errors of a compiler. It has a session of its own, so that its children end with it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
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
