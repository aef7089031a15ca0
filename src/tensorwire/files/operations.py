"""A job's folder as libfuse asks for it. One object a mount; libfuse calls it from several threads."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import mfusepy

from tensorwire.files.folder import Folder
from tensorwire.files.os_errors import as_os_errors
from tensorwire.files.push_file import PushFile
from tensorwire.files.tree import Directory, FileSpan, Link, Node, Pushes, Real, Text
from tensorwire.files.version_file import VersionFile

_EVENTS = "control/events"
_REFUSED = errno.EROFS  # of what would change the folder itself


class Operations(mfusepy.Operations):  # type: ignore[misc]
    """``folder``, and ``ready()``: called once it is mounted.

    What a path below ``versions/`` names never changes, so the kernel may keep its bytes. All else is read anew: an
    open file of ``control/events`` grows, other text is as it was when it was opened.
    """

    use_ns = True

    def __init__(self, folder: Folder, ready: Callable[[], object]) -> None:
        self._folder, self._ready = folder, ready
        self._numbers = itertools.count(1)
        self._open: dict[int, VersionFile | PushFile | bytes | str] = {}
        self._openers: dict[int, int] = {}  # process by open file
        self._lock = threading.Lock()

    def init_with_config(self, connection: Any, settings: Any) -> None:
        """libfuse has begun."""
        self._ready()

    # ---- what there is

    def _find(self, path: str) -> Node:
        if self._folder.ended.is_set():
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), path)
        with as_os_errors(path):
            return self._folder.tree.find(path)

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        """Kind, size, times."""
        node = self._find(path)
        if isinstance(node, Real):
            node = Link(str(node.path))
        with as_os_errors(path):
            found = self._folder.tree.status(node)
        mode, size = found.st_mode, found.st_size
        if isinstance(node, FileSpan) and (real := self._folder.tree.real_path(path.strip("/"), node)):
            mode, size = stat.S_IFLNK | 0o777, len(real)
        return {
            "st_mode": mode,
            "st_size": size,
            "st_nlink": 2 if stat.S_ISDIR(mode) else 1,
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
            "st_blocks": -(-size // 512),
            **dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), found.st_mtime_ns),
        }

    def readlink(self, path: str) -> str:
        """Where a link leads: below this folder, or on this machine."""
        node = self._find(path)
        if isinstance(node, Real):
            return str(node.path)
        if isinstance(node, Link):
            return node.target
        if isinstance(node, FileSpan) and (real := self._folder.tree.real_path(path.strip("/"), node)):
            return real
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    def readdir(self, path: str, fh: Any) -> Iterable[str]:
        """The names in a folder."""
        node = self._find(path)
        if not isinstance(node, Directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        with as_os_errors(path):
            return [".", "..", *sorted(node.names())]

    def statfs(self, path: str) -> dict[str, int]:
        """The size of a version."""
        nbytes = self._folder.nbytes
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": -(-nbytes // 4096), "f_namemax": 255}

    # ---- open files

    def open(self, path: str, info: Any) -> int:
        """Opens a file; what the kernel may keep of it goes into ``info``."""
        name, writes = path.strip("/"), info.flags & os.O_ACCMODE != os.O_RDONLY
        node = self._find(path)
        if isinstance(node, Pushes):
            if info.flags & os.O_ACCMODE != os.O_WRONLY:  # nor may it be mapped
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            if info.flags & os.O_APPEND:
                raise OSError(errno.EINVAL, "a push has a size: nothing can be appended", path)
        elif writes:
            raise OSError(_REFUSED, os.strerror(_REFUSED), path)
        if isinstance(node, Text):
            opened: VersionFile | PushFile | bytes | str = name if name == _EVENTS else node.content
        else:
            file = self._folder.open(name, "wb" if writes else "rb")
            assert isinstance(file, (VersionFile, PushFile))
            opened = file
        info.keep_cache = int(isinstance(opened, VersionFile))
        info.direct_io = int(not isinstance(opened, VersionFile))
        if not isinstance(opened, PushFile) and hasattr(info, "noflush"):
            info.noflush = 1  # else closing it would fail without this process
        with self._lock:
            info.fh = next(self._numbers)
            self._open[info.fh] = opened
            self._openers[info.fh] = mfusepy.fuse_get_context()[2]
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        """Some bytes of text."""
        opened = self._open[info.fh]
        if isinstance(opened, (VersionFile, PushFile)):  # those of versions: `read_into`
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), path)
        if isinstance(opened, str):
            node = self._find(opened)
            opened = node.content if isinstance(node, Text) else b""
        return opened[offset : offset + size]

    def read_into(self, memory: Any, offset: int, info: Any) -> int | None:
        """Fills memory with bytes of a version; None: it is another file."""
        opened = self._open[info.fh]
        return opened.preadinto(memory, offset) if isinstance(opened, VersionFile) else None

    def _pushes(self, info: Any, path: str) -> PushFile:
        opened = self._open.get(info.fh) if info is not None else None
        if not isinstance(opened, PushFile):
            raise OSError(_REFUSED, os.strerror(_REFUSED), path)
        return opened

    def write(self, path: str, data: bytes, offset: int, info: Any) -> int:
        """Some bytes of a push."""
        return self._pushes(info, path).pwrite(data, offset)

    def truncate(self, path: str, length: int, info: Any = None) -> int:
        """A program that replaces a file says so first."""
        node = self._find(path)
        if not isinstance(node, Pushes):
            raise OSError(_REFUSED, os.strerror(_REFUSED), path)
        if info is not None:
            self._pushes(info, path).truncate(length)
        elif length not in (0, node.size):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return 0

    def fsync(self, path: str, datasync: int, info: Any) -> int:
        """Applies a push."""
        opened = self._open.get(info.fh)
        if isinstance(opened, PushFile):
            opened.fsync()
        return 0

    def flush(self, path: str, info: Any) -> int:
        """A descriptor is closed, perhaps not the last one: only who opened the file hears that bytes are missing."""
        opened = self._open.get(info.fh)
        if isinstance(opened, PushFile):
            mine = mfusepy.fuse_get_context()[2] == self._openers[info.fh]
            if opened.complete or mine:
                opened.fsync()
        return 0

    def release(self, path: str, info: Any) -> int:
        """The last descriptor was closed."""
        with self._lock:
            opened = self._open.pop(info.fh)
            del self._openers[info.fh]
        if isinstance(opened, PushFile):
            opened.drop()
        elif isinstance(opened, VersionFile):
            opened.close()
        return 0

    # ---- what does not go

    def access(self, path: str, mode: int) -> int:
        """Whether something may be done. The mount is its user's alone."""
        node = self._find(path)
        if mode & os.W_OK and not isinstance(node, Pushes):
            raise OSError(_REFUSED, os.strerror(_REFUSED), path)
        return 0

    def utimens(self, path: str, times: Sequence[int] | None = None) -> int:
        """Programs that copy set times afterwards: of a push it means nothing."""
        return self._ignore(path)

    def chmod(self, path: str, mode: int, *_: Any) -> int:
        """Likewise."""
        return self._ignore(path)

    def chown(self, path: str, uid: int, gid: int, *_: Any) -> int:
        """Likewise."""
        return self._ignore(path)

    def _ignore(self, path: str) -> int:
        if not isinstance(self._find(path), Pushes):
            self._refuse(path)
        return 0

    def _refuse(self, path: str, *_: Any) -> NoReturn:
        raise OSError(_REFUSED, os.strerror(_REFUSED), path)

    def setxattr(self, path: str, *_: Any) -> int:
        """There are none."""
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)

    removexattr = setxattr
    create = mkdir = mknod = rmdir = unlink = rename = symlink = link = _refuse


class Mount(mfusepy.FUSE):  # type: ignore[misc]
    """Mounts, and returns when it was unmounted.

    The library's own forgets of which open file ``ftruncate`` is, and copies what is read twice more.
    """

    def read(self, path: bytes, buffer: Any, size: int, offset: int, info: Any) -> int:
        """As libfuse calls it."""
        memory = (ctypes.c_ubyte * size).from_address(ctypes.addressof(buffer.contents))
        nbytes: int | None = self.operations.read_into(memory, offset, info.contents)
        return super().read(path, buffer, size, offset, info) if nbytes is None else nbytes

    def truncate_fuse_3(self, path: bytes, length: int, info: Any) -> int:
        """As libfuse calls it."""
        return int(self.operations.truncate(os.fsdecode(path), length, info.contents if info else None))


def drop_all(operations: Operations) -> None:
    """The mount has ended: nothing of open files is applied any more."""
    for number in list(operations._open):
        opened = operations._open.pop(number, None)
        if isinstance(opened, PushFile):
            opened.drop()
        elif isinstance(opened, VersionFile):
            opened.close()
