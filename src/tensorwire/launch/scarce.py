"""Limits of this machine that can stop a job: descriptors, threads, processes, memory, and file sizes."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from tensorwire.errors import OutOfMemory

# What a launcher has open beside its children: listeners, event loops, the guard, and what starting a process takes.
_OWN = 13
_SMALLEST_FILE = 1 << 16
_WHY = {
    errno.EMFILE: "this process may open no more files: raise ulimit -n (now {nofile})",
    errno.ENFILE: "this machine can open no more files: see fs.file-max",
    errno.EAGAIN: "no more processes or threads can be started: see ulimit -u and the limits of the container",
    errno.ENOMEM: "there is no memory left: see ulimit -v and the limits of the container",
    errno.EFBIG: "files may not grow so large, and regions are files in memory: raise ulimit -f",
}


def check_limits(*, workers: int, servers: int, others: int) -> None:
    """Refuses a job that this launcher could not start, or whose processes would all fail for the same reason.

    Args:
        workers: How many workers start here.
        servers: How many servers start here.
        others: How many processes of other machines connect here.

    Raises:
        OutOfMemory: ``ulimit -n`` or ``ulimit -f`` is too low.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each has a connection and two pipes, and a server a leash.
    need = len(list(Path("/proc/self/fd").iterdir())) + _OWN + 3 * workers + 4 * servers + others
    if most != resource.RLIM_INFINITY and most < need:
        raise OutOfMemory(f"the launcher opens {need} files for this job: raise ulimit -n (now {most})")
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < _SMALLEST_FILE:
        raise OutOfMemory(f"regions are files in memory: raise ulimit -f (now {most} bytes)")


def scarcity(error: BaseException) -> str:
    """What was too scarce, in one line that says what to do; empty if ``error`` means something else."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        number = errno.EAGAIN
    return _WHY.get(number or 0, "").format(nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@contextlib.contextmanager
def as_out_of_memory() -> Iterator[None]:
    """Raises `OutOfMemory`, in one line, for errors that mean that this machine has no more of something."""
    try:
        yield
    except OutOfMemory:
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        why = scarcity(error)
        if not why:
            raise
        raise OutOfMemory(why) from None
