"""The processes of one variant to train: workers by themselves, under DDP, or of a job. Driven by lines.

Over a link they are spread over its two ends: server 0 and worker 1 at the first, worker 0 at the second.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.libraries import PROGRAMS
from tensorwire.bench.links import ADDRESSES
from tensorwire.bench.machine import MALLOC
from tensorwire.bench.programs import HANG_SECONDS, Group, Program, ProgramFailed, receive_all
from tensorwire.launch.secret import new_secret
from tensorwire.launch.start import module_command
from tensorwire.trace.parts import ProcessTrace, read_trace

STORES = ("store", "overlap")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Variant:
    """One variant to train. ``kind``: ``compute`` (no update), ``alone`` (torch's own optimizer in each worker),

    ``ddp``, ``grpc`` (the gRPC store), ``store``, or ``overlap`` (a store that is pushed to while backward runs).
    ``device``: the job's. ``actor``: the module that the workers run; that of graphs has kinds of its own: its modes,
    and ``alone``.
    """

    name: str
    kind: str
    device: str = "auto"
    actor: str = "benchmarks.actors.train"

    @property
    def ours(self) -> bool:
        """Whether its processes are a job of Tensorwire's."""
        return self.kind in STORES or (self.actor.endswith(".graph") and self.kind != "alone")

    @property
    def traced(self) -> bool:
        """Whether its processes write a trace."""
        return self.ours or self.kind == "grpc"


@dataclass(frozen=True)
class Setup:
    """What the compared variants have in common. ``ends``: the network namespaces of a link, or none."""

    workload: str
    workers: int
    servers: int
    shrink: int = 1
    ends: tuple[str, ...] = ()

    def inside(self, place: int) -> tuple[str, ...]:
        """What a command begins with, to run at that end of the link."""
        return ("ip", "netns", "exec", self.ends[place % 2]) if self.ends else ()


class Workers(Group):
    """The workers of one variant, with what they need: a coordinator and servers. Raises `ProgramFailed`."""

    def __init__(self, variant: Variant, setup: Setup) -> None:
        super().__init__()
        self.variant = variant
        self.first_lines: list[str] = []  # each worker's first line
        self._setup = setup
        self._others: list[Program] = []  # the servers, and before ours the coordinator
        self._folder = tempfile.TemporaryDirectory(prefix="tensorwire-bench-")
        try:
            environment = {"TENSORWIRE_TRACE": self._folder.name} if variant.traced else {}
            meeting = str(Path(self._folder.name) / "meeting")
            if variant.ours:
                environment |= self._serve(environment)
            elif variant.kind == "grpc":
                meeting = self._serve_grpc(environment)
            self._start(environment, meeting)
        except BaseException:
            self.close()
            raise

    def _program(self, name: str, place: int, command: tuple[str, ...], environment: Mapping[str, str]) -> Program:
        theirs = str(PROGRAMS) if self.variant.kind == "grpc" else ""
        path = (str(ROOT), theirs, os.environ.get("PYTHONPATH", ""))
        common = {
            **MALLOC,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            # gloo takes the interface of the machine's name otherwise.
            "GLOO_SOCKET_IFNAME": "cable" if self._setup.ends else "lo",
        }
        name = f"{self.variant.name}: {name}"
        return Program((*self._setup.inside(place), *command), {**common, **environment}, name=name)

    def _serve(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Starts coordinator and servers, as ``tensorwire run`` would; what the workers need in their environment."""
        setup = self._setup
        environment = {
            **environment,
            "TENSORWIRE_SECRET": new_secret(),
            "TENSORWIRE_DEVICE": self.variant.device,
            "TENSORWIRE_WORKERS": str(setup.workers),
            "TENSORWIRE_SERVERS": str(setup.servers),
        }
        interface = ADDRESSES[0] if setup.ends else "127.0.0.1"
        launch = module_command("tensorwire.launch.coordinator_process", setup.workers, setup.servers, interface, 0)
        coordinator = self._program("the coordinator", 0, tuple(launch), environment)
        self._others.append(coordinator)
        line = coordinator.receive()
        if not line.startswith("listening "):
            raise ProgramFailed(line)
        environment["TENSORWIRE_COORDINATOR"] = line.removeprefix("listening ")
        for index in range(setup.servers):
            command = tuple(module_command("tensorwire.launch.server_process"))
            own = {**environment, "TENSORWIRE_INDEX": str(index)}
            self._others.append(self._program(f"server {index}", index, command, own))
        return environment

    def _serve_grpc(self, environment: Mapping[str, str]) -> str:
        """Starts the gRPC store's servers; their addresses."""
        setup, script = self._setup, str(PROGRAMS / "grpc_train.py")
        for index in range(setup.servers):
            interface = ADDRESSES[index % 2] if setup.ends else "127.0.0.1"
            command = (sys.executable, script, "server", str(index), str(setup.workers), interface)
            self._others.append(self._program(f"server {index}", index, command, environment))
        return ",".join(receive_all(self._others))

    def _start(self, environment: Mapping[str, str], meeting: str) -> None:
        setup = self._setup
        for rank in range(setup.workers):
            words = (self.variant.kind, setup.workload, setup.shrink, rank, setup.workers, meeting)
            own = {**environment, "TENSORWIRE_RANK": str(rank)}
            command = tuple(module_command(self.variant.actor, *words))
            self.programs.append(self._program(f"worker {rank}", rank + 1, command, own))
        servers = self._others[-setup.servers :] if self._others and setup.servers else []
        self.first_lines = receive_all(self.programs, silent=servers)
        self.introduce(["-"] * setup.workers, silent=servers)

    def finish(self) -> dict[str, ProcessTrace]:
        """Has them leave in good order; the trace of a job, nothing otherwise."""
        for worker in self.programs:
            worker.send("run 0 0 0 leave")
        for program in (*self.programs, *self._others):
            if self.variant.kind == "grpc":
                program.send("leave")  # its servers go last, and learn of it
            try:
                status = program.process.wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                raise ProgramFailed(f"a process of {self.variant.name} did not leave") from None
            if status:
                program.receive()  # raises with its last words
        return read_trace(self._folder.name) if self.variant.traced else {}

    def close(self) -> None:
        super().close()
        for program in self._others:
            program.close()
        with contextlib.suppress(OSError):
            self._folder.cleanup()
