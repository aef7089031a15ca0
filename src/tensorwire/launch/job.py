"""``init()``: a script finds its place in the job, and from then on shares the job's fate."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tensorwire.control import Cause, Member
from tensorwire.errors import ArgumentError, JobEnded, TensorwireError
from tensorwire.launch import secret as secrets_
from tensorwire.launch.children import start_coordinator, start_server
from tensorwire.launch.place import Place, device_choice, find_place, listening_host
from tensorwire.launch.torchrun import agree
from tensorwire.observe import spans

# After the job has failed, how long this process may take to leave by itself.
GRACE_SECONDS = 5.0

_current: Job | None = None


class Job:
    """This worker's part in a job. Made by `init`; left at the end of the script or by ``close()``."""

    def __init__(self, place: Place, member: Member, children: list[subprocess.Popen[bytes]]) -> None:
        self.rank = place.rank
        self.num_workers = place.workers
        self.num_servers = place.servers
        self.member = member
        self._place = place
        self._children = children
        self._closers: list[Callable[[], None]] = []
        self._stores = 0
        self._failed = False
        self._closed = False
        self._barriers = 0
        member.client.on_end(self._ended)

    def barrier(self, timeout: float = 600.0) -> None:
        """Returns when every worker has come here. An RPC: not for every step."""
        self._barriers += 1
        self.member.client.barrier(f"user/{self._barriers}", self.num_workers, timeout)

    def next_store(self) -> str:
        """The name of this worker's next store: all workers make theirs in the same order."""
        self._stores += 1
        return f"store/{self._stores - 1}"

    def at_close(self, call: Callable[[], None]) -> None:
        """Calls ``call()`` before this worker leaves in good order."""
        self._closers.append(call)

    def close(self) -> None:
        """Leaves the job: this worker is done. Idempotent; runs by itself at the end of the script."""
        global _current
        if self._closed:
            return
        self._closed = True
        if _current is self:
            _current = None
        spans.write(f"worker-{self.rank}")
        failed = self._failed or self.member.client.cause is not None
        if not failed:
            for call in self._closers:
                with contextlib.suppress(TensorwireError):
                    call()
        self.member.close(goodbye=not failed)
        for child in self._children:
            try:
                child.wait(10.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.failed(error)
        self.close()

    def failed(self, error: BaseException) -> None:
        """Tells everybody that this worker ends by ``error``."""
        if self._failed or self._closed:
            return
        self._failed = True
        if isinstance(error, JobEnded):
            return
        if isinstance(error, KeyboardInterrupt):
            self.member.fail("was interrupted")
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        lines = str(error).splitlines()
        self.member.fail(f"raised {type(error).__name__}: {lines[0] if lines else ''}", text)

    def _ended(self, cause: Cause | None) -> None:
        if cause is None:
            return

        def leave() -> None:
            if not self._closed:
                self.tell(f"the job ended: {cause}")
                os._exit(1)

        timer = threading.Timer(float(os.environ.get("TENSORWIRE_GRACE", GRACE_SECONDS)), leave)
        timer.daemon = True
        timer.start()

    @property
    def told_by_launcher(self) -> bool:
        """Whether ``tensorwire run`` tells people how the job ended."""
        return self._place.starter == "run"

    def tell(self, text: str) -> None:
        """One line for people, unless the launcher says it."""
        if not self.told_by_launcher:
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    servers: int | None = None,
) -> Job:
    """Joins the job as a worker. Call it once, first.

    Roles come from ``tensorwire run``, torchrun, Slurm or ``RANK``/``WORLD_SIZE``/``MASTER_*``; alone, this process is
    the one worker, with its server beside it. ``rank``, ``world_size`` and ``rendezvous`` (``HOST:PORT``, where rank 0
    starts the coordinator) say it explicitly. ``servers``: how many the job has where no launcher says.

    Raises `ArgumentError`, `AuthenticationError`, `ProtocolError` or `PeerLost`.
    """
    global _current
    if _current is not None:
        raise ArgumentError("init() was called before in this process; close() that job first")
    place = find_place(os.environ, rank=rank, world_size=world_size, rendezvous=rendezvous, servers=servers)
    children: list[subprocess.Popen[bytes]] = []
    try:
        address, secret, cleanup = _rendezvous(place, children)
        if place.starter != "run":
            for index in range(place.rank, place.servers, place.workers):
                children.append(start_server(index, address, secret.decode()))
        host = listening_host(address, os.environ)
        member = Member(address, secret, "worker", place.rank, device=device_choice(os.environ), host=host)
    except BaseException:
        for child in children:
            child.kill()
            child.wait()
        raise
    if cleanup is not None:
        member.client.barrier("joined", place.workers)
        with contextlib.suppress(FileNotFoundError):
            cleanup.unlink()
    elif place.starter in ("torchrun", "ranks") and not place.several_hosts:
        member.client.barrier("joined", place.workers)
    _current = Job(place, member, children)
    _share_fate(_current)
    return _current


def _rendezvous(place: Place, children: list[subprocess.Popen[bytes]]) -> tuple[str, bytes, Path | None]:
    """Where the coordinator is, the secret, and a file to remove once everybody has joined."""
    if place.starter == "run":
        assert place.rendezvous is not None
        return place.rendezvous, os.environ["TENSORWIRE_SECRET"].encode(), None
    if place.starter == "alone":
        secret = secrets_.new_secret()
        process, address = start_coordinator(secret, place.workers, place.servers, "127.0.0.1", 0)
        children.append(process)
        return address, secret.encode(), None
    return agree(place, children)


def current() -> Job:
    """The job this process is in. Raises `ArgumentError` before `init`."""
    if _current is None:
        raise ArgumentError("call tensorwire.init() first")
    return _current


def _share_fate(job: Job) -> None:
    """An exception that ends this script ends the job, and says so to everybody."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        job.failed(error)
        if isinstance(error, JobEnded):
            job.tell(f"the job ended: {error}")
        elif not job.told_by_launcher:
            previous(kind, error, trace)

    sys.excepthook = hook

    def leave() -> None:
        if not job._closed:
            job.close()

    atexit.register(leave)
