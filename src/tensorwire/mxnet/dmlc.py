"""``DMLC_`` variables: Tensorwire's job starts where MXNet's launcher starts the same command in every process.

The role decides what ``import tensorwire.mxnet`` does. The scheduler becomes the coordinator and a server a server,
until the job is over; a worker gets the settings of `tensorwire.init`, and continues. MXNet must not see the variables:
with them its import starts a server of its own, and never returns.

This module does not import mxnet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import NoReturn

from tensorwire.addresses import address_text
from tensorwire.control import Cause, Client, Coordinator
from tensorwire.control.address import await_name, split_address
from tensorwire.control.names import member_name
from tensorwire.control.settings import check_count, failure_times, whole
from tensorwire.errors import ArgumentError, JobEnded, ProtocolError, WaitTimeout
from tensorwire.launch import secret as secrets_
from tensorwire.launch.coordinator_process import LEAVE_SECONDS
from tensorwire.launch.excepthook import print_end
from tensorwire.launch.place import is_loopback, worker_environment
from tensorwire.launch.scarce import as_out_of_memory
from tensorwire.launch.start import module_command
from tensorwire.launch.torchrun import JOIN_SECONDS

ROLES = ("scheduler", "server", "worker")
_PREFIX = "DMLC_"
_ASKING = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")  # any of these means that there is to be a job
_SIGNALS = {
    signal.SIGINT: Cause("the user", "interrupted the job"),
    signal.SIGTERM: Cause("SIGTERM", "ended the job"),
}


@dataclass(frozen=True)
class Process:
    """This process, as the variables describe it. ``index``: a worker's or server's number; None: one that is free."""

    role: str
    address: str
    workers: int
    servers: int
    index: int | None

    @property
    def count(self) -> int:
        """How many processes of this role the job has."""
        return self.workers if self.role == "worker" else self.servers


def start() -> None:
    """Does what the ``DMLC_`` variables ask for, and removes them; it returns only in workers, and where none are set.

    Raises:
        ArgumentError: A variable is wrong or missing, no place in the job is free, or mxnet was imported before.
        AuthenticationError: The scheduler has another secret.
        PeerLost: The scheduler did not start within 600 seconds.
        WaitTimeout: The same, on one machine.
        SystemExit: The job is over.
    """
    variables = take(os.environ)
    if "TENSORWIRE_COORDINATOR" in os.environ:  # a launcher of ours has started this process
        return
    process = read(variables)
    if process is None:
        return
    if "mxnet" in sys.modules:
        raise ArgumentError("import tensorwire.mxnet before mxnet: the DMLC_ variables must not reach MXNet")
    if process.role == "scheduler":
        sys.exit(run_scheduler(process))
    secret = _secret(process)
    try:
        index = _claim(process, secret)
    except JobEnded as error:  # no failure of this process, which would deserve a traceback
        print_end(f"a {process.role}", error)
        sys.exit(1)
    if process.role == "server":
        _become_server(process, secret, index)
    os.environ.update(
        worker_environment(
            {}, coordinator=process.address, secret=secret, rank=index, workers=process.workers, servers=process.servers
        )
    )


def take(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Removes the variables from the environment, and returns those that have a value."""
    taken = {name: environment.pop(name) for name in list(environment) if name.startswith(_PREFIX)}
    return {name: value for name, value in taken.items() if value}


def read(variables: Mapping[str, str]) -> Process | None:
    """This process as the variables describe it; None: there is to be no job. Raises `ArgumentError`."""
    if not any(name in variables for name in _ASKING):
        return None
    role = _need(variables, "DMLC_ROLE")
    if role not in ROLES:
        raise ArgumentError(f"DMLC_ROLE must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {role!r}")
    host, port = _need(variables, "DMLC_PS_ROOT_URI"), _number(variables, "DMLC_PS_ROOT_PORT")
    if port > 65535:
        raise ArgumentError(f"DMLC_PS_ROOT_PORT must be at most 65535, not {port}")
    address = address_text(host, port)
    if is_loopback(address):
        address = address_text("127.0.0.1", port)
    workers, servers = _number(variables, "DMLC_NUM_WORKER"), _number(variables, "DMLC_NUM_SERVER")
    check_count("DMLC_NUM_WORKER", workers)
    check_count("DMLC_NUM_SERVER", servers)
    return Process(role, address, workers, servers, _index(variables, role, workers if role == "worker" else servers))


