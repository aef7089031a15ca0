"""A job's folder among the programs of a benchmark: files of a version, read by Python and through a mount.

More of what readers of ``version.py`` do: ``readinto`` fills this process's memory with a version's file; ``tmpfs``,
``here``, ``warm`` and ``cold`` read it as programs do, and tell the processor's time in place of the clock's: of this
process, and of the one that serves the mount. ``warm`` and ``cold`` are of a mount as from another machine, and of
what the kernel has in its memory or not.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import tensorwire as tw
from tensorwire.bench.actors.version import VersionReader, clocked
from tensorwire.files import VersionFile
from tensorwire.files.mounting import unmount
from tensorwire.launch.start import module_command
from tensorwire.store.versions.version_files import MODEL

_PIECE = 1 << 20  # bytes of a read
_OVER = {"here": "auto", "warm": "tcp", "cold": "tcp"}  # the device of the process that serves the mount


class FolderReader(VersionReader):
    """It also reads files."""

    def __init__(self, address: str, library: str) -> None:
        super().__init__(address, library)
        self._address = address
        self._folder = tw.files.connect(address)
        self._file = np.zeros(self._folder.nbytes, np.uint8)
        self._mounts: dict[str, tuple[int, int]] = {}  # by device: its folder, and the process that serves it

    def operation(self, what: str) -> Callable[[], float]:
        """See above."""
        if what == "readinto":
            file = self._folder.open(MODEL)
            assert isinstance(file, VersionFile)
            return lambda: self._clocked_read(file)
        if what == "tmpfs":
            return lambda: self._processor_time(os.open(self._live_file(), os.O_RDONLY), None, cold=False)
        if what in _OVER:
            return lambda: self._through_mount(_OVER[what], cold=what == "cold")
        return super().operation(what)

    def _clocked_read(self, file: VersionFile) -> float:
        seconds = clocked(lambda: file.preadinto(self._file, 0))
        self._fill(self._file.nbytes)
        return seconds

    def _fill(self, nbytes: int) -> None:
        assert nbytes == self._file.nbytes
        data = self._file[self._file.nbytes - sum(t.nbytes for t in self.mine.values()) :]
        self.shown = {"file": torch.from_numpy(data.view(np.float32))}

    def _through_mount(self, device: str, *, cold: bool) -> float:
        if device not in self._mounts:
            self._mounts[device] = self._mount(device)
        folder, process = self._mounts[device]
        return self._processor_time(os.open(MODEL, os.O_RDONLY, dir_fd=folder), process, cold=cold)

    def _mount(self, device: str) -> tuple[int, int]:
        """A mount that has no name any more: it goes with the process that serves it, whatever ends that."""
        with tempfile.TemporaryDirectory() as at:
            command = module_command("tensorwire.cli", "mount", self._address, at)
            environment = {**os.environ, "TENSORWIRE_DEVICE": device}
            server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
            assert server.stdout is not None
            if not server.stdout.readline():
                raise SystemExit("tensorwire mount has ended")
            folder = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
            unmount(Path(at))
        return folder, server.pid

    def _processor_time(self, fd: int, other: int | None, *, cold: bool) -> float:
        """Of reading all of a file, by this process and the other one. It closes the file."""
        if cold:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        memory, start, before = self._file.data, time.process_time(), _running(other)
        at = 0
        while nbytes := os.preadv(fd, [memory[at : at + _PIECE]], at):
            at += nbytes
        seconds = time.process_time() - start + _running(other) - before
        os.close(fd)
        self._fill(at)
        return seconds


def _running(process: int | None) -> float:
    """Seconds that its threads have run."""
    if process is None:
        return 0.0
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
