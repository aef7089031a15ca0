"""What is at which path of a job's folder.

::

    model.safetensors -> versions/V/model.safetensors   V: the counter of the newest version
    params -> versions/V/params
    versions/V/model.safetensors
    versions/V/params/NAME, NAME.npy
    push/NAME                                           keys in `Async`
    checkpoints/                                        a folder of this machine
    control/                                            text

Whatever a path below ``versions/`` names never changes. It may go.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tensorwire.files.control_files import ControlFiles
from tensorwire.files.file_names import file_name
from tensorwire.files.held_versions import HeldVersions
from tensorwire.launch.published import Published
from tensorwire.store.sharding import StorePlan
from tensorwire.store.versions.sources import Files
from tensorwire.store.versions.version_files import MODEL
from tensorwire.store.versions.version_layout import FileTensor, Manifest, Version
from tensorwire.store.writers import takes_writers

_NPY = ".npy"


class Status(NamedTuple):
    """What is known of a file or folder.

    Attributes:
        st_mode: Its kind and permissions, as of `os.stat_result`.
        st_size: Its size in bytes.
        st_mtime_ns: When it was changed, in nanoseconds since the epoch: of a version, when it was published.
        version: The version that it belongs to; None: to none.
    """

    st_mode: int
    st_size: int
    st_mtime_ns: int
    version: Version | None = None

    @property
    def st_mtime(self) -> float:
        """The same in seconds."""
        return self.st_mtime_ns / 1e9


@dataclass(frozen=True)
class Directory:
    """A folder. ``names()``: of what is in it."""

    names: Callable[[], Iterable[str]]


@dataclass(frozen=True)
class Link:
    """Another path of this folder, or of this machine where it is absolute."""

    target: str


@dataclass(frozen=True)
class FileSpan:
    """``nbytes`` at ``start`` of version ``counter``'s file, behind ``head``."""

    counter: int
    start: int
    nbytes: int
    head: bytes = b""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.nbytes


@dataclass(frozen=True)
class Text:
    """What the job said just now."""

    content: bytes


@dataclass(frozen=True)
class Pushes:
    """Where pushes to ``tensor`` of the store of keys ``store`` go."""

    store: str
    plan: StorePlan
    tensor: int

    @property
    def size(self) -> int:
        """Bytes of the key."""
        return self.plan.tensors[self.tensor].nbytes


@dataclass(frozen=True)
class Real:
    """A file or folder of this machine."""

    path: Path


Node = Directory | Link | FileSpan | Text | Pushes | Real