def _need(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise ArgumentError(f"{name} is not set: a job that DMLC_ variables start needs it in every process")
    return variables[name]


def _number(variables: Mapping[str, str], name: str) -> int:
    _need(variables, name)
    number = whole(variables, name)
    if number is None or number < 1:
        raise ArgumentError(f"{name} must be at least 1, not {number}")
    return number


def _index(variables: Mapping[str, str], role: str, count: int) -> int | None:
    """The number that the launcher gave. ``DMLC_TASK_ID`` is no number of a server: some launchers count the workers
    along, and some do not."""
    names = {"worker": ("DMLC_WORKER_ID", "DMLC_TASK_ID"), "server": ("DMLC_SERVER_ID",)}.get(role, ())
    for name in names:
        index = whole(variables, name)
        if index is not None:
            if not 0 <= index < count:
                raise ArgumentError(f"{name} must be from 0 to {count - 1}, because there are {count}, not {index}")
            return index
    return None


# ---- the scheduler


def run_scheduler(process: Process, patience: float = JOIN_SECONDS) -> int:
    """Runs the job's coordinator until the job is over. Returns the status with which to exit.

    Args:
        process: This process, the scheduler.
        patience: Seconds within which all workers and servers must have joined.
    """
    one_machine = is_loopback(process.address)
    secret = secrets_.new_secret() if one_machine else secrets_.file_secret(os.environ)
    beat, _, lost_after = failure_times(os.environ)
    host, port = split_address(process.address)
    await_name(host, JOIN_SECONDS)
    with contextlib.ExitStack() as ending:
        with as_out_of_memory():
            coordinator = Coordinator(
                secret.encode(),
                workers=process.workers,
                servers=process.servers,
                interface=host,
                port=port,
                beat=beat,
                lost_after=lost_after,
                who="the scheduler",
            )
        ending.callback(coordinator.close)
        received = ending.enter_context(_signals_end(coordinator))
        if one_machine:
            ending.callback(secrets_.Handout(_handout(port), secret).close)
        if not coordinator.ended.wait(patience):
            _end_if_missing(coordinator, process, patience)
            coordinator.ended.wait()
        coordinator.empty.wait(LEAVE_SECONDS)
    cause = coordinator.cause
    if cause is None:
        return 0
    trace = f"\n{cause.traceback.rstrip()}" if cause.traceback else ""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(f"tensorwire: {cause}{trace}", file=sys.stderr, flush=True)
    return 128 + received[0] if received else 1


@contextlib.contextmanager
def _signals_end(coordinator: Coordinator) -> Iterator[list[int]]:
    """Signals end the job, and with it this process; those that came are in the list."""
    received: list[int] = []

    def end(number: int, _: object) -> None:
        received.append(number)
        coordinator.end(_SIGNALS[signal.Signals(number)])

    # A shell lets its background jobs ignore SIGINT.
    before = {each: signal.signal(each, end) for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _end_if_missing(coordinator: Coordinator, process: Process, patience: float) -> None:
    """Nobody else notices a process that ended before it had joined."""
    names = [member_name("worker", rank) for rank in range(process.workers)]
    names += [member_name("server", index) for index in range(process.servers)]
    for name in names:
        if not coordinator.has_joined(name):
            coordinator.end(Cause(name, f"did not join the job within {patience:g} s: was it started, and did it end?"))
            return


# ---- servers and workers


def _handout(port: int) -> str:
    """The name of the job's secret among the files of this user's jobs."""
    return f"dmlc-{port}"


def _secret(process: Process) -> str:
    """The job's secret, which the scheduler has left on one machine, or which is in a file on several."""
    if not is_loopback(process.address):
        return secrets_.file_secret(os.environ)
    try:
        return secrets_.pick_up(_handout(split_address(process.address)[1]), JOIN_SECONDS).decode()
    except WaitTimeout:
        raise WaitTimeout(
            f"no scheduler has started at {process.address} within {JOIN_SECONDS:g} s: is DMLC_ROLE=scheduler running?"
        ) from None


def _claim(process: Process, secret: str) -> int:
    """This process's number, which no other process has. Waits for the scheduler.

    The coordinator admits each launcher once. A worker or server visits it as the launcher of its number.
    """
    first = 0 if process.role == "worker" else process.workers
    wanted: Iterable[int] = range(process.count) if process.index is None else [process.index]
    lost_after = failure_times(os.environ).silence
    taken: ProtocolError | None = None
    for index in wanted:
        try:
            client = Client(
                process.address, secret.encode(), "launcher", first + index, patience=JOIN_SECONDS, timeout=lost_after
            )
        except ProtocolError as error:
            taken = error
            continue
        job = client.welcome
        client.close(goodbye=True)
        if (job.workers, job.servers) != (process.workers, process.servers):
            raise ArgumentError(
                f"the scheduler runs a job of {job.workers} workers and {job.servers} servers, not of "
                f"{process.workers} and {process.servers}: give all processes the same DMLC_NUM_WORKER and "
                "DMLC_NUM_SERVER"
            )
        return index
    what = (
        f"all {process.count} {process.role}s have" if process.index is None else f"{process.role} {process.index} has"
    )
    raise ArgumentError(f"{what} come to the job at {process.address} before: two jobs at one place?") from taken


def _become_server(process: Process, secret: str, index: int) -> NoReturn:
    """This process goes on as a server: with the same number for the system, so that its launcher sees how it ends.

    It begins afresh, because a server's threads import what this one is in the middle of importing.
    """
    environment = worker_environment(os.environ, coordinator=process.address, secret=secret, index=index)
    environment.setdefault("OMP_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a pipe there would be a leash
    os.set_inheritable(0, True)  # if it was closed, the new descriptor was 0 already
    command = module_command("tensorwire.launch.server_process")
    os.execve(command[0], command, environment)
