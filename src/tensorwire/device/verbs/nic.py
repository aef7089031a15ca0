"""An opened port: its protection domain, its completion queues, and the threads that drain them.

The queues are drained only on need. A waiter polls its word for 5 us; then it arms the completion queues and sleeps on
their channel. Without waiters, one thread sleeps there. It drains in rounds with a pause between them, so that a stream
of signals does not cost an interrupt each.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorwire._native import ATTEND, Liveness, Memory, Sleepers, close_on_fork, forget_fd
from tensorwire.device.verbs import library
from tensorwire.device.verbs.memory import Registrar
from tensorwire.device.verbs.port_selection import PortChoice
from tensorwire.errors import VerbsUnavailable

if TYPE_CHECKING:
    from tensorwire.device.verbs.queue_pair import QueuePair

_COMPLETIONS = 16384  # of one completion queue: about thirty channels
_BATCH = 64
_PAUSE_SECONDS = 1e-3
_opening = threading.Lock()


class Nic:
    """``naps``: signals come without a completion, so waiters look at their words now and then.

    ``tick`` is called every ``heartbeat`` seconds, ``failed`` with the reason if the NIC itself fails. Raises
    `VerbsUnavailable`.
    """

    def __init__(
        self,
        choice: PortChoice,
        liveness: Liveness,
        *,
        completion_queues: int,
        naps: bool,
        heartbeat: float,
        tick: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self.ib = library.load()
        self.port, self.gid = choice.port, choice.gid
        self.liveness = liveness
        self._heartbeat, self._tick, self._failed = heartbeat, tick, failed
        self._pairs: dict[int, QueuePair] = {}
        self._lock = threading.Lock()  # held while draining
        self._closed = False
        self._descriptors: set[int] = set()
        self._opened: list[Any] = []  # except completion queues; what was opened last is closed first
        self._completions: list[Any] = []
        try:
            self._open(completion_queues)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise VerbsUnavailable(f"verbs: {self.port.device} cannot be used: {error}") from None
            raise
        self.sleepers = Sleepers(self._channel.fd, naps)
        self._thread = threading.Thread(target=self._attend, name="tensorwire-verbs", daemon=True)
        self._thread.start()

    def _open(self, completion_queues: int) -> None:
        with _opening:
            before = _verbs_descriptors()
            self.context = self._hold(library.open_device(self.port.device))
            self._channel = self._hold(self.context.create_comp_channel())
            self._descriptors = _verbs_descriptors() - before
        for fd in self._descriptors:  # a forked child's copies would keep our queue pairs alive, or destroy them
            close_on_fork(fd)
        os.set_blocking(self._channel.fd, False)
        attributes = self.context.query_device()
        self.most_requests = int(attributes.max_qp_wr)
        self.most_reads = max(1, min(16, int(attributes.max_qp_rd_atom)))
        self._size = min(_COMPLETIONS, int(attributes.max_cqe))
        self.domain = self._hold(self.context.alloc_pd())
        self.registrar = Registrar(self.domain)
        for _ in range(completion_queues):
            self._completions.append(self._make_completions())
        self._free = [completions.cqe for completions in self._completions]

    def _hold(self, opened: Any) -> Any:
        self._opened.append(opened)
        return opened

    def _release(self) -> None:
        for fd in self._descriptors:
            forget_fd(fd)
        for each in (*self._completions, *reversed(self._opened)):
            each.close()

    def _make_completions(self) -> Any:
        return self.context.create_cq(self._size, self._channel)

    # ---- queue pairs

    def create(self, sends: int, receives: int) -> tuple[Any, int]:
        """A fresh queue pair whose completions have room, and the completion queue it took that from."""
        with self._lock:
            at = max(range(len(self._free)), key=self._free.__getitem__)
            if self._free[at] < sends + receives:
                at = len(self._free)
                self._completions.append(self._make_completions())
                self._free.append(self._completions[-1].cqe)
            completions = self._completions[at]
            wanted = self.ib.QPInitAttr(
                send_cq=completions,
                recv_cq=completions,
                qp_type=self.ib.QPType.RC,
                max_send_wr=sends,
                max_recv_wr=receives,
                max_send_sge=2,
                max_inline_data=16,
            )
            pair = self.domain.create_qp(wanted)
            self._free[at] -= sends + receives
            return pair, at

    def add(self, number: int, pair: QueuePair) -> None:
        """From now on what completes on the NIC's queue pair ``number`` goes to ``pair``."""
        self._pairs[number] = pair

    def destroy(self, pair: Any, at: int, room: int) -> None:
        """When it returns, the NIC touches no memory for that queue pair any more."""
        number = pair.qp_num
        self._pairs.pop(number, None)
        with contextlib.suppress(self.ib.VerbsError):
            pair.close()
        self.drain()  # what it left behind would count against the room of the next one
        with self._lock:
            self._free[at] += room

    # ---- completions

    def drain(self, arm: bool = False) -> int:
        """Handles what has completed; how much. Without ``arm`` it gives up if another thread is at it."""
        if not self._lock.acquire(arm):
            return 0
        try:
            if self._closed:
                return 0
            if arm:
                self._take_events()
                for completions in self._completions:
                    completions.req_notify()
                self.sleepers.armed()
            found, touched = self._poll()
        finally:
            self._lock.release()
        for pair in touched:
            pair.drained()
        if found:
            self.sleepers.wake_all()
        return found

    def _poll(self) -> tuple[int, set[QueuePair]]:
        found, touched = 0, set()
        for completions in self._completions:
            while batch := completions.poll(_BATCH):
                found += len(batch)
                for each in batch:
                    pair = self._pairs.get(each.qp_num)
                    if pair is not None:
                        pair.reap(each)
                        touched.add(pair)
                if len(batch) < _BATCH:
                    break
        return found, touched

    def _take_events(self) -> None:
        try:
            while True:
                self._channel.get_cq_event().ack_events(1)
        except self.ib.VerbsError as error:
            if error.errno != errno.EAGAIN:
                raise

    def wait(self, memory: Memory, offset: int, at_least: int, seconds: float, liveness: Liveness | None) -> int:
        """As `Memory.wait`, and drains meanwhile: 0 reached, 1 timed out, 2 lost."""
        outcome = Memory.wait(memory, offset, at_least, seconds, liveness)
        if outcome != ATTEND:
            return outcome
        end = time.monotonic() + seconds
        try:
            while outcome == ATTEND:
                self.drain(arm=True)
                outcome = Memory.wait(memory, offset, at_least, end - time.monotonic(), liveness)
        except self.ib.VerbsError as error:
            self._lose(error)
            return 2
        finally:
            self.sleepers.left()
        return outcome

    # ---- when nobody waits

    def _attend(self) -> None:
        try:
            self._attend_until_closed()
        except self.ib.VerbsError as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Without its NIC the device has lost every peer."""
        self._failed(f"{self.port.device} failed: {error}")

    def _attend_until_closed(self) -> None:
        next_tick = time.monotonic() + self._heartbeat
        self.drain(arm=True)
        while True:
            outcome = self.sleepers.rest(max(0.0, next_tick - time.monotonic()))
            if outcome == 2 or self._closed:
                return
            if outcome == ATTEND:
                self._drain_in_rounds()
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + self._heartbeat

    def _drain_in_rounds(self) -> None:
        while self.drain() and not self._closed:
            time.sleep(_PAUSE_SECONDS)
        self.drain(arm=True)

    def close(self) -> None:
        """Ends the thread and gives everything back. The queue pairs are gone already."""
        self.sleepers.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(30.0)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.registrar.close()
            self._take_events()
            self._release()


def _verbs_descriptors() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            if str(entry.readlink()).startswith(("/dev/infiniband/uverbs", "anon_inode:[infinibandevent]")):
                found.add(int(entry.name))
    return found
