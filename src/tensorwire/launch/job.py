"""``init()``: a script finds its place in the job, and from then on shares the job's fate."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import io
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from tensorwire.control import Cause, Member
from tensorwire.control.address import connect
from tensorwire.control.reach import Route
from tensorwire.control.settings import step_timeout
from tensorwire.control.whereabouts import apart
from tensorwire.errors import ArgumentError, JobEnded, PeerLost, TensorwireError
from tensorwire.launch import secret as secrets_
from tensorwire.launch.children import Child, start_coordinator, start_server
from tensorwire.launch.place import (
    Place,
    device_choice,
    find_place,
    grace_seconds,
    heartbeat,
    listening_interface,
    server_threads,
)
from tensorwire.launch.process_group import ProcessGroup
from tensorwire.launch.scarce import as_out_of_memory
from tensorwire.launch.threads import warn_if_crowded
from tensorwire.launch.torchrun import JOIN_SECONDS, Rendezvous, agree
from tensorwire.observe import spans
from tensorwire.observe.scalars import scalars

if TYPE_CHECKING:
    from tensorwire.launch.collectives import Collectives
    from tensorwire.launch.tensorboard import EventFile

# A lost peer is mostly somebody else's failure, which has a better account.
_SECOND_HAND_SECONDS = 1.0
_LAST_SECONDS = 1.0  # for the last words of a worker that is ended

_current: Job | None = None
_jobs_before = 0


class Pausing(Protocol):
    """A store, as ``Job.uneven`` sees it."""

    def check_pausing(self) -> None:
        """Raises `ArgumentError` in the middle of a step."""

    def idle(self) -> None:
        """Says that this worker's loop has ended, while others may go on."""

    def rejoin(self) -> None:
        """Waits until all are idle, and takes over how far the others came."""


