"""A job's folder as a mount of this machine, for programs as they are: by libfuse, through mfusepy.

The mount's source in /proc/mounts names the process that serves it: so a mount whose process was killed, or does not
answer, can be told from one that works, and taken away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tensorwire.errors import ArgumentError, MissingPackage, Unsupported
from tensorwire.extras import how_to_install
from tensorwire.files.folder import Folder
from tensorwire.launch.start import module_command

KIND = "tensorwire"
_LIBRARY = "libfuse 3, such as of Debian's package fuse3"
_DEVICE = Path("/dev/fuse")
_HELPER = "fusermount3"
_DETACH = 2  # MNT_DETACH of umount2(2)
_NOSUID_NODEV = 2 | 4  # MS_NOSUID, MS_NODEV of mount(2)
_IN_CONTAINERS = f"containers need --device {_DEVICE} --cap-add SYS_ADMIN"
_LOOK_SECONDS = 5.0  # that a mount which works may take to say so
_END_SECONDS = 10.0  # that one may take to go
_THREADS = 10  # that wait for the kernel at most
_SIGNALLED = 8  # the status of libfuse after a signal, which ends it in good order
_ATTRIBUTE_SECONDS = 1.0  # that the kernel keeps sizes and times of a file that it has found


def check_can_mount() -> str:
    """How this process can mount: in words. Raises `MissingPackage`, or `Unsupported` with what to do."""
    try:
        import mfusepy
    except ModuleNotFoundError:
        raise MissingPackage(f"tensorwire mount needs the package mfusepy: {how_to_install('files')}") from None
    except (OSError, RuntimeError) as error:
        raise Unsupported(f"tensorwire mount needs {_LIBRARY}: {error}") from None
    if mfusepy.fuse_version_major != 3:
        raise Unsupported(f"tensorwire mount needs {_LIBRARY}: only libfuse {mfusepy.fuse_version_major} is here")
    if not _DEVICE.exists():
        raise Unsupported(f"there is no {_DEVICE}: load the module (modprobe fuse); {_IN_CONTAINERS}")
    if os.geteuid() == 0:
        _try_mount()
        return "yes: as root"
    helper = shutil.which(_HELPER)
    if helper is None:
        raise Unsupported(f"users other than root mount by {_HELPER}, such as of Debian's package fuse3")
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        raise Unsupported(f"this user may not open {_DEVICE}: chmod 0666 {_DEVICE}, as most systems have it")
    return f"yes: by {helper}"


def _try_mount() -> None:
    """Mounts a folder that nobody serves, and takes it away: containers may be root and not allowed to."""
    library = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory() as at:
        try:
            fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unsupported(f"cannot open {_DEVICE}: {error.strerror}: {_IN_CONTAINERS}") from None
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
        failed = library.mount(b"tensorwire-probe", os.fsencode(at), b"fuse", _NOSUID_NODEV, options)
        number = ctypes.get_errno()
        library.umount2(os.fsencode(at), _DETACH)
        os.close(fd)
    if failed:
        raise Unsupported(f"root may not mount here: {os.strerror(number)}: {_IN_CONTAINERS}")


class _Mounted(NamedTuple):
    """A mount of ours: of which job, and by which process."""

    job: str
    process: int


def _mounted(folder: Path) -> _Mounted | str | None:
    """What is mounted there: ours, the kind of something else, or nothing. Does not touch the folder itself."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if _plain(left.split()[4]) == str(folder):
            kind, source, *_ = right.split()
            found = re.fullmatch(rf"{KIND}-(\d+):(.*)", _plain(source))
            return _Mounted(found[2], int(found[1])) if found and kind == f"fuse.{KIND}" else kind
    return None


def _plain(word: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), word)


