"""The files of versions on this machine: a folder of the job in memory, and a file for each snapshot buffer.

::

    /dev/shm/tensorwire-UID-JOB/      only this user enters it
        owner                         locked by the server that keeps the folder
        job                           how readers of this user find the job: its address and secret
        buffers/STORE-N               one file a buffer
        STORE/COUNTER/model.safetensors   a published version: another name of a buffer's file
        STORE/current -> COUNTER      the newest

The file of a buffer stays the same, so that filling it costs one copy. It is filled only while nobody else has it open
or mapped, by the kernel's account: a write lease is granted then and only then. Servers share the one open file
description that is made here, because every other would count as a reader.

Where /dev/shm is too small, a buffer is a file without a name, and its names are links to /proc/PID/fd/N.

The kernel does not count bytes that ``sendfile`` or ``splice`` have put into a socket or a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from tensorwire._native import FileMap
from tensorwire.errors import ArgumentError, OutOfMemory
from tensorwire.sizes import counted, size_text

MEMORY = Path("/dev/shm")
MODEL = "model.safetensors"
CURRENT = "current"
_OWNER = "owner"
_JOB = "job"
BUFFERS = "buffers"
_NO_LENGTH = bytes(8)
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


def _prefix() -> str:
    return f"tensorwire-{os.getuid()}-"


def job_folder(job: str) -> Path:
    """The folder of a job on this machine."""
    return MEMORY / f"{_prefix()}{job}"


def living_jobs() -> list[str]:
    """The jobs of this user on this machine that have such a folder."""
    return sorted(folder.name.removeprefix(_prefix()) for folder in _folders() if _is_kept(folder))


def find_job(job: str) -> tuple[str, bytes]:
    """The address and the secret of a job of this user on this machine. Raises `ArgumentError` where there is none."""
    try:
        address, secret = (job_folder(job) / _JOB).read_text().split()
    except (OSError, ValueError):
        jobs = living_jobs()
        there = f"{', '.join(jobs) or 'none'} {'do' if len(jobs) > 1 else 'does'}"
        raise ArgumentError(f"no job {job!r} of this user publishes versions on this machine ({there})") from None
    return address, secret.encode()


def remove_left(job: str | None = None) -> None:
    """Removes folders that nobody keeps any more, because their server was killed: of ``job``, or of all jobs."""
    for folder in _folders() if job is None else [job_folder(job)]:
        if folder.is_dir() and not _is_kept(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _folders() -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        for folder in MEMORY.iterdir():
            if folder.name.startswith(_prefix()) and not folder.is_symlink() and folder.is_dir():
                yield folder


def _is_kept(folder: Path) -> bool:
    """Whether the server that made it lives."""
    try:
        fd = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


_kept: dict[str, JobFolder] = {}  # by this process
_lock = threading.Lock()


class JobFolder:
    """The folder of this job, kept by this process until ``close()`` of as many stores as have opened it."""

    def __init__(self, job: str, address: str, secret: bytes) -> None:
        self._job, self._stores = job, 0
        self.path = job_folder(job)
        hidden = self.path.with_name(f".{self.path.name}")  # until it is locked: others take it for one that was left
        hidden.mkdir(mode=0o700)
        self._fd = os.open(hidden / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        (hidden / BUFFERS).mkdir(mode=0o700)
        fd = os.open(hidden / _JOB, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(f"{address}\n{secret.decode()}\n")
        hidden.rename(self.path)

    @classmethod
    def open(cls, job: str, address: str, secret: bytes) -> JobFolder:
        """That of ``job``; made by the first store. What killed jobs have left is removed on the way."""
        remove_left()
        with _lock:
            found = _kept.get(job)
            if found is None:
                found = _kept[job] = cls(job, address, secret)
            found._stores += 1
            return found

    def close(self) -> None:
        """A store is done with it; the last one removes it."""
        with _lock:
            self._stores -= 1
            if not self._stores:
                del _kept[self._job]
                shutil.rmtree(self.path, ignore_errors=True)
                os.close(self._fd)


class VersionFiles:
    """``count`` buffers of ``nbytes`` for versions of ``store``, and the names under which these are published.

    ``folder`` is closed with them. Raises `OutOfMemory` where the memory is not there: before step 1, never by a SIGBUS
    later.
    """

    def __init__(self, folder: JobFolder, store: str, nbytes: int, count: int) -> None:
        self._folder = folder
        self.path = self._folder.path / store.replace("/", "-")
        self._names = [self._folder.path / BUFFERS / f"{self.path.name}-{number}" for number in range(count)]
        self._published: dict[int, Path] = {}
        self.descriptors: list[int] = []
        try:
            self.path.mkdir(mode=0o700)
            for name in self._names:
                self.descriptors.append(_in_folder(name, nbytes) or _without_name(name, nbytes, count))
        except BaseException:
            self.close()
            raise

    def publish(self, number: int, counter: int, time: int) -> Path:
        """Readers find the buffer's file under the version's name, and by ``current``. Returns the version's folder.

        ``time``: what the file says of when it was changed, in nanoseconds since the epoch.
        """
        os.utime(self.descriptors[number], ns=(time, time))
        hidden, folder = self.path / f".{counter}", self.path / str(counter)
        hidden.mkdir(mode=0o700)
        os.link(self._names[number], hidden / MODEL, follow_symlinks=False)
        hidden.rename(folder)
        link = self.path / f".{CURRENT}"
        link.symlink_to(str(counter))
        link.rename(self.path / CURRENT)
        self._published[number] = folder
        return folder

    def withdraw(self, number: int) -> None:
        """From now on nobody finds the buffer's file. Who has it keeps it. Idempotent."""
        folder = self._published.pop(number, None)
        if folder is not None:
            (folder / MODEL).unlink()
            folder.rmdir()

    def take(self, number: int) -> bool:
        """Whether nobody else has the buffer's file open or mapped. If so, it has no version any more.

        Who has found the file's name before `withdraw`, and opens it only now, waits for the lease, and finds a header
        of no length: it takes the file for none, and has not opened one that changes.
        """
        fd = self.descriptors[number]
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # who opens it this very moment: a signal that does nothing
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        os.pwrite(fd, _NO_LENGTH, 0)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def close(self) -> None:
        """No name is left. Who has a file keeps it. Idempotent."""
        if self._folder is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for name in self._names:
            name.unlink(missing_ok=True)
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []
        self._folder.close()
        self._folder = None  # type: ignore[assignment]