class Job:
    """This worker's part in a job. Made by `init`; left at the end of the script or by ``close()``."""

    def __init__(self, place: Place, member: Member, children: list[Child], hook: _Hook) -> None:
        self.rank = place.rank
        self.num_workers = place.workers
        self.num_servers = place.servers
        self.member = member
        self._place = place
        self._children = children
        self._closers: list[Callable[[], None]] = []
        self._pausing: list[Pausing] = []
        self._stores = 0
        self._counted = False  # whether too many threads would have been told
        self._error: BaseException | None = None  # what ends this worker
        self._closed = False
        self._process_group = ProcessGroup(place.rank, place.workers, member.interface, self.broadcast)
        self._between: Collectives | None = None
        self._events: EventFile | None = None
        self._lock = threading.Lock()
        self._cause: Cause | None = None  # why the job failed
        self._over, self._left = threading.Event(), threading.Event()  # for the job, and for this worker
        self._pid = os.getpid()
        self._grace = grace_seconds(os.environ)
        self._hook = hook
        hook.job = self
        atexit.register(self.close)
        # From the beginning, because Python may start no thread while it ends.
        threading.Thread(target=self._end_in_time, name="tensorwire-end", daemon=True).start()
        member.client.on_end(self._ended)

    def barrier(self, timeout: float = 600.0) -> None:
        """Waits until every worker has come here. It costs a request to the coordinator: not for every step.

        Args:
            timeout: Seconds to wait for the others.

        Raises:
            WaitTimeout: Not all workers came in time; the message names those who came. You may call it again.
            PlanMismatch: Another worker called something else, such as `broadcast`.
            JobEnded: The job ended; the message says why.
            ArgumentError: Another thread of this worker is in such a call.
        """
        self._collectives.barrier(timeout)

    def broadcast(self, value: Any = None, source: int = 0, *, timeout: float = 600.0) -> Any:
        """Returns the value of worker ``source`` on every worker. Call it on all workers.

        Small values travel with one request to the coordinator; larger ones are read from the memory of the source.
        Nothing is pickled. On the source the result is ``value`` itself.

        Args:
            value: None, bool, int of 64 bits, float, str, bytes, numpy arrays and scalars, torch tensors on the CPU
                (their data, without ``requires_grad``), and lists, tuples, dicts and OrderedDicts of them. Ignored on
                workers other than the source.
            source: The rank of the worker whose value counts.
            timeout: Seconds to wait for the others.

        Raises:
            ArgumentError: The value holds something else, the message names it; or another thread of this worker is
                in such a call. The other workers are still waiting.
            PlanMismatch: Another worker called something else; the message says who called what.
            WaitTimeout: Not all workers came in time.
            JobEnded: The job ended; the message says why.
            OutOfMemory: There is no memory for a large value.
        """
        return self._collectives.broadcast(value, source, timeout)

    def all_reduce(self, value: Any, op: str = "sum", *, timeout: float = 600.0) -> Any:
        """Returns the sum, mean, maximum or minimum of all workers' values. Call it on all workers.

        The values are combined in the order of the ranks, so every worker has the same bits. ``value`` is left as it
        is. Small values travel with one request to the coordinator; larger ones are read from the workers' memory.

        Args:
            value: An int of 64 bits, float, bool, numpy array or scalar, or torch tensor on the CPU: of the same type,
                dtype and shape on all workers. bool takes max (any) and min (all). The mean of ints is a float;
                integer arrays and tensors have no mean.
            op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. NaN wins in the last two.
            timeout: Seconds to wait for the others.

        Returns:
            A value of the same type, dtype and shape, contiguous.

        Raises:
            ArgumentError: The value cannot be reduced; or another thread of this worker is in such a call.
            PlanMismatch: Another worker called something else, or with another type, dtype, shape or op.
            WaitTimeout: Not all workers came in time.
            JobEnded: The job ended; the message says why.
            OutOfMemory: There is no memory for a large value.
        """
        return self._collectives.all_reduce(value, op, timeout)

    def report(
        self, *, step: int | None = None, total: int | None = None, samples: int | None = None, **values: Any
    ) -> None:
        """Tells people how the training goes: in the table of ``tensorwire run``, the metrics and TensorBoard.

        It takes microseconds and waits for nothing: a thread passes the latest values on once a second where somebody
        looks at them, and writes all of them to TensorBoard's file where there is one. Each worker reports for itself.

        Args:
            step: Which step this is; by default one more than at the last call.
            total: How many steps there will be, for the time remaining; said once is enough.
            samples: How many samples this worker has taken since the last call, for samples per second.
            **values: A number each, such as ``loss=loss``: an int, float or bool, or a tensor or array of one element.
                At most 32 names.

        Raises:
            ArgumentError: Something is not such a number. Nothing was taken over.
        """
        number, numbers = scalars.report(values, step=step, total=total, samples=samples)
        if self._events is not None:
            self._events.add(number, numbers)

    @property
    def local_rank(self) -> int:
        """This worker's number among those on its machine, in the order of the ranks.

        Processes in different network namespaces count as on different machines. The first look waits, up to 600
        seconds, until all workers have joined; it costs requests to the coordinator. Raises `WaitTimeout` or
        `JobEnded`.
        """
        return self._neighbours.index(self.rank)

    @property
    def local_workers(self) -> int:
        """How many workers are on this machine, this one among them. Waits, and raises, as `local_rank`."""
        return len(self._neighbours)

    @property
    def address(self) -> str:
        """The IP address at which all machines of the job reach that of worker 0; 127.0.0.1 if there is only one.

        Raises `WaitTimeout` if worker 0 has not joined within 600 seconds, or `JobEnded`.
        """
        return self.member.card("worker 0", JOIN_SECONDS).interface

    @functools.cached_property
    def _neighbours(self) -> list[int]:
        """The ranks of the workers on this machine."""
        cards = [self.member.card(f"worker {rank}", JOIN_SECONDS) for rank in range(self.num_workers)]
        return [rank for rank, card in enumerate(cards) if not apart(card.where, self.member.where)]

    @property
    def _collectives(self) -> Collectives:
        with self._lock:
            if self._between is None:
                from tensorwire.launch.collectives import Collectives  # not every script needs numpy

                self._between = Collectives(self.member, self.num_workers, self._pid)
            return self._between

    @property
    def routes(self) -> dict[str, Route]:
        """By which device each server was reached so far, such as ``server 0``, and why: ``device`` and ``why``."""
        return dict(self.member.routes)

    def next_store(self) -> str:
        """The name of this worker's next store: all workers make theirs in the same order."""
        self._count_threads()  # by now the framework has been imported
        self._stores += 1
        return f"store/{self._stores - 1}"

    def drop_store(self) -> None:
        """Gives the last name back: the workers did not agree on that store, and servers know nothing of it."""
        self._stores -= 1

    def _count_threads(self) -> None:
        self._counted = self._counted or warn_if_crowded(self._place, os.environ)

    def at_close(self, call: Callable[[], None]) -> None:
        """Calls ``call()`` before this worker leaves in good order."""
        self._closers.append(call)

    def at_uneven(self, store: Pausing) -> None:
        """Lets ``store`` wait at the end of ``uneven()``, too."""
        self._pausing.append(store)

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """Around the training loop of every worker: their numbers of steps may differ.

        A worker whose loop has ended waits at the end of the block, and counts as gradients of zero in the steps of the
        others. When all are there, all go on, with the same parameters and the same number of steps. An exception
        inside ends the job as ever. Raises `ArgumentError` (with overlap, between backward and step), `JobEnded`, or
        `WaitTimeout` (no other worker took a step in time).
        """
        yield
        try:
            for store in self._pausing:
                store.check_pausing()
            for store in self._pausing:
                store.idle()
            for store in self._pausing:
                store.rejoin()
        except TensorwireError as error:
            raise self.member.explain(error) from None

    def init_process_group(self, backend: str = "gloo", **options: Any) -> None:
        """Makes the default process group of ``torch.distributed`` for the workers. Call it on all workers.

        It works however the job was started: worker 0 serves torch's store on a free port of its own machine, and the
        others learn the port through the job. The group is destroyed when this worker leaves the job. A second call
        does nothing while the group is there.

        Args:
            backend: As for ``torch.distributed.init_process_group``.
            **options: Passed on to it, such as ``timeout``; not ``rank``, ``world_size``, ``store`` or
                ``init_method``, which the job knows.

        Raises:
            ArgumentError: There is a process group that the job did not make, or an option is the job's own.
            Unsupported: PyTorch is missing, or was built without ``torch.distributed``.
            PlanMismatch: Another worker called something else.
            JobEnded: The job ended; the message says why.
        """
        self._process_group.init(backend, options)

    def close(self) -> None:
        """Leaves the job: this worker is done. Idempotent; runs by itself at the end of the script.

        A worker that holds the coordinator or servers of the job stays until the others are done too.
        """
        global _current
        if self._closed or os.getpid() != self._pid:  # a forked child is no member
            return
        self._closed = True
        self._left.set()
        self._over.set()
        atexit.unregister(self.close)
        if _current is self:
            _current = None
        spans.write(f"worker-{self.rank}")
        if self._events is not None:
            self._events.close()
        well = self._error is None and self.member.client.cause is None
        if self._between is not None:
            self._between.close()
        try:
            if well:
                self._process_group.close()
                for call in self._closers:
                    with contextlib.suppress(TensorwireError):
                        call()
                self._hook.remove()
                # Else whoever keeps the job would keep its stores, and the descriptors of their memory.
                self._closers.clear()
                self._pausing.clear()
                self._hook.job = None
            if well and self._children:
                self.member.client.bye()
                self.member.client.ended.wait()
        finally:
            self.member.close(goodbye=well)
            for child in self._children:
                child.close()

    def __repr__(self) -> str:
        cause = self.member.client.cause
        state = f"ended: {str(cause).splitlines()[0]}" if cause else "left" if self._closed else "running"
        servers = f"{self.num_servers} server{'' if self.num_servers == 1 else 's'}"
        return f"<tensorwire.Job: worker {self.rank} of {self.num_workers}, {servers}, {self._place.who}, {state}>"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.failed(error)
        self.close()

    def failed(self, error: BaseException) -> bool:
        """Tells everybody that this worker ends by ``error``; returns whether the launcher will tell people."""
        if os.getpid() != self._pid:
            return False
        client = self.member.client
        if error is not self._error:
            if self._closed or (isinstance(error, SystemExit) and not error.code):
                return False
            self._error = error
            if not client.ended.is_set():
                self._report(error)
        return self.launcher_tells

    def _report(self, error: BaseException) -> None:
        if isinstance(error, JobEnded):
            return
        if isinstance(error, KeyboardInterrupt):
            self.member.fail("was interrupted")
            return
        if isinstance(error, SystemExit):
            self.member.fail(
                f"exited with status {error.code}" if isinstance(error.code, int) else f"exited: {error.code}"
            )
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        lines = str(error).splitlines()
        settle = _SECOND_HAND_SECONDS if isinstance(error, PeerLost) else 0.0
        self.member.fail(f"raised {type(error).__name__}: {lines[0] if lines else ''}", text, settle=settle)

    def _ended(self, cause: Cause | None) -> None:
        self._cause = cause
        self._over.set()

    def _end_in_time(self) -> None:
        """A script that goes on computing after the job has failed is ended."""
        self._over.wait()
        if self._cause is None or self._left.wait(self._grace):
            return
        try:
            spans.write(f"worker-{self.rank}")
            with open(os.devnull, "w") as nowhere:
                faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True, file=nowhere)  # should a full pipe keep us
                self.tell(self._cause)
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
        finally:
            os._exit(1)  # also where no descriptor was left

    @property
    def launcher_tells(self) -> bool:
        """Whether a launcher says how the job ended. That of node 0 is lost with the coordinator."""
        at_node_0 = os.environ.get("TENSORWIRE_NODE", "0") == "0"
        return self._place.starter == "run" and not (self.member.client.lost and at_node_0)

    def tell(self, why: object) -> None:
        """One line for people about how the job ended, unless the launcher says it."""
        if not self.launcher_tells:
            _say(self.member.name, why)


