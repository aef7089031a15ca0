"""Whom Tensorwire is compared with: C programs that are built on demand, and other libraries where they are installed.

Their sources lie in ``bench/peers`` of the source tree, and in ``tensorwire/bench/peers`` of an installed package.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tensorwire.bench.programs import ACTORS, Contender, pair
from tensorwire.bench.records import size_text
from tensorwire.bench.show import Notes
from tensorwire.errors import ArgumentError, Unsupported

_FLAGS = ("-O2", "-std=gnu11")


@dataclass(frozen=True)
class Peer:
    """A library with a program in Python. ``devices``: whose workloads it takes part in.

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
_PROGRAM = "ucx_perftest"
POLLING = "C sockets, polling"

PEERS = {
    peer.name: peer
    for peer in (
        Peer("ucx", "ucx_put.py", (), "apt install ucx-utils", ("shm", "tcp"), asleep=False),
        Peer("nixl", "nixl_write.py", ("nixl_cu12._api",), "pip install --no-deps nixl-cu12", ("shm", "tcp")),
        Peer("mooncake", "mooncake_write.py", ("mooncake.engine",), "pip install mooncake-transfer-engine-non-cuda"),
        Peer("zeromq", "zeromq_send.py", ("zmq",), "pip install pyzmq", asleep=False, environment=KEEP),
        Peer("gloo", "gloo_send.py", ("torch.distributed",), "pip install torch", asleep=False, environment=KEEP),
        Peer("torch-rpc", "torch_rpc.py", ("torch.distributed.rpc",), "pip install torch", environment=KEEP),
        Peer("grpc", "grpc_stream.py", ("grpc",), "pip install grpcio", environment=KEEP),
    )
}


class Peers:
    """The contenders that the user asked for and that are here. What is not is told by a note."""

    def __init__(self, names: Sequence[str], python: str | None, notes: Notes) -> None:
        self._python = python or sys.executable
        self._notes = notes
        self._wanted = [PEERS[name] for name in names]
        self._here: dict[str, bool] = {}

    def contenders(self, device: str, nbytes: int) -> list[Contender]:
        """Those for a transfer of ``nbytes`` over a device."""
        return [
            Contender(
                peer.name,
                pair(program, device, nbytes),
                asleep=peer.asleep,
                stopped=True,
                environment={"PYTHONPATH": str(ACTORS), **peer.environment},
            )
            for peer in self._wanted
            if device in peer.devices and (program := self.program(peer))
        ]

    def program(self, peer: Peer) -> tuple[str, ...]:
        """The command of a peer's program; empty, with a note, if it is not here."""
        return (self._python, str(peers_folder() / peer.script)) if self._is_here(peer) else ()

    def copies(self, nbytes: int, mode: str, names: Sequence[str], group: str) -> list[Contender]:
        """Copies and a flag in C, in shared memory."""
        program = self._build("memory")
        asleep = mode == "one-way"
        return [Contender(f"C {name}", pair(program, nbytes, mode, name), group, asleep) for name in names if program]

    def same_memory(self, ours: Contender, names: Sequence[str], group: str) -> tuple[Contender, list[Contender]]:
        """The same copies, done by our own processes: where a large payload lies decides how fast it is."""
        library = self._build("memory", "-shared", "-fPIC")
        if not library:
            return ours, []
        ours = replace(ours, commands=tuple((*command, *library) for command in ours.commands))
        return ours, [replace(ours, name=f"C {name}", word=name, group=group) for name in names]

    def sockets(self, nbytes: int, buffers: Sequence[int], window: int = 1) -> list[Contender]:
        """Blocking sockets in C with buffers of several sizes, 0 being the kernel's own choice; one byte back.

        ``window``: how many payloads may be on their way before the first is answered.
        """
        program = self._build("sockets")
        made = []
        for buffer in buffers if program else ():
            name = f"C sockets, {size_text(buffer)}" if buffer else "C sockets"
            made.append(Contender(name, pair(program, nbytes, window, buffer, "127.0.0.1", 0), "C sockets"))
        return made

    def polling_sockets(self, nbytes: int) -> list[Contender]:
        """The same where both ends poll: the time that the kernel itself needs, without a wake-up."""
        program = self._build("sockets")
        return [Contender(POLLING, pair(program, nbytes, 1, 0, "127.0.0.1", 1))] if program else []

    def libfabric(self, nbytes: int) -> list[Contender]:
        """libfabric's tcp provider."""
        program = self._build("libfabric", "-lfabric", needs="apt install libfabric-dev")
        return [Contender("libfabric", pair(program, nbytes, "127.0.0.1"))] if program else []

    def _is_here(self, peer: Peer) -> bool:
        if peer.name not in self._here:
            imports = ", ".join(("numpy", *peer.modules))
            command = [self._python, "-c", f"import os, {imports}; os._exit(0)"]
            here = shutil.which(_PROGRAM) is not None if peer.name == "ucx" else True
            try:
                here = here and subprocess.run(command, capture_output=True, check=False).returncode == 0
            except OSError as error:
                raise ArgumentError(f"--peer-python {self._python}: {error.strerror}") from None
            self._here[peer.name] = here
            if not here:
                self._notes.skip(f"{peer.name} is not here: {peer.install}")
        return self._here[peer.name]

    def _build(self, name: str, *libraries: str, needs: str = "") -> tuple[str, ...]:
        try:
            return (str(build(name, libraries, self._notes)),)
        except Unsupported as error:
            self._notes.skip(f"C {name}: {error}{f' ({needs})' if needs else ''}")
            return ()


def build(name: str, libraries: Sequence[str], notes: Notes) -> Path:
    """The program of ``bench/peers/NAME.c``, built if the cache has none of this source. Raises `Unsupported`."""
    source, header = peers_folder() / f"{name}.c", peers_folder() / "lines.h"
    compiler = shutil.which("cc")
    if compiler is None:
        raise Unsupported("no C compiler: apt install gcc libc6-dev")
    told = [source.read_bytes(), header.read_bytes(), repr((_FLAGS, libraries, platform.machine())).encode()]
    tag = hashlib.sha256(b"\0".join(told)).hexdigest()[:16]
    program = cache() / f"{name}-{tag}"
    if program.exists():
        return program
    notes.say(f"building {source.name} into {program.parent}")
    fresh = program.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [compiler, *_FLAGS, "-o", str(fresh), str(source), *libraries], capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
        raise Unsupported(f"cannot be built: {errors[0]}")
    fresh.replace(program)  # whoever built it at the same time made the same
    return program


def cache() -> Path:
    """Where built programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "tensorwire" / "bench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unsupported(f"cannot make {folder}: {error.strerror}; set XDG_CACHE_HOME") from None
    return folder


def peers_folder() -> Path:
    """Where the programs of others are."""
    installed = Path(__file__).parent / "peers"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "bench" / "peers"


def parse_peers(text: str) -> list[str]:
    """``none``, ``all`` or names with commas between them. Raises `ArgumentError`."""
    if text in ("none", "all"):
        return list(PEERS) if text == "all" else []
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise ArgumentError(f"--peers: {name!r} is not one of none, all, {', '.join(PEERS)}")
    return names
