"""This process as a worker of the job. Layers above build on it; `Job` exposes part of it to users."""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tensorwire.control import Cause, Member
from tensorwire.control.locality import apart
from tensorwire.control.names import member_name
from tensorwire.errors import (
    ArgumentError,
    JobEnded,
    OutOfMemory,
    PeerLost,
    StepInterrupted,
    TensorwireError,
    Unsupported,
)
from tensorwire.launch.children import Child
from tensorwire.launch.excepthook import ExceptHook, print_end
from tensorwire.launch.place import Place, grace_seconds
from tensorwire.launch.process_group import ProcessGroup
from tensorwire.launch.threads import warn_if_crowded
from tensorwire.launch.torchrun import JOIN_SECONDS
from tensorwire.observe import spans

if TYPE_CHECKING:
    from tensorwire.launch.collectives import Collectives
    from tensorwire.launch.tensorboard import EventFile

# A lost peer is mostly the consequence of another failure, which its own process describes better.
_SECOND_HAND_SECONDS = 1.0
_LAST_SECONDS = 1.0  # for the last messages of a worker that is ended
_COLLECTIVE_SECONDS = 600.0

_current: Worker | None = None
_status = 0  # of this process, where leaving the job at the end of the script has failed


@atexit.register
def _exit() -> None:
    if _status:
        _flush()
        os._exit(_status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class UnevenStore(Protocol):
    """A store, as ``Job.uneven`` uses it."""

    def check_pausing(self) -> None:
        """Raises `ArgumentError` in the middle of a step."""

    def idle(self) -> None:
        """Announces that this worker's loop has ended, while others may go on."""

    def rejoin(self) -> None:
        """Waits until all are idle, and takes over the state that the other workers reached."""


class CountsSteps(Protocol):
    """An optimizer of the store, as ``Job.steps`` uses it."""

    @property
    def steps_taken(self) -> int:
        """How many steps are over."""


class Worker:
    """One worker's membership in a job, from `init` to the end.

    Args:
        place: The worker's rank and the size of the job.
        member: Its connections.
        children: The processes of the job that this worker started, and ends.
        hook: The ``sys.excepthook`` of this process.
    """

    def __init__(self, place: Place, member: Member, children: list[Child], hook: ExceptHook) -> None:
        self.rank, self.num_workers, self.num_servers = place.rank, place.workers, place.servers
        self.place, self.member = place, member
        self.process_group = ProcessGroup(place.rank, place.workers, member.interface, self._share)
        self.events: EventFile | None = None
        self.uneven_stores: list[UnevenStore] = []
        # What an error of a framework's stands for, if that is one of ours.
        self.translations: list[Callable[[BaseException], TensorwireError | None]] = []
        self.closed = False
        self.early = False  # it leaves before the job is over
        self.terms = 0  # SIGTERMs: it is to leave after its step
        self.optimizers: weakref.WeakSet[CountsSteps] = weakref.WeakSet()
        self._children = children
        self._closers: list[Callable[[], None]] = []
        self._dropped: collections.deque[Callable[[], None]] = collections.deque()  # of those, whose owners are gone
        self._stores = 0
        self._threads_checked = False
        self._error: BaseException | None = None  # what ends this worker
        self._collectives: Collectives | None = None
        self._lock = threading.Lock()
        self._cause: Cause | None = None  # why the job failed
        self._publishes = False  # and has said so
        self._over, self._left = threading.Event(), threading.Event()  # for the job, and for this worker
        self._pid = os.getpid()
        self._grace = grace_seconds(os.environ)
        self._hook = hook
        hook.worker = self
        atexit.register(self._close_at_exit)
        # From the beginning, because Python may start no thread while it ends.
        threading.Thread(target=self._end_in_time, name="tensorwire-end", daemon=True).start()
        member.client.on_end(self._ended)

    # ---- for the layers above

    @property
    def joins(self) -> bool:
        """Whether it came into a job that had begun: then the others' values count."""
        return self.member.client.welcome.joins

    def say_published(self) -> None:
        """Worker 0 tells people, once, where they find what the job publishes."""
        if self.rank == 0 and not self._publishes:
            self._publishes = True
            job = self.member.client.welcome.job
            print(f"tensorwire: job {job} publishes its weights: tensorwire ls {job}", file=sys.stderr, flush=True)

    @property
    def collectives(self) -> Collectives:
        """Barrier, broadcast and all-reduce among the workers."""
        self.finish_dropped()
        with self._lock:
            if self._collectives is None:
                from tensorwire.launch.collectives import Collectives  # not every script needs numpy

                self._collectives = Collectives(self.member, self.num_workers, self._pid)
            return self._collectives

    @functools.cached_property
    def neighbors(self) -> list[int]:
        """The ranks of the workers on this machine. Waits until all have joined."""
        cards = [self.member.card(member_name("worker", rank), JOIN_SECONDS) for rank in range(self.num_workers)]
        return [rank for rank, card in enumerate(cards) if not apart(card.where, self.member.where)]

    def next_store(self) -> str:
        """Returns the name of this worker's next store: all workers create theirs in the same order."""
        self.finish_dropped()
        self.check_threads()  # by now the framework has been imported
        self._stores += 1
        return f"store/{self._stores - 1}"

    def release_store(self) -> None:
        """Gives the last name back: the workers did not agree on that store, and servers know nothing of it."""
        self._stores -= 1

    def refuse_to_change(self, what: str) -> None:
        """Raises `Unsupported` in a job whose workers come and go, for what needs all of them to the end."""
        if self.member.membership.survives:
            raise Unsupported(f"{what} needs all workers to the end: start the job without min_workers")

    def steps_taken(self) -> int:
        """How many steps this worker's optimizer has taken; of several, the one with the fewest."""
        return min((optimizer.steps_taken for optimizer in self.optimizers), default=0)

    def end_step(self) -> None:
        """Between two steps: where a SIGTERM has come, this worker leaves the job, and the script ends."""
        if self.terms:
            self.leave()
            raise SystemExit(0)

    def leave(self) -> None:
        """Leaves a job that goes on without this worker. Raises `Unsupported` for others."""
        if not self.member.membership.survives:
            raise Unsupported("a worker may leave a job that was started with min_workers; others end with its first")
        self.early = True
        self.close()

    def leave_on_sigterm(self) -> None:
        """From now on SIGTERM lets a worker of a job that survives it end its step and leave, as a preempted machine
        asks for. It has the time in which a process has to leave a failed job; then it is ended, and lost."""
        if not self.member.membership.survives or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def note(number: int, _: object) -> None:
            self.terms += 1
            if self.terms > 1 or self.closed:
                os._exit(128 + number)
            threading.Thread(target=self._end_after, args=(128 + number,), name="tensorwire-term", daemon=True).start()

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, note)

    def _end_after(self, status: int) -> None:
        if not self._left.wait(self._grace):
            os._exit(status)

    def check_threads(self) -> None:
        """Warns, once, where the workers of this machine compute with more threads than it has cores."""
        self._threads_checked = self._threads_checked or warn_if_crowded(self.place, os.environ)

    def at_close(self, call: Callable[[], None], owner: object | None = None) -> None:
        """Calls ``call()`` before this worker leaves in good order.

        Where ``owner``, which ``call`` must not refer to, is gone earlier, it is called by `finish_dropped`.
        """
        self._closers.append(call)
        if owner is not None:
            weakref.finalize(owner, self._note_dropped, call).atexit = False

    def _note_dropped(self, call: Callable[[], None]) -> None:
        if not self.closed:
            self._dropped.append(call)

    def not_at_close(self, call: Callable[[], None]) -> None:
        """Takes `at_close` back: it has been done."""
        if not self.closed and call in self._closers:
            self._closers.remove(call)

    def finish_dropped(self) -> None:
        """Calls what is due because its owner is gone: here, since a finalizer may run in any thread, anywhere.

        What was interrupted is no hindrance to a new beginning. It stays until this worker leaves, and then says so.
        """
        while self._dropped and os.getpid() == self._pid:
            call = self._dropped.popleft()
            if call in self._closers:
                self.not_at_close(call)
                try:
                    call()
                except StepInterrupted:
                    self._closers.append(call)

    def leave_earlier(self) -> None:
        """At the end of a script, this worker leaves before exit calls that were registered until now."""
        atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)

    # ---- failure

    def fail(self, error: BaseException) -> bool:
        """Reports to the job that ``error`` ends this worker.

        Returns:
            Whether the launcher prints the reason.
        """
        if os.getpid() != self._pid:
            return False
        client = self.member.client
        if error is not self._error:
            if self.closed or (isinstance(error, SystemExit) and not error.code):
                return False
            self._error = error
            if not client.ended.is_set():
                self._report(error)
        return self.launcher_prints

    def _report(self, error: BaseException) -> None:
        if isinstance(error, JobEnded):
            return
        if isinstance(error, KeyboardInterrupt):
            self.member.fail("was interrupted")
            return
        if isinstance(error, SystemExit):
            self.member.fail(
                f"exited with status {error.code}" if isinstance(error.code, int) else f"exited: {error.code}",
                alone=True,
            )
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        ours = next((found for translate in self.translations if (found := translate(error)) is not None), error)
        lines = str(ours).splitlines()
        settle = _SECOND_HAND_SECONDS if isinstance(ours, PeerLost) else 0.0
        alone = self.joins or not isinstance(ours, TensorwireError) or isinstance(ours, (PeerLost, OutOfMemory))
        self.member.fail(f"raised {type(ours).__name__}: {lines[0] if lines else ''}", text, settle=settle, alone=alone)

    @property
    def launcher_prints(self) -> bool:
        """Whether a launcher prints how the job ended. That of node 0 is lost with the coordinator."""
        at_node_0 = os.environ.get("TENSORWIRE_NODE", "0") == "0"
        return self.place.starter == "run" and not (self.member.client.lost and at_node_0)

    def print_end(self, why: object) -> None:
        """Prints one line about how the job ended, unless the launcher does."""
        if not self.launcher_prints:
            print_end(self.member.name, why)

    def _ended(self, cause: Cause | None) -> None:
        self._cause = cause
        self._over.set()

    def _end_in_time(self) -> None:
        """Ends a script that goes on computing after the job has failed."""
        self._over.wait()
        if self._cause is None or self._left.wait(self._grace):
            return
        try:
            spans.write(f"worker-{self.rank}")
            with open(os.devnull, "w") as nowhere:
                faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True, file=nowhere)  # should a full pipe keep us
                self.print_end(self._cause)
                _flush()
        finally:
            os._exit(1)  # also where no descriptor was left

    # ---- the end

    def close(self) -> None:
        """Leaves the job. Idempotent; without effect in a forked child, which is not a member.

        Raises, when all is closed, the first error of what `at_close` was given, which ends the job.
        """
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        self._left.set()
        self._over.set()
        atexit.unregister(self._close_at_exit)
        if _current is self:
            set_current(None)
        spans.write(f"worker-{self.rank}")
        if self.events is not None:
            self.events.close()
        well, error = self._error is None and self.member.client.cause is None, None
        if self._collectives is not None:
            self._collectives.close()
        try:
            if well:
                error = self._leave()
                well = error is None
            if well and self._children:
                self.member.client.bye()
                self.member.client.ended.wait()
        finally:
            self.member.close(goodbye=well, early=self.early)
            for child in self._children:
                child.close()
        if error is not None:
            raise error

    def _close_at_exit(self) -> None:
        """The script has ended: Python ignores what this raises, and its exit status says nothing of it."""
        global _status
        try:
            self.close()
        except BaseException as error:
            _status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            sys.excepthook(type(error), error, error.__traceback__)

    def _leave(self) -> BaseException | None:
        """Closes everything. The first error, which is reported at once: what still waits then does so in vain."""
        for call in (self.process_group.close, *self._closers):
            try:
                call()
            except BaseException as error:
                if self._error is None:
                    self._error = self.member.explain(error) if isinstance(error, TensorwireError) else error
                    self._report(self._error)
        if self._error is None:
            self._hook.remove()
            self._hook.worker = None
        # Otherwise a reference to the job would keep its stores, and the descriptors of their memory.
        self._closers.clear()
        self._dropped.clear()
        self.uneven_stores.clear()
        return self._error

    def _share(self, value: str | None) -> str:
        shared: str = self.collectives.broadcast(value, 0, _COLLECTIVE_SECONDS)
        return shared


def current_worker() -> Worker:
    """Returns this process as a worker. Raises `ArgumentError` where it is in no job."""
    if _current is None:
        raise ArgumentError("call tensorwire.init() first")
    return _current


def set_current(worker: Worker | None) -> None:
    """Records which worker this process is; None: it is in no job."""
    global _current
    _current = worker


def in_a_job() -> bool:
    """Whether this process is a worker now."""
    return _current is not None
