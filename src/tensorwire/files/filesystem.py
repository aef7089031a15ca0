"""``tensorwire://JOB/PATH`` for fsspec, and so for what opens files by it: pandas, dask, torch's own checkpoints."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from tensorwire.files.folder import Folder, connect
from tensorwire.files.tree import Status
from tensorwire.files.version_file import VersionFile

_TOGETHER = 8  # ranges that are read at once
_KINDS = {stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


class TensorwireFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The folders of jobs. It can only be read, but for ``push/`` and what is below ``checkpoints/``.

    Where versions are files of this machine, ``fsspec.open_local`` returns the path of a whole one.

    Args:
        number: As for ``tw.files.connect``.
        timeout: As for ``tw.files.connect``.
        **options: Those of fsspec.
    """

    protocol: str = "tensorwire"
    root_marker = ""
    cachable = False  # a connection ends with its object
    local_file = True  # a file that is none of this machine has no name

    def __init__(self, number: int = 0, timeout: float = 60.0, **options: Any) -> None:
        super().__init__(number=number, timeout=timeout, **options)
        self._number, self._timeout = number, timeout
        self._folders: dict[str, Folder] = {}
        self._lock = threading.Lock()
        self._local = LocalFileSystem(auto_mkdir=True)
        weakref.finalize(self, _close_all, self._folders)  # fsspec's file systems are not closed

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return os.fspath(path).removeprefix("tensorwire://").strip("/")

    def _find(self, path: str) -> tuple[Folder, str, str]:
        """The folder of the job, its name, and the path there. Raises `FileNotFoundError` for a path without a job."""
        job, _, rest = self._strip_protocol(path).partition("/")
        if not job:
            raise FileNotFoundError(errno.ENOENT, "say which job: tensorwire://JOB/PATH", path)
        with self._lock:
            found = self._folders.get(job)
            if found is None or found.ended.is_set():
                if found is not None:
                    found.close()
                found = self._folders[job] = connect(job, number=self._number, timeout=self._timeout)
            return found, job, rest

    def _real(self, path: str) -> str:
        """What ``path`` below ``checkpoints/`` is on this machine. Raises `OSError` for others: they are read-only."""
        folder, _, rest = self._find(path)
        if rest.split("/")[0] == "checkpoints":
            return folder.realpath(rest)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def close(self) -> None:
        """Leaves the jobs. Idempotent."""
        with self._lock:
            _close_all(self._folders)

    # ---- reading

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Size, kind, time and version of a file."""
        path = self._strip_protocol(path)
        if not path:
            return {"name": "", "type": "directory", "size": 0}
        folder, _, rest = self._find(path)
        return _info(path, folder.stat(rest))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """What is in a folder."""
        folder, job, rest = self._find(path)
        prefix = f"{job}/{rest}".rstrip("/")
        if stat.S_ISDIR(folder.stat(rest).st_mode):
            names = [f"{prefix}/{name}" for name in folder.listdir(rest)]
        else:
            names = [prefix]
        if not detail:
            return names
        return [self.info(name) for name in names if folder.exists(name.partition("/")[2])]

    def _open(self, path: str, mode: str = "rb", *ignored: Any, **options: Any) -> Any:
        folder, _, rest = self._find(path)
        if rest.split("/")[0] == "checkpoints":
            return self._local.open(self._real(path), mode)
        return folder.open(rest, mode)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Some bytes of a file, or all."""
        with self._open(path) as file:
            if not isinstance(file, VersionFile):
                return bytes(file.read()[start:end])
            first, last, _ = slice(start, end).indices(file.stat().st_size)
            return file.pread(max(0, last - first), first)

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **options: Any,
    ) -> list[Any]:
        """Ranges of files, several at once."""
        count = len(paths)
        starts = list(starts) if isinstance(starts, (list, tuple)) else [starts] * count
        ends = list(ends) if isinstance(ends, (list, tuple)) else [ends] * count
        if not len(starts) == len(ends) == count:
            raise ValueError(f"{count} paths need as many starts and ends, not {len(starts)} and {len(ends)}")

        def read(path: str, start: int | None, end: int | None) -> Any:
            try:
                return self.cat_file(path, start, end)
            except Exception as error:
                if on_error != "return":
                    raise
                return error

        with ThreadPoolExecutor(_TOGETHER) as pool:
            return list(pool.map(read, paths, starts, ends))

    def created(self, path: str) -> datetime:
        """When it was made; of a version, when it was published."""
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        """When it was changed."""
        folder, _, rest = self._find(path)
        return datetime.fromtimestamp(folder.stat(rest).st_mtime, timezone.utc)

    # ---- below checkpoints/

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Makes a folder."""
        self._local.mkdir(self._real(path), create_parents, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder, and those above it."""
        self._local.makedirs(self._real(path), exist_ok)

    def rmdir(self, path: str) -> None:
        """Removes an empty folder."""
        self._local.rmdir(self._real(path))

    def rm_file(self, path: str) -> None:
        """Removes a file; or an empty folder, which fsspec hands over, too."""
        real = self._real(path)
        if self._local.isdir(real):
            self._local.rmdir(real)
        else:
            self._local.rm_file(real)

    _rm = rm_file

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copies a file, also of a version, below ``checkpoints/``."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        target = self._real(path2)
        with self._open(path1) as source, self._local.open(target, "wb") as file:
            while piece := source.read(4 << 20):
                file.write(piece)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Moves a file."""
        self._local.mv(self._real(path1), self._real(path2), **options)


def _close_all(folders: dict[str, Folder]) -> None:
    while folders:
        folders.popitem()[1].close()


def _info(name: str, status: Status) -> dict[str, Any]:
    return {
        "name": name,
        "size": status.st_size,
        "type": _KINDS.get(stat.S_IFMT(status.st_mode), "file"),
        "mode": status.st_mode,
        "mtime": status.st_mtime,
        "version": None if status.version is None else str(status.version),
    }
