"""Writes the files that users name: traces, pictures, records, checkpoints.

A regular file is replaced whole, so no reader sees half of it. Anything else, such as a device, a pipe or
``/dev/stdout``, is written to and stays in place. Symbolic links are followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tensorwire.errors import ArgumentError

# How long the reader of a pipe may take for the next few KiB.
PATIENCE_SECONDS = 30.0
_MOST_LINKS = 40
# Where the folder does not let us replace a file, or something is mounted on it, the file itself may be writable.
_IN_PLACE = {errno.EACCES, errno.EPERM, errno.EBUSY}
Writer = Callable[[BinaryIO], object]


def checked_path(path: object) -> Path:
    """What names a file or a folder. Raises `ArgumentError` for what cannot, such as an empty string."""
    try:
        found = Path(path)  # type: ignore[arg-type]
        known = found.name not in ("", "..") and b"\0" not in os.fsencode(found)
    except (TypeError, ValueError):
        known = False
    if not known:
        raise ArgumentError(f"a path must name a file or a folder, and {path!r:.100} does not")
    return found


def check_file(path: str | Path, *, option: str) -> None:
    """Refuses early what `write_file` could not write; changes nothing.

    Args:
        path: Where a file is to be written.
        option: What people gave the path to, such as ``--trace``, for the message.

    Raises:
        ArgumentError: It names a folder, something read-only, or something in a folder that does not exist.
    """
    try:
        why = _refusal(_resolve(Path(path)))
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ArgumentError(f"{option} {path}: {why}")


def write_file(path: str | Path, data: bytes | Writer) -> None:
    """Writes ``data`` to ``path``, which keeps its kind, mode and owner.

    ``data`` may be a function that writes to a file. Then a regular file is on the disk when this returns, and is
    replaced as a whole or not at all.

    Raises:
        OSError: It cannot be written, or is a pipe that nobody reads. A regular file is then as it was before.
    """
    target = _resolve(Path(path))
    if isinstance(target, int):
        for stream in (sys.stdout, sys.stderr):  # what was printed before comes first
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        _pour(target, _bytes(data))
    elif target.is_file() or not target.exists():
        _replace(target, data)
    else:
        _write_into(target, _bytes(data), os.O_NONBLOCK)  # else opening a pipe would wait for a reader


def save_file(path: str | Path, data: bytes, *, option: str) -> None:
    """`write_file` for what people gave ``option``.

    Raises:
        ArgumentError: It cannot be written; the message has the option, the path and the reason.
    """
    try:
        write_file(path, data)
    except OSError as error:
        raise ArgumentError(f"{option} {path}: {error.strerror or error}") from None


def _resolve(path: Path) -> Path | int:
    """What ``path`` leads to: no link, or a descriptor of ours (``/dev/stdout``), whose position prints share."""
    own = f"/proc/{os.getpid()}/fd"
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if folder == own and path.name.isdecimal():
            return int(path.name)
        here = Path(folder) / path.name
        if not here.is_symlink():
            return here
        path = Path(folder) / here.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _refusal(target: Path | int) -> str:
    if isinstance(target, int):
        access = fcntl.fcntl(target, fcntl.F_GETFL) & os.O_ACCMODE
        return "it is open for reading only" if access == os.O_RDONLY else ""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            return f"there is no folder {target.parent}"
        return "" if os.access(target.parent, os.W_OK | os.X_OK) else f"no file can be made in {target.parent}"
    if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode):
        return f"it is a {'folder' if stat.S_ISDIR(mode) else 'socket'}"
    return "" if os.access(target, os.W_OK) else "it cannot be written to"


def _bytes(data: bytes | Writer) -> bytes:
    if isinstance(data, bytes):
        return data
    data(file := io.BytesIO())
    return file.getvalue()


def sync(path: Path) -> None:
    """Returns when a file or a folder is on the disk. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes | Writer) -> None:
    before = path.stat() if path.exists() else None
    part = path.with_name(f".tensorwire-{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if before is not None:
                with contextlib.suppress(OSError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
            if isinstance(data, bytes):
                file.write(data)
            else:
                data(file)
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
        if not isinstance(data, bytes):
            sync(path.parent)
    except OSError as error:
        if before is None or error.errno not in _IN_PLACE or not isinstance(data, bytes):
            raise
        _write_into(path, data, os.O_TRUNC)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _write_into(path: Path, data: bytes, flags: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | flags)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads it") from None
        raise
    try:
        _pour(fd, data)
    finally:
        os.close(fd)


def _pour(fd: int, data: bytes) -> None:
    """Writes all of it, as fast as a reader takes it."""
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    left = memoryview(data)
    while left:
        if not ready.poll(PATIENCE_SECONDS * 1e3):
            raise OSError(errno.ETIMEDOUT, f"nobody has read it for {PATIENCE_SECONDS:g} s")
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(fd, left[: select.PIPE_BUF]) :]  # so much a pipe takes that says it is ready
