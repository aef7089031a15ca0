"""The launcher behind ``tensorwire run``: starts this machine's processes and reports how the job ended."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tensorwire.control import Cause, Client, Coordinator
from tensorwire.control.address import await_name, connect, split_address
from tensorwire.control.membership import Lost, Membership
from tensorwire.control.names import describe_exit, member_name
from tensorwire.control.settings import (
    MOST_MACHINES,
    MOST_ON_A_MACHINE,
    check_count,
    check_min_workers,
    failure_times,
    step_timeout,
)
from tensorwire.device.copy_choice import measure_copy
from tensorwire.device.registry import AUTO, find_job_device
from tensorwire.errors import ArgumentError
from tensorwire.launch import secret as secrets_
from tensorwire.launch.children import Child, start_server
from tensorwire.launch.groups import Guard, end_groups, signal_groups
from tensorwire.launch.place import (
    grace_seconds,
    is_loopback,
    listening_interface,
    server_threads,
    worker_environment,
)
from tensorwire.launch.scarce import check_limits, scarcity
from tensorwire.launch.stops import Stops
from tensorwire.launch.threads import shared_cores
from tensorwire.launch.watch import Trace, Watch, job_members
from tensorwire.store.versions.version_files import job_folder, remove_left

# After SIGTERM, before SIGKILL.
TERM_SECONDS = 2.0
# How long the launchers of other nodes wait for that of node 0, and all for the name of its machine.
JOIN_SECONDS = 300.0
# A launcher that was interrupted does not wait longer for the reader of its output.
HURRY_SECONDS = 2.0
_SIGNALS = {
    signal.SIGINT: Cause("the user", "interrupted the job"),
    signal.SIGTERM: Cause("SIGTERM", "ended the job"),
    signal.SIGHUP: Cause("SIGHUP", "ended the job: its terminal was closed"),
}
_NEWS = ("end", "guard", "loss", "members")  # events that are not the end of a process
# What schedulers and people mean for scripts: Slurm's --signal=USR1@90, Ctrl-\.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


@dataclass(frozen=True)
class RunOptions:
    """What ``tensorwire run`` was asked for; ``workers`` and ``servers`` are per node."""

    command: Sequence[str]
    workers: int = 1
    servers: int = 1
    rendezvous: str | None = None
    nodes: int = 1
    node: int = 0
    device: str = "auto"
    prefix: bool = True
    metrics: str | None = None
    trace: Trace | None = None
    tensorboard: str | None = None
    checkpoints: str | None = None
    fates: str | None = None
    min_workers: int | None = None
    restart: int = 0

    def check(self) -> None:
        """Raises `ArgumentError`, or where every process would: such as `VerbsUnavailable`."""
        if not self.command:
            raise ArgumentError("say what to run: tensorwire run --workers 2 -- python train.py")
        if shutil.which(self.command[0]) is None:
            raise ArgumentError(f"there is no command {self.command[0]!r}")
        check_count("--workers", self.workers, MOST_ON_A_MACHINE)
        check_count("--servers", self.servers, MOST_ON_A_MACHINE)
        check_count("--nodes", self.nodes, MOST_MACHINES)
        check_count("the workers of all nodes", self.workers * self.nodes)
        check_count("the servers of all nodes", self.servers * self.nodes)
        if not 0 <= self.node < self.nodes:
            raise ArgumentError(f"--node {self.node} is not one of {self.nodes} nodes (0 to {self.nodes - 1})")
        if self.nodes > 1 and self.rendezvous is None:
            raise ArgumentError("several nodes need --rendezvous HOST:PORT, the address of node 0")
        if self.rendezvous is not None and split_address(self.rendezvous)[1] == 0 and self.nodes > 1:
            raise ArgumentError("--rendezvous needs a port that the other nodes know, not 0")
        if self.restart and self.min_workers is None:
            raise ArgumentError("--restart needs --min-workers: with how many workers the job goes on meanwhile")
        check_min_workers("--min-workers", self.min_workers, self.workers * self.nodes)
        if self.metrics is not None and self.node != 0:
            raise ArgumentError("--metrics belongs to node 0, which hears of all processes")
        if self.device != AUTO:
            find_job_device(self.device).check_available()


class Launcher:
    """One launcher's share of a job."""

    def __init__(self, options: RunOptions) -> None:
        options.check()
        self._options = options
        others = (options.workers + options.servers) * (options.nodes - 1) if options.node == 0 else 0
        check_limits(workers=options.workers, servers=options.servers, others=others)
        self._beat, _, self._lost_after = failure_times(os.environ)
        server_threads(os.environ)
        step_timeout(os.environ)
        # A worker that goes on computing ends itself after the grace; then it is our turn.
        self._leave_seconds = grace_seconds(os.environ) + 1.0
        self._running: dict[str, int] = {}  # name -> process group
        self._groups: list[int] = []
        self._statuses: dict[str, int] = {}
        self._lost: dict[str, Lost] = {}  # without these the job goes on
        self._late: dict[int, float] = {}  # by process: when it has to be gone, because it is out of the job
        self._servers: list[Child] = []
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the only queue a signal handler may put into
        self._stops = Stops(self._beat, self._lost_after)
        self._guard: Guard | None = None
        self._coordinator: Coordinator | None = None
        self._client: Client | None = None
        o = options
        members = job_members(o.workers, o.servers, o.nodes)
        self._view = Watch(members, o.node, prefix=o.prefix, metrics=o.metrics, trace=o.trace)
        self._environment: dict[str, str] = {}  # of the workers
        self._restarts: dict[int, int] = {}  # by rank: how often it was started again
        self._signalled = 0
        self._patient = False  # whether a signal may wait for an orderly end

    def __call__(self) -> int:
        """Runs the job; returns the exit status for the shell."""
        handlers = {s: signal.signal(s, self._interrupted) for s in _SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
        for s in (signal.SIGTSTP, *_PASSED_ON):
            if signal.getsignal(s) == signal.SIG_DFL:
                handlers[s] = signal.signal(s, self._pause if s is signal.SIGTSTP else self._pass_on)
        cause: Cause | None = None
        try:
            address, secret = self._rendezvous()
            listening_interface(address, os.environ)  # refuse now what every process would
            measure_copy()
            self._patient = True
            self._start(address, secret)
            cause = self._watch()
            if cause is not None:
                self._view.output.freeze()
                self._report(cause)
            self._clear(cause)
        except KeyboardInterrupt:  # before there was a job, or for a second time
            if cause is None:
                self._report(_SIGNALS[signal.Signals(self._signalled)])
        finally:
            for s in handlers:
                signal.signal(s, signal.SIG_IGN)
            status = self._status(cause)
            self._view.output.freeze()
            self._end()
            for s, handler in handlers.items():
                signal.signal(s, handler)
            self._view.output.close(HURRY_SECONDS if self._signalled else None)
        return status

    # ---- start

    def _rendezvous(self) -> tuple[str, str]:
        o = self._options
        secret = secrets_.file_secret(os.environ) if o.nodes > 1 else secrets_.new_secret()
        workers, servers = o.workers * o.nodes, o.servers * o.nodes
        if o.node == 0:
            host, port = ("127.0.0.1", 0) if o.rendezvous is None else split_address(o.rendezvous)
            host = "127.0.0.1" if o.rendezvous is not None and is_loopback(o.rendezvous) else host
            if o.nodes > 1:
                await_name(host, JOIN_SECONDS)
            self._coordinator = Coordinator(
                secret.encode(),
                workers=workers,
                servers=servers,
                interface=host,
                port=port,
                beat=self._beat,
                lost_after=self._lost_after,
                stats_every=self._view.stats_every,
                on_end=self._on_end,
                who="the launcher",
                min_workers=o.min_workers or 0,
                rejoin_seconds=JOIN_SECONDS if o.restart else 0.0,
                on_loss=self._on_loss,
                on_members=self._on_members,
            )
            self._view.attend(self._coordinator)
            connect(self._coordinator.address, 0.0).close()  # what stops us would stop every process
            return self._coordinator.address, secret
        assert o.rendezvous is not None
        self._client = Client(
            o.rendezvous, secret.encode(), "launcher", o.node, patience=JOIN_SECONDS, timeout=self._lost_after
        )
        self._client.on_end(self._on_end)
        self._client.on_members(self._on_members)
        job = self._client.welcome
        if (job.workers, job.servers) != (workers, servers):
            raise ArgumentError(
                f"node 0 runs a job of {job.workers} workers and {job.servers} servers, node {o.node} one of "
                f"{workers} and {servers}: give every node the same --nodes, --workers and --servers"
            )
        return o.rendezvous, secret

    @property
    def _job(self) -> str:
        """The job's name, once there is one."""
        if self._coordinator is not None:
            return self._coordinator.job
        assert self._client is not None
        return self._client.welcome.job

    def _start(self, address: str, secret: str) -> None:
        o = self._options
        self._guard = Guard(lambda status: self._events.put(("guard", 0, status)))
        self._guard.remove(job_folder(self._job))
        base = self._view.environment(os.environ)
        if o.checkpoints is not None:
            base["TENSORWIRE_CHECKPOINTS"] = o.checkpoints
        if o.tensorboard is not None:
            base["TENSORWIRE_TENSORBOARD"] = os.path.abspath(o.tensorboard)  # noqa: PTH100 (keeps links)
        if o.fates is not None:
            base["TENSORWIRE_FATES"] = os.path.abspath(o.fates)  # noqa: PTH100
        common = worker_environment(
            base, workers=o.workers * o.nodes, servers=o.servers * o.nodes, device=o.device, node=o.node
        )
        for index in range(o.node * o.servers, (o.node + 1) * o.servers):
            with self._streams("server", index) as (out, err):
                server = start_server(index, address, secret, common, stdout=out, stderr=err, own=True)
            self._servers.append(server)
            self._adopt("server", index, server.process)
        threads = shared_cores(os.environ, o.workers)
        self._environment = worker_environment({**common, **threads}, coordinator=address, secret=secret)
        for rank in range(o.node * o.workers, (o.node + 1) * o.workers):
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        command, environment = self._options.command, worker_environment(self._environment, rank=rank)
        with self._streams("worker", rank) as (out, err):
            try:
                process = subprocess.Popen([*command], env=environment, stdout=out, stderr=err, start_new_session=True)
            except OSError as error:
                if scarcity(error):
                    raise
                raise ArgumentError(f"cannot start {command[0]!r}: {error.strerror}") from None
        self._adopt("worker", rank, process)

    @contextlib.contextmanager
    def _streams(self, role: str, index: int) -> Iterator[tuple[int | None, int | None]]:
        """Where a process writes to; once it has been started, it alone holds them."""
        streams = self._view.output.open(member_name(role, index))
        try:
            yield streams
        finally:
            for stream in streams:
                if stream is not None:
                    os.close(stream)

    def _adopt(self, role: str, index: int, process: subprocess.Popen[bytes]) -> None:
        name = member_name(role, index)
        self._running[name] = process.pid
        self._groups.append(process.pid)
        assert self._guard is not None
        self._guard.add(process.pid)

        def wait() -> None:
            self._events.put((role, index, process.wait()))

        threading.Thread(target=wait, name=f"tensorwire-wait-{name}", daemon=True).start()

    # ---- news

    def _on_end(self, cause: Cause | None) -> None:
        self._events.put(("end", cause))

    def _on_loss(self, cause: Cause) -> None:
        self._events.put(("loss", cause))

    def _on_members(self, membership: Membership) -> None:
        self._events.put(("members", membership))

    def _interrupted(self, number: int, _: FrameType | None) -> None:
        first = not self._signalled
        self._signalled = self._signalled or number
        if not first or not self._patient:
            raise KeyboardInterrupt
        cause = _SIGNALS[signal.Signals(number)]
        if self._coordinator is not None:
            self._coordinator.end(cause)
        elif self._client is not None:
            self._client.fail(cause)
        self._events.put(("end", cause))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """To the workers, which have sessions of their own: what it does to a script without a handler, it does."""
        signal_groups([group for name, group in self._running.items() if name.startswith("worker")], number)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the processes, which a terminal does not reach, stop and go on with us."""
        signal_groups(self._groups, signal.SIGSTOP)
        self._view.output.show_cursor(shown=True)
        signal.raise_signal(signal.SIGSTOP)
        self._view.output.show_cursor(shown=False)
        signal_groups(self._groups, signal.SIGCONT)

    def _watch(self) -> Cause | None:
        """Until the job ends: reports how processes ended, and which are stopped before their heartbeats are missed."""
        look_at = time.monotonic() + self._beat
        while True:
            try:
                event = self._events.get(timeout=max(0.0, look_at - time.monotonic()))
            except queue.Empty:
                self._report_stops()
                self._end_lost()
                look_at = time.monotonic() + self._beat
                continue
            if event[0] == "end":
                cause: Cause | None = event[1]
                return cause
            if event[0] == "loss":
                self._report(event[1])
                continue
            if event[0] == "members":
                self._note_lost(event[1])
                continue
            role, index, status = event
            if role == "guard":
                self._view.output.print_line(
                    f"tensorwire: the guard {describe_exit(status)}: the job goes on, but if this launcher is killed, "
                    "what it has started may live on for a while"
                )
                continue
            self._note(member_name(role, index), status)
            if self._coordinator is not None:
                self._coordinator.left(role, index, status)
            elif self._client is not None:
                self._client.report_exit(role, index, status)
            self._restart_lost()

    def _note_lost(self, membership: Membership) -> None:
        """The job goes on without these."""
        until = time.monotonic() + self._leave_seconds
        lost = {member_name("worker", rank): how for rank, how in membership.lost.items()}
        for name in lost.keys() - self._lost.keys():
            if name in self._running:
                self._late[self._running[name]] = until
        self._lost = lost
        self._restart_lost()

    def _restart_lost(self) -> None:
        """Starts others in the place of those of ours that are lost, and gone."""
        mine = range(self._options.node * self._options.workers, (self._options.node + 1) * self._options.workers)
        for rank in mine if self._options.restart else ():
            name, before = member_name("worker", rank), self._restarts.get(rank, 0)
            wanted = name in self._lost and not self._lost[name].left
            if wanted and name not in self._running and before < self._options.restart:
                self._restarts[rank] = before + 1
                try:
                    self._start_worker(rank)
                except (OSError, ArgumentError) as error:
                    self._view.output.print_line(f"tensorwire: {name} cannot be started again: {error}")

    def _end_lost(self, *, now: bool = False) -> None:
        """Ends what is out of the job, and has not left by itself, such as a process that was stopped."""
        there = set(self._running.values())
        self._late = {pid: until for pid, until in self._late.items() if pid in there}
        signal_groups([p for p, until in self._late.items() if now or time.monotonic() > until], signal.SIGKILL)

    def _report_stops(self) -> None:
        joined = self._coordinator.has_joined if self._coordinator is not None else lambda _: False
        there = {name: pid for name, pid in self._running.items() if not joined(name)}
        for name, seconds in self._stops.scan(there).items():
            role, _, index = name.partition(" ")
            if self._coordinator is not None:
                self._coordinator.stopped(role, int(index), seconds)
            elif self._client is not None:
                self._client.report_stop(role, int(index), seconds)

    def _note(self, name: str, status: int) -> None:
        del self._running[name]
        self._statuses[name] = status
        self._view.left(name, status)

    def _collect(self, role: str, seconds: float) -> None:
        """Waits for the processes of ``role`` to leave."""
        end = time.monotonic() + seconds
        while any(name.startswith(role) for name in self._running):
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
                if event[0] not in _NEWS:
                    self._note(member_name(event[0], event[1]), event[2])
                continue
            return

    # ---- the end

    def _clear(self, cause: Cause | None) -> None:
        """Waits for this machine's processes to leave; after a good end, as long as the scripts still run."""
        if cause is None:
            self._end_lost(now=True)
            self._collect("worker", threading.TIMEOUT_MAX)
        self._collect("", self._leave_seconds)
        if cause is None:
            for name, status in self._statuses.items():
                if status and name not in self._lost:
                    self._report(Cause(name, f"{describe_exit(status)} after it had left the job"))
                    return

    def _status(self, cause: Cause | None) -> int:
        """For the shell: of the process that the cause names, or else that failed first."""
        if self._signalled:
            return 128 + self._signalled
        failed = [s for name, s in self._statuses.items() if s and (cause or name not in self._lost)]
        if cause is not None:
            failed = [s for s in [self._statuses.get(cause.who, 0), *failed, 1] if s]
        return (failed[0] if failed[0] > 0 else 128 - failed[0]) if failed else 0

    def _report(self, cause: Cause) -> None:
        trace = f"\n{cause.traceback.rstrip()}" if cause.traceback else ""
        self._view.output.print_line(f"tensorwire: {cause}{trace}")

    def _end(self) -> None:
        """Nothing of this job is left on this machine."""
        end_groups(self._groups, TERM_SECONDS)
        self._collect("", 5.0)
        for server in self._servers:
            server.close(0.0)
        if self._guard is not None:
            remove_left(self._job)  # where a server was killed
            self._guard.close()
        if self._client is not None:
            self._client.close(goodbye=True)
        if self._coordinator is not None:
            self._coordinator.empty.wait(self._leave_seconds if self._coordinator.ended.is_set() else 0.0)
            self._coordinator.close()
        self._view.settle()
