"""The libraries that Tensorwire is compared with, where they are installed. Their programs lie in ``peers``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import ROOT
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import ACTORS, Contender, pair
from tensorwire.bench.show import Notes
from tensorwire.errors import ArgumentError, MissingPackage

PROGRAMS = Path(__file__).parent / "peers"
_PROGRAM = "ucx_perftest"


@dataclass(frozen=True)
class Peer:
    """A library with a program in Python. ``devices``: over what it writes.

    ``asleep``: its target's program sleeps while the initiator works; the library's own threads do what is to be done.
    """

    name: str
    script: str
    modules: tuple[str, ...]
    install: str
    devices: tuple[str, ...] = ("tcp",)
    asleep: bool = True
    environment: dict[str, str] = field(default_factory=dict)


# glibc gives memory back after each message otherwise, and half of the time goes into page faults.
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "268435456"}

PEERS = (
    Peer("ucx", "ucx_put.py", (), "apt install ucx-utils", ("shm", "tcp"), asleep=False),
    Peer("nixl", "nixl_write.py", ("nixl_cu12._api",), "pip install --no-deps nixl-cu12", ("shm", "tcp")),
)

# Threads free what others allocate: with one arena there are a quarter of the page faults.
ONE_ARENA = {**KEEP, "MALLOC_ARENA_MAX": "1"}
GRPC = Peer("grpc", "grpc_store.py", ("grpc", "torch", "tensorwire"), "pip install grpcio", environment=ONE_ARENA)
GRPC_ROWS = replace(GRPC, script="grpc_rows.py", modules=("grpc", "tensorwire"))


class Libraries:
    """Those that are here; what is not is told by a note. ``python``: the interpreter that has them."""

    def __init__(self, python: str | None, notes: Notes) -> None:
        self._python = python or sys.executable
        self._notes = notes
        self._here: dict[str, bool] = {}

    def contenders(self, names: Sequence[str], device: str, nbytes: int) -> list[Contender]:
        """Those of ``names`` for a transfer of ``nbytes`` over a device."""
        return [
            Contender(
                peer.name,
                pair(program, device, nbytes),
                asleep=peer.asleep,
                stopped=True,
                environment={"PYTHONPATH": str(ACTORS), **peer.environment},
            )
            for peer in PEERS
            if peer.name in names and device in peer.devices and (program := self.program(peer))
        ]

    def libfabric(self, nbytes: int) -> list[Contender]:
        """libfabric's tcp provider."""
        source = PROGRAMS / "libfabric.c"
        program = Limits(self._notes).program(source, "-lfabric", needs="apt install libfabric-dev")
        return [Contender("libfabric", pair(program, nbytes, "127.0.0.1"))] if program else []

    def program(self, peer: Peer) -> tuple[str, ...]:
        """The command of a peer's program; empty, with a note, if it is not here."""
        if peer.name not in self._here:
            self._here[peer.name] = self._is_here(peer)
            if not self._here[peer.name]:
                self._notes.skip(f"{peer.name} is not here: {peer.install}")
        return (self._python, str(PROGRAMS / peer.script)) if self._here[peer.name] else ()

    def _is_here(self, peer: Peer) -> bool:
        if peer.name == "ucx" and shutil.which(_PROGRAM) is None:
            return False
        command = [self._python, "-c", f"import os, {', '.join(('numpy', *peer.modules))}; os._exit(0)"]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError as error:
            raise ArgumentError(f"--peer-python {self._python}: {error.strerror}") from None


def framework_python(framework: str, name: str) -> str:
    """The Python that has a framework: that of ``.venv-NAME``, or the one that a variable names.

    Raises `MissingPackage`.
    """
    variable, folder = f"TENSORWIRE_{name.upper()}_PYTHON", f".venv-{name}"
    named = os.environ.get(variable)
    python = Path(named or ROOT / folder / "bin" / "python")
    if not os.access(python, os.X_OK):
        where = f"{python}, which {variable} names" if named else python.relative_to(ROOT)
        raise MissingPackage(f"{framework} has no Python at {where}: make setup-{name}")
    return str(python)