class _Hook:
    """``sys.excepthook``: an exception that ends this script ends the job, and people are told once."""

    def __init__(self, place: Place) -> None:
        self.job: Job | None = None
        self.refusal: BaseException | None = None  # why a worker of `tensorwire run` could not join
        self._place = place
        self._previous = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is self.refusal:  # where in the script init() was called says nothing more
            _write_line(f"worker {self._place.rank} could not join the job: {error}")
            return
        told = self.job.failed(error) if self.job is not None else False
        if not _is_consequence(error):
            if not told:
                self._previous(kind, error, trace)
        elif self.job is not None:
            self.job.tell(error)
        elif self._place.starter != "run":  # the job failed before this worker had joined
            _say(f"worker {self._place.rank}", error)

    def remove(self) -> None:
        """Python says again what it always says."""
        if sys.excepthook is self:
            sys.excepthook = self._previous


def _say(name: str, why: object) -> None:
    _write_line(f"{name}: the job ended: {why}")


def _write_line(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"tensorwire: {text}\n")
        sys.stderr.flush()


def _is_consequence(error: BaseException | None) -> bool:
    """Whether ``error`` is the job's end, or was raised while that was handled."""
    while error is not None:
        if isinstance(error, JobEnded):
            return True
        error = error.__cause__ or error.__context__
    return False


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    servers: int | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
) -> Job:
    """Joins the job as a worker. Call it once, first.

    Roles come from ``tensorwire run``, torchrun, Slurm or ``RANK``/``WORLD_SIZE``/``MASTER_*``; alone, this process is
    the one worker, with its server beside it. ``rank``, ``world_size`` and ``rendezvous`` (``HOST:PORT``, where rank 0
    starts the coordinator) say it explicitly. ``servers``: how many the job has where no launcher says.
    ``tensorboard``: the folder in which each worker writes what `Job.report` is told, by default that of ``tensorwire
    run --tensorboard``; it needs the package tensorboard.

    Raises `ArgumentError` (also without that package), `AuthenticationError`, `ProtocolError`, `JobEnded`,
    `OutOfMemory` (also of descriptors and threads), or `PeerLost` and `WaitTimeout` where the other ranks do not come.
    """
    global _current, _jobs_before
    if _current is not None:
        raise ArgumentError("init() was called before in this process; close() that job first")
    place = find_place(os.environ, rank=rank, world_size=world_size, rendezvous=rendezvous, servers=servers)
    if place.starter == "run":
        _buffer_lines()
    for said in (grace_seconds, heartbeat, server_threads, step_timeout):  # refuse what others would stumble over later
        said(os.environ)
    children: list[Child] = []
    meeting: Rendezvous | None = None
    hook = _Hook(place)
    try:
        with as_out_of_memory():
            meeting = _meet(place, children)
            scalars.clear()
            job = _join(place, meeting, children, hook)
            job._count_threads()
            job._events = _event_file(tensorboard, place.rank)
        if place.starter in ("torchrun", "ranks") and not place.several_machines:
            job.member.client.barrier("joined", place.workers, JOIN_SECONDS)
    except BaseException as error:
        if hook.job is not None:
            hook.job.failed(error)
            hook.job.close()
        elif place.starter == "run" and isinstance(error, TensorwireError):
            hook.refusal = None if isinstance(error, JobEnded) else error
        elif not isinstance(error, JobEnded):
            hook.remove()
        for child in children:
            child.close(0.0)
        raise
    finally:
        if meeting is not None and meeting.handout is not None:
            meeting.handout.close()
    _jobs_before += 1
    _current = job
    return job


