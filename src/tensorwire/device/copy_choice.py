"""The fastest copy on this processor by number of bytes: measured once, and kept for later processes.

The kernels are in the native core. Without a setting or a measurement, streaming stores are used from 16 MiB on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tensorwire import _native
from tensorwire.builds import cache_folder
from tensorwire.errors import ArgumentError
from tensorwire.sizes import size_text

VARIABLE = "TENSORWIRE_COPY"
SECONDS = 0.09  # how long a measurement may take
LEAST = 64 << 10  # below, every copy is memcpy
_FORMAT = 2  # of the file; grows with every change of the kernels, too
_AS_FAST = 1.05  # what is slower by less keeps its place: memcpy, whose bytes stay in the caches, has the first one
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_STEP = re.compile(r"(memcpy|movsb|streaming)(?::(\d+)(KiB|MiB|GiB))?", re.ASCII)
_IDENTITY = ("model name", "cpu family", "model", "stepping", "cache size")

Kernel = Literal["memcpy", "movsb", "streaming"]
Steps = list[tuple[int, Kernel]]  # from so many bytes on
KERNELS: tuple[Kernel, ...] = ("memcpy", "movsb", "streaming")


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """The file."""

    format: int
    processor: str
    quiet: bool  # the machine, then
    steps: Steps


_lock = threading.Lock()
_origin = ""  # of the choice of this process; empty: none was made
_MEASURED, _BUSY = "measured on this processor", "measured on this processor while it was busy"


def choose_copy() -> bool:
    """Makes this process use what the environment sets, or was measured before; whether there is such a choice.

    Raises:
        ArgumentError: The setting is wrong.
    """
    global _origin
    with _lock:
        if _origin:
            return True
        if setting := os.environ.get(VARIABLE, ""):
            _native.set_copy_steps(parse(setting))
            _origin = f"set by {VARIABLE}"
        elif kept := _read():
            _native.set_copy_steps(kept.steps)
            _origin = _MEASURED if kept.quiet else _BUSY
        return bool(_origin)


def measure_copy() -> None:
    """Measures, unless there is a choice or another process is at it. Keeps it; without such a place, does nothing.

    What was measured on a busy machine is measured once more on a quiet one. Raises as `choose_copy`.
    """
    global _origin
    choose_copy()
    with contextlib.suppress(OSError, MemoryError):
        quiet = os.getloadavg()[0] <= len(os.sched_getaffinity(0)) / 4
        wanting = ("", _BUSY) if quiet else ("",)
        if _origin not in wanting:
            return
        with _only_one():
            _origin = ""  # another process may have kept something meanwhile
            choose_copy()
            if _origin in wanting and (timed := _native.time_copies(SECONDS)):
                _write(_Kept(_FORMAT, processor(), quiet, _fastest(timed)))
                _origin = ""
                choose_copy()


def measure_copy_aside() -> threading.Thread | None:
    """The same in a thread that gives way to all others. Raises as `choose_copy`."""
    if choose_copy():
        return None
    thread = threading.Thread(target=_measure_last, name="tensorwire-copy", daemon=True)
    thread.start()
    return thread


def _measure_last() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    measure_copy()


def described() -> str:
    """The choice of this process, for people: ``memcpy, streaming from 16 MiB (measured on this processor)``."""
    steps = [f"{kernel} from {size_text(nbytes)}" for nbytes, kernel in _native.copy_steps()]
    return f"{', '.join(['memcpy', *steps])} ({_origin or 'not measured yet'})"


def parse(text: str) -> Steps:
    """The steps of ``memcpy`` or ``movsb:2MiB,streaming:16MiB``. Raises `ArgumentError`."""
    found = [_STEP.fullmatch(part.strip()) for part in text.split(",")]
    steps: Steps = [(int(m[2]) * _UNITS[m[3]], m[1]) for m in found if m and m[2]]  # type: ignore[misc]
    if text.strip() == "memcpy":
        return []
    if len(steps) != len(found) or not _are_sound(steps):
        raise ArgumentError(
            f"{VARIABLE}={text!r}: write memcpy, or kernels (memcpy, movsb, streaming) with growing sizes from 64KiB "
            "on, such as streaming:16MiB or movsb:2MiB,streaming:8MiB"
        )
    return steps


def _are_sound(steps: Steps) -> bool:
    sizes = [LEAST - 1, *(nbytes for nbytes, _ in steps), 2**62]
    return all(one < other for one, other in itertools.pairwise(sizes))


def _fastest(timed: Sequence[tuple[int, Sequence[float]]]) -> Steps:
    """The steps that times say: of each number of bytes, the seconds by kernel."""
    steps: Steps = []
    for nbytes, seconds in timed:
        by_kernel = dict(zip(KERNELS, seconds, strict=True))
        best = min(KERNELS, key=by_kernel.__getitem__)
        if by_kernel[steps[-1][1] if steps else "memcpy"] > by_kernel[best] * _AS_FAST:
            steps.append((nbytes, best))
    if steps and steps[-1][1] == "movsb":  # beyond the caches it is slow: the C library knows their size
        steps.append((2 * timed[-1][0], "memcpy"))
    return steps


# ---- the file


def processor() -> str:
    """What tells this processor from others."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    told = dict(line.split("\t", 1) for line in text.partition("\n\n")[0].splitlines() if "\t" in line)
    return ", ".join(told[name].strip("\t: ") for name in _IDENTITY if name in told) or os.uname().machine


def _file() -> Path:
    """One for each kind of processor: machines may share the folder."""
    return cache_folder() / f"copy-{hashlib.sha256(processor().encode()).hexdigest()[:12]}.json"


def _read() -> _Kept | None:
    """What was kept; None where nothing was, or not by us, or of another format or processor."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        fd = os.open(_file(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            data = os.read(fd, 4096) if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else b""
        finally:
            os.close(fd)
        kept = msgspec.json.decode(data, type=_Kept)
        if (kept.format, kept.processor) == (_FORMAT, processor()) and _are_sound(kept.steps):
            return kept
    return None


def _write(kept: _Kept) -> None:
    path = _file()
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(kept))
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Raises `OSError` where another process measures, or nothing can be kept."""
    folder = _file().parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "copy.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
