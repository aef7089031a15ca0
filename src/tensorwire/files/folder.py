"""A job's folder for programs in Python, with the calls that they know from `os`."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar, cast

from tensorwire.errors import ArgumentError
from tensorwire.files.held_versions import HeldVersions
from tensorwire.files.os_errors import as_os_errors
from tensorwire.files.push_file import PushFile
from tensorwire.files.tree import Directory, FileSpan, Link, Node, Pushes, Real, Status, Text, Tree
from tensorwire.files.version_file import VersionFile
from tensorwire.launch.published import Published, find_published
from tensorwire.store.versions.events import tell_event
from tensorwire.store.versions.version_files import MODEL
from tensorwire.store.writing import KeyWriter

_SECONDS = 60.0
Result = TypeVar("Result")
_READING = ("r", "rb")
_WRITING = ("w", "wb", "r+b", "rb+")


class Folder:
    """What a job publishes, as files and folders. `connect` makes one. Any thread may use it. A context manager.

    Paths are relative to it: ``params/layer.weight``. One that begins with ``model.safetensors`` or ``params`` is of
    the version that is the newest when it is opened. Errors are those of files: `OSError` with the number that fits,
    such as ``ENODEV`` after the job's end.

    Attributes:
        tree (Tree): What is at which path.
    """

    def __init__(self, published: Published, timeout: float = _SECONDS) -> None:
        self._published, self._timeout = published, timeout
        self._versions = HeldVersions(published)
        self.tree = Tree(published, self._versions)
        self._closed = False

    @property
    def job(self) -> str:
        """The job's name."""
        return self._published.member.client.welcome.job

    @property
    def is_local(self) -> bool:
        """Whether versions are files of this machine."""
        return self.tree.local is not None

    @property
    def nbytes(self) -> int:
        """The size of a version's file in bytes."""
        return self._published.layout.nbytes

    @property
    def ended(self) -> threading.Event:
        """Set when the job has ended."""
        return self._published.member.client.ended

    # ---- what os has

    def listdir(self, path: str = "") -> list[str]:
        """The names in a folder.

        Args:
            path: The folder; by default all of it.

        Returns:
            The names, sorted.

        Raises:
            OSError: There is no such folder, or the job has ended.
        """
        with as_os_errors(path):
            node = self._follow(path)
            if isinstance(node, Real):
                return sorted(entry.name for entry in node.path.iterdir())
            if not isinstance(node, Directory):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            return sorted(node.names())

    def stat(self, path: str) -> Status:
        """What is known of a file or folder; links are followed.

        Args:
            path: The file.

        Returns:
            Its kind, size, time and version.

        Raises:
            OSError: There is no such file, or the job has ended.
        """
        with as_os_errors(path):
            return self._of_newest(path, lambda _, node: self.tree.status(node))

    def lstat(self, path: str) -> Status:
        """As `stat`, of a link itself.

        Args:
            path: The file.

        Returns:
            As `stat`.
        """
        with as_os_errors(path):
            last = self.tree.find(path) if "/" not in path.strip("/") else self._follow(path)
            self._check_open()
            return self.tree.status(last)

    def exists(self, path: str) -> bool:
        """Whether there is something.

        Args:
            path: The file.

        Returns:
            Whether `stat` would tell something of it.
        """
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def realpath(self, path: str) -> str:
        """The path that names the same version for ever.

        Args:
            path: Such as ``model.safetensors``.

        Returns:
            Such as ``versions/12/model.safetensors``; of a whole version on this machine, its file there, which other
            programs can open.

        Raises:
            OSError: There is no such file, or the job has ended.
        """
        with as_os_errors(path):
            return self._of_newest(path, lambda found, node: self.tree.real_path(found, node) or found)

    def open(self, path: str, mode: str = "rb") -> VersionFile | PushFile | io.IOBase:
        """Opens a file.

        Args:
            path: The file.
            mode: ``"rb"``, or ``"wb"`` below ``push/``; below ``checkpoints/`` any of Python's.

        Returns:
            A `VersionFile`, a `PushFile`, or what Python's own `open` returns.

        Raises:
            OSError: There is no such file, it cannot be opened that way, or the job has ended.
        """
        with as_os_errors(path):
            return self._of_newest(path, lambda found, node: self._open(found, node, mode))

    def _open(self, path: str, node: Node, mode: str) -> VersionFile | PushFile | io.IOBase:
        if isinstance(node, Real):
            return cast("io.IOBase", node.path.open(mode))
        if isinstance(node, Directory):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if isinstance(node, Pushes):
            if mode not in _WRITING:
                raise PermissionError(errno.EACCES, "pushes can only be written: open it with 'wb'", path)
            return self._open_pushes(path, node)
        if mode not in _READING:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if isinstance(node, Text):
            return io.BytesIO(node.content)
        assert isinstance(node, FileSpan)
        return self._open_span(path, node)

    def _open_span(self, path: str, node: FileSpan) -> VersionFile:
        held = self._versions.hold(node.counter)
        try:
            real = self.tree.real_path(path, node)
            return VersionFile(path, real, held, node.head, node.start, self.tree.status(node))
        except BaseException:
            held.close()
            raise

    def _open_pushes(self, path: str, node: Pushes) -> PushFile:
        member = self._published.member
        with member.explained():
            writer = KeyWriter(member, node.store, node.plan, node.tensor, self._timeout)
        return PushFile(path, writer, lambda text: tell_event(member, self._published.store, text))

    def _follow(self, path: str) -> Node:
        return self._of_newest(path, lambda _, node: node)

    def _of_newest(self, path: str, call: Callable[[str, Node], Result]) -> Result:
        """``call`` with a path without links, and what is there; again where that version has gone meanwhile."""
        while True:
            newest = self._versions.newest()
            try:
                return call(*self._resolve(path))
            except FileNotFoundError:
                if self._versions.newest() == newest:
                    raise

    def _resolve(self, path: str) -> tuple[str, Node]:
        """A path without links, and what is there."""
        self._check_open()
        parts = [part for part in path.split("/") if part]
        if ".." in parts or "." in parts:
            parts = [part for part in posixpath.normpath("/" + path).split("/") if part]
        if parts[:1] in ([MODEL], ["params"]):
            link = self.tree.find(parts[0])
            assert isinstance(link, Link)
            parts = [*link.target.split("/"), *parts[1:]]
        path = "/".join(parts)
        return path, self.tree.find(path)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this folder was closed: connect() makes another one")
        client = self._published.member.client
        if client.ended.is_set():
            raise client.error()

    # ---- life

    def close(self) -> None:
        """Leaves the job. Close open files first: those over a network cannot be read any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._published.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def connect(job: str | None = None, *, number: int = 0, timeout: float = _SECONDS) -> Folder:
    """The folder of a job that publishes versions. This process does not join it: the job neither waits for it nor
    misses it.

    Args:
        job: As for ``tw.store.connect``: a name, ``HOST:PORT``, or None for the only one on this machine.
        number: Which of what the job publishes, as for ``tw.store.connect``.
        timeout: Seconds to wait for the job, and for answers of it.

    Returns:
        The folder; ``close()`` it when it is no longer needed.

    Raises:
        ArgumentError, AuthenticationError, PeerLost, WaitTimeout, JobEnded: As ``tw.store.connect``.
    """
    return Folder(find_published(job, number, timeout, patient=True), timeout)


def open(path: str, mode: str = "rb", *, timeout: float = _SECONDS) -> VersionFile | PushFile | io.IOBase:
    """Opens a file of a job: connects, opens, and disconnects when it is closed.

    Args:
        path: ``JOB/PATH``, such as ``JOB/params/layer.weight``; JOB as for `connect`.
        mode: As for `Folder.open`.
        timeout: As for `connect`.

    Returns:
        As `Folder.open`.

    Raises:
        OSError: ``ENOENT``: there is no such job or file. ``EACCES``: the job has another secret. ``ETIMEDOUT``: it
            publishes nothing. Or as `Folder.open`.
    """
    job, _, rest = path.partition("/")
    try:
        with as_os_errors(path):
            folder = connect(job, timeout=timeout)
    except OSError as error:
        if isinstance(error.__cause__, ArgumentError):
            raise FileNotFoundError(errno.ENOENT, error.strerror, path) from error.__cause__
        raise
    file = None
    try:
        file = folder.open(rest, mode)
        if isinstance(file, (VersionFile, PushFile)):
            file.folder = folder
        return file
    finally:
        if not isinstance(file, (VersionFile, PushFile)):
            folder.close()  # what it says has been read, or is of this machine
