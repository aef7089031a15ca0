"""``init()``: a script finds its place in the job, and joins it."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys

from tensorwire.control import Member
from tensorwire.control.address import connect
from tensorwire.control.settings import failure_times, step_timeout
from tensorwire.errors import ArgumentError, JobEnded, TensorwireError
from tensorwire.launch import secret as secrets_
from tensorwire.launch.children import Child, start_coordinator, start_server
from tensorwire.launch.excepthook import ExceptHook
from tensorwire.launch.job import Job
from tensorwire.launch.place import (
    Place,
    device_choice,
    find_place,
    grace_seconds,
    listening_interface,
    server_threads,
)
from tensorwire.launch.scarce import as_out_of_memory
from tensorwire.launch.tensorboard import EventFile
from tensorwire.launch.torchrun import JOIN_SECONDS, Rendezvous, agree
from tensorwire.launch.worker import Worker, in_a_job, set_current
from tensorwire.observe.scalars import scalars

_jobs_before = 0


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    servers: int | None = None,
    min_workers: int | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
) -> Job:
    """Joins the job as a worker. Call it once, before anything else of Tensorwire.

    The rank and the size of the job come from ``tensorwire run``, torchrun, Slurm or ``RANK``, ``WORLD_SIZE`` and
    ``MASTER_*``, in every case through environment variables; without any of these, this process is the only worker,
    and starts a server of its own. Arguments override the environment.

    Args:
        rank: This worker's number; ``world_size`` and ``rendezvous`` are needed with it.
        world_size: How many workers there are.
        rendezvous: ``HOST:PORT``, where rank 0 starts the coordinator of the job.
        servers: How many servers the job has; by default one for each worker. Under ``tensorwire run``, its
            ``--servers`` counts.
        min_workers: With so many workers left the job goes on without those that are lost; by default the first loss
            ends it. Under ``tensorwire run``, its ``--min-workers`` counts. The same on all workers. Under other
            launchers no worker can be spared that has started the coordinator (rank 0) or servers: see ``servers``.
        tensorboard: The folder in which each worker writes an event file of what `Job.report` is given. By default
            that of ``tensorwire run --tensorboard``, if any.

    Returns:
        The job, of which this process is a worker from now on: if any process of it fails, the job ends for all, but
        for workers that ``min_workers`` can do without.

    Raises:
        ArgumentError: An argument or environment variable is wrong, the package tensorboard is missing, or this
            process is in a job already.
        AuthenticationError: The coordinator has another secret.
        ProtocolError: What listens at ``rendezvous`` is not a coordinator of this version.
        PeerLost: The coordinator could not be reached, or is gone.
        WaitTimeout: The other ranks did not come within 600 seconds.
        OutOfMemory: There is not enough memory, or there are not enough descriptors or threads.
        JobEnded: The job ended meanwhile; the message says why.
    """
    global _jobs_before
    if in_a_job():
        raise ArgumentError("init() was already called in this process; close() that job first")
    place = find_place(
        os.environ, rank=rank, world_size=world_size, rendezvous=rendezvous, servers=servers, min_workers=min_workers
    )
    if place.starter == "run":
        _buffer_lines()
    for read in (grace_seconds, failure_times, server_threads, step_timeout):  # refuse now what would fail later
        read(os.environ)
    children: list[Child] = []
    meeting: Rendezvous | None = None
    hook = ExceptHook(place)
    try:
        with as_out_of_memory():
            meeting = _meet(place, children)
            scalars.clear()
            worker = _join(place, meeting, children, hook)
            worker.check_threads()
            worker.events = _event_file(tensorboard, place.rank)
        if place.starter in ("torchrun", "ranks") and not place.several_machines:
            worker.member.client.barrier("joined", place.workers, JOIN_SECONDS)
    except BaseException as error:
        if hook.worker is not None:
            hook.worker.fail(error)
            hook.worker.close()
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
    worker.leave_on_sigterm()
    _jobs_before += 1
    set_current(worker)
    return Job(worker)


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
        child, address = start_coordinator(secret, place, "127.0.0.1", 0)
        children.append(child)
        return Rendezvous(address, secret)
    return agree(place, _jobs_before, children)


def _join(place: Place, meeting: Rendezvous, children: list[Child], hook: ExceptHook) -> Worker:
    if meeting.patience:  # rank 0 may not have begun; what follows finds its coordinator
        connect(meeting.address, meeting.patience).close()
    if place.starter != "run":
        for index in range(place.rank, place.servers, place.workers):
            children.append(start_server(index, meeting.address, meeting.secret))
    interface = listening_interface(meeting.address, os.environ)
    secret, device = meeting.secret.encode(), device_choice(os.environ)
    lost_after = failure_times(os.environ).silence
    member = Member(
        meeting.address, secret, "worker", place.rank, device=device, interface=interface, timeout=lost_after
    )
    return Worker(place, member, children, hook)