def _event_file(folder: str | os.PathLike[str] | None, rank: int) -> EventFile | None:
    found = os.environ.get("TENSORWIRE_TENSORBOARD") if folder is None else os.fspath(folder)
    if not found:
        return None
    from tensorwire.launch.tensorboard import EventFile

    return EventFile(found, rank)


def _buffer_lines() -> None:
    """Standard output as on the terminal that the launcher keeps for itself: each line is out when it is printed."""
    with contextlib.suppress(OSError, ValueError):  # closed, or without a descriptor
        if isinstance(sys.stdout, io.TextIOWrapper) and stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
            sys.stdout.reconfigure(line_buffering=True)


def _meet(place: Place, children: list[Child]) -> Rendezvous:
    if place.starter == "run":
        assert place.rendezvous is not None
        return Rendezvous(place.rendezvous, os.environ["TENSORWIRE_SECRET"])
    if place.starter == "alone":
        secret = secrets_.new_secret()
        child, address = start_coordinator(secret, place.workers, place.servers, "127.0.0.1", 0)
        children.append(child)
        return Rendezvous(address, secret)
    return agree(place, _jobs_before, children)


def _join(place: Place, meeting: Rendezvous, children: list[Child], hook: _Hook) -> Job:
    if meeting.patience:  # rank 0 may not have begun; whoever goes on from here finds its coordinator
        connect(meeting.address, meeting.patience).close()
    if place.starter != "run":
        for index in range(place.rank, place.servers, place.workers):
            children.append(start_server(index, meeting.address, meeting.secret))
    interface = listening_interface(meeting.address, os.environ)
    secret, device = meeting.secret.encode(), device_choice(os.environ)
    _, lost_after = heartbeat(os.environ)
    member = Member(
        meeting.address, secret, "worker", place.rank, device=device, interface=interface, timeout=lost_after
    )
    return Job(place, member, children, hook)


def current() -> Job:
    """The job this process is in. Raises `ArgumentError` before `init`."""
    if _current is None:
        raise ArgumentError("call tensorwire.init() first")
    return _current