def _answers(folder: Path) -> bool:
    """Whether what is mounted there answers in time; asked by another process, which may wait for ever."""
    asker = subprocess.Popen(["stat", "-f", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asker.wait(_LOOK_SECONDS) == 0
    except subprocess.TimeoutExpired:
        asker.kill()
        return False


def find_folder(name: str, *, recover: bool) -> Path:
    """Where to mount: an empty folder, which is made where it is missing.

    ``recover``: takes away what a process that was killed, or does not answer, has mounted there.

    Raises `ArgumentError`.
    """
    given = Path(os.path.abspath(name))  # noqa: PTH100  # what is mounted there may not answer
    folder = given.parent.resolve() / given.name
    found = _mounted(folder)
    if isinstance(found, str):
        raise ArgumentError(f"{folder} is a mount of {found}: choose another folder")
    if isinstance(found, _Mounted):
        if _answers(folder):
            raise ArgumentError(f"{folder} shows job {found.job} already: umount {folder}")
        if not recover:
            raise ArgumentError(f"{folder} has what a process that is gone, or stopped, had mounted: use --recover")
        _take_away(folder, found)
    try:
        folder.mkdir(exist_ok=True)
        if any(folder.iterdir()):
            raise ArgumentError(f"{folder} is not empty: mount on an empty folder")
    except OSError as error:
        raise ArgumentError(f"cannot mount on {folder}: {error.strerror}") from None
    return folder


def _take_away(folder: Path, found: _Mounted) -> None:
    """Ends a mount whose process does not answer; whoever waits for it gets an error."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{found.process}/cmdline").read_bytes()
        if KIND.encode() in words and b"mount" in words:
            os.kill(found.process, signal.SIGKILL)
    end = time.monotonic() + _END_SECONDS
    while _mounted(folder) is not None:
        unmount(folder)
        if time.monotonic() >= end:
            raise ArgumentError(f"cannot take {folder} away: umount -l {folder}")
        time.sleep(0.05)


def unmount(folder: Path) -> None:
    """Takes a mount away; open files of it stay open."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).umount2(os.fsencode(folder), _DETACH)
    else:
        subprocess.run([_HELPER, "-u", "-z", folder], stderr=subprocess.DEVNULL, check=False)


def serve(folder: Folder, at: Path, ready: Callable[[], object]) -> None:
    """Mounts the folder, and returns when it was unmounted, by whomever, or the job has ended.

    Call it in the main thread. ``ready()``: called once other programs see it. Raises `Unsupported` where the kernel
    refuses.
    """
    from tensorwire.files.operations import Mount, Operations, drop_all

    operations = Operations(folder, ready)
    over = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        while not over.is_set():
            if folder.ended.wait(0.5):
                signal.pthread_kill(main, signal.SIGTERM)  # libfuse's own handler: it unmounts, and returns
                over.wait(1.0)

    watcher = threading.Thread(target=watch, name="end of the job", daemon=True)
    watcher.start()
    try:
        Mount(
            operations,
            str(at),
            raw_fi=True,
            foreground=True,
            nothreads=False,
            fsname=f"{KIND}-{os.getpid()}:{folder.job}",
            subtype=KIND,
            max_idle_threads=_THREADS,  # libfuse 3.12 to 3.14 complain of their own default
            entry_timeout=0,
            attr_timeout=_ATTRIBUTE_SECONDS,
            negative_timeout=0,
        )
    except RuntimeError as error:
        if error.args != (_SIGNALLED,):
            raise Unsupported(f"libfuse cannot mount on {at} (status {error}): see tensorwire doctor") from None
    finally:
        over.set()
        drop_all(operations)
        if _mounted(at) is not None:
            unmount(at)


def in_background(arguments: list[str]) -> int:
    """Runs ``tensorwire mount`` with these arguments in a process of its own; returns once it is mounted.

    Returns its exit status where it has ended instead, after it has said why.
    """
    theirs, ours = os.pipe()
    child = subprocess.Popen(
        module_command("tensorwire.cli", "mount", *arguments, "--ready", ours),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[ours],
        start_new_session=True,
    )
    os.close(ours)
    with open(theirs, "rb") as said:
        mounted = said.read(1)
    return 0 if mounted else child.wait()


def say_ready(fd: int) -> None:
    """In that process: it is mounted, and lets go of its parent's terminal and folder."""
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    os.write(fd, b"1")
    os.close(fd)