def _in_folder(name: Path, nbytes: int) -> int | None:
    """The descriptor of a new file there; None: there is no room for it."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    try:
        _reserve(fd, nbytes)
        return fd
    except OSError as error:
        os.close(fd)
        name.unlink()
        if error.errno not in _NO_ROOM:
            raise
        return None


def _without_name(name: Path, nbytes: int, count: int) -> int:
    """The descriptor of a file of the kernel's own, which no folder's size limits; ``name`` becomes a link to it."""
    first = os.memfd_create(name.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _reserve(first, nbytes)
        os.fchmod(first, 0o400)
        fcntl.fcntl(first, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        fd = os.open(f"/proc/self/fd/{first}", os.O_RDWR | os.O_CLOEXEC)  # the first is never leased
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise OutOfMemory(
            f"publish= needs {counted(count, 'snapshot buffer')} of {size_text(nbytes)}, and there is no room for "
            f"them, neither in {MEMORY} nor elsewhere in memory: {error.strerror}"
        ) from None
    finally:
        os.close(first)
    name.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    return fd


def _reserve(fd: int, nbytes: int) -> None:
    os.posix_fallocate(fd, 0, nbytes)  # a page that is not there would be a SIGBUS later
    FileMap(fd, nbytes, shared=True).make_huge()  # readers map a version for every read: small pages cost a copy's time


def write_header(memory: memoryview, header: bytes) -> None:
    """Makes what a buffer has a version. Its length comes last: until then it has none, for who opens the file now."""
    start = len(_NO_LENGTH)
    memory[start : len(header)] = header[start:]
    memory[:start] = header[:start]


def map_buffer(fd: int, nbytes: int) -> memoryview:
    """The memory of a buffer, to be filled."""
    return memoryview(FileMap(fd, nbytes, shared=True))


def map_version(path: Path, nbytes: int) -> memoryview:
    """A version's file; changes are this process's own. Raises `FileNotFoundError`, also for one that is filled now."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = memoryview(FileMap(fd, nbytes, shared=False))
    finally:
        os.close(fd)
    if memory[: len(_NO_LENGTH)] == _NO_LENGTH:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return memory