class Tree:
    """The folder of ``published``. ``versions``: those that files have open."""

    def __init__(self, published: Published, versions: HeldVersions) -> None:
        self._published, self._versions = published, versions
        self._began = time.time_ns()
        self._held = {file_name(name): held for name, held in published.layout.held.items()}
        self._names = {*self._held, *(name + _NPY for name, held in self._held.items() if held.dtype != "bfloat16")}
        self._manifests: dict[int, Manifest] = {}
        self.control = ControlFiles(published, self._newest)
        servers = published.member.client.welcome.servers
        self._pushes: dict[str, Pushes] = {}
        for store, spec in published.spec.parts.items():
            if takes_writers(spec):
                plan = spec.plan(servers)
                self._pushes |= {file_name(t.name): Pushes(store, plan, i) for i, t in enumerate(plan.tensors)}
        checkpoints = published.announcement.checkpoints
        self._checkpoints = Path(checkpoints) if checkpoints and Path(checkpoints).is_dir() else None

    @property
    def local(self) -> Path | None:
        """The folder of this machine that has the versions' files; None: they are on another one."""
        source = self._published.source
        return source.folder if isinstance(source, Files) else None

    # ---- what there is

    def find(self, path: str) -> Node:
        """What is there. Raises `FileNotFoundError` or `NotADirectoryError`, or as versions do."""
        first, *rest = [part for part in path.split("/") if part] or [""]
        if first == "checkpoints" and self._checkpoints is not None:
            return Real(self._checkpoints.joinpath(*rest))
        node = self._first(first, path)
        for at, part in enumerate(rest):
            if not isinstance(node, Directory):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            node = self._below([first, *rest[: at + 1]], part, path)
        return node

    def _first(self, name: str, path: str) -> Node:
        if not name:
            return Directory(self._root)
        if name in (MODEL, "params"):
            return Link(f"versions/{self.need_newest(path)}/{name}")
        if name == "versions":
            return Directory(lambda: map(str, self._versions.kept()))
        if name == "control":
            return Directory(lambda: self.control.names)
        if name == "push" and self._pushes:
            return Directory(lambda: self._pushes)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _root(self) -> list[str]:
        there = ["control", "versions"]
        there += ["checkpoints"] if self._checkpoints is not None else []
        there += ["push"] if self._pushes else []
        there += [MODEL, "params"] if self._versions.newest() else []
        return sorted(there)

    def _below(self, parts: list[str], name: str, path: str) -> Node:
        """What ``name`` is in the folder that the parts before it name."""
        nothing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        first = parts[0]
        if first == "control" and name in self.control.names:
            return Text(self.control.names[name]().encode())
        if first == "push" and name in self._pushes:
            return self._pushes[name]
        if first != "versions":
            raise nothing
        if len(parts) == 2:  # the only look at what is kept: what is below was found by way of this
            if not name.isdecimal() or int(name) not in self._versions.kept() or str(int(name)) != name:
                raise nothing
            return Directory(lambda: (MODEL, "params"))
        counter = int(parts[1])
        if len(parts) == 3 and name == MODEL:
            return FileSpan(counter, 0, self._published.layout.nbytes)
        if len(parts) == 3 and name == "params":
            return Directory(lambda: self._names)
        if len(parts) == 4 and parts[2] == "params" and name in self._names:
            return self._parameter(counter, name)
        raise nothing

    def _parameter(self, counter: int, name: str) -> FileSpan:
        if name in self._held:  # also one that ends in .npy
            held = self._held[name]
            return FileSpan(counter, held.start, held.nbytes)
        held = self._held[name.removesuffix(_NPY)]
        return FileSpan(counter, held.start, held.nbytes, _npy_header(held))

    def real_path(self, path: str, node: Node) -> str:
        """The same on this machine, for other programs; empty: there is none."""
        if isinstance(node, Real):
            return str(node.path)
        whole = isinstance(node, FileSpan) and path.endswith("/" + MODEL)
        return str(self.local / path.removeprefix("versions/")) if self.local is not None and whole else ""

    # ---- versions

    def need_newest(self, path: str) -> int:
        """The newest version's counter. Raises `FileNotFoundError` where there is none yet."""
        newest = self._versions.newest()
        if not newest:
            raise FileNotFoundError(errno.ENOENT, "there is no version yet", path)
        return newest

    def _newest(self) -> Manifest | None:
        while newest := self._versions.newest():
            try:
                return self.manifest(newest)
            except FileNotFoundError:
                continue
        return None

    def manifest(self, counter: int) -> Manifest:
        """What a version that is kept says of itself."""
        if counter not in self._manifests:
            held = self._versions.hold(counter)
            try:
                self._manifests[counter] = held.manifest
            finally:
                held.close()
            for old in sorted(self._manifests)[:-16]:
                self._manifests.pop(old, None)
        return self._manifests[counter]

    # ---- status

    def status(self, node: Node) -> Status:
        """Of what was found."""
        if isinstance(node, Real):
            found = node.path.stat()
            return Status(found.st_mode, found.st_size, found.st_mtime_ns)
        if isinstance(node, FileSpan):
            manifest = self.manifest(node.counter)
            return Status(stat.S_IFREG | 0o444, node.size, manifest.time, manifest.version)
        if isinstance(node, Text):
            return Status(stat.S_IFREG | 0o444, len(node.content), time.time_ns())
        if isinstance(node, Pushes):
            return Status(stat.S_IFREG | 0o200, node.size, 0)  # no file is as old: rsync would leave it out
        if isinstance(node, Link):
            return Status(stat.S_IFLNK | 0o777, len(node.target), self._began)
        return Status(stat.S_IFDIR | 0o555, 0, self._began)


def _npy_header(held: FileTensor) -> bytes:
    """What goes ahead of the elements in numpy's format."""
    said = {"descr": np.lib.format.dtype_to_descr(np.dtype(held.dtype)), "fortran_order": False, "shape": held.shape}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, said)
    return file.getvalue()
