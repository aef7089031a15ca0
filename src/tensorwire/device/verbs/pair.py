"""One reliable-connected queue pair: its room, what is outstanding on it, and what its completions say.

The target of a channel keeps empty receives posted. A signal takes one and so wakes who sleeps there. The target posts
them again and returns them as credits, by a write of nothing whose immediate data is their number: nobody sends what
finds no receive.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from tensorwire._native import Life, Memory
from tensorwire.device.contract import Completion
from tensorwire.errors import DeviceError, PeerLost, RemoteAccessError, WaitTimeout

if TYPE_CHECKING:
    from tensorwire.device.verbs.nic import Nic

Signals = Literal["immediate", "write", "tail"]

POST_SECONDS = 60.0  # how long a full queue may take to drain before a new operation gives up
SENDS, RECEIVES = 512, 512  # work requests of an initiator, signals that a target can take without looking
FEW = 32  # of each for the way back
MOST_PIECES = 64  # work requests of one operation
_POLL_SECONDS = 20e-6  # a completion usually comes within this; a sleep costs more

WRITE, WRITE_IMM = 0, 1  # IBV_WR_*
SIGNALED = 2  # IBV_SEND_*
_SUCCESS, _FLUSHED, _RETRIES = 0, 5, 12  # IBV_WC_*
_REFUSED = {
    9: "an invalid request",
    10: "no open region has that key, or out of its range, or it is read-only",
    11: "it failed there",
}
_OURS = {1: "length", 4: "protection of the local memory", 8: "access"}
_GONE = {
    2: "this machine's own port sends nothing: is it down?",
    _RETRIES: "its NIC does not answer: it, its machine or the link is gone",
}
_RECEIVE = 0  # the number of every receive; operations are counted from 1


class Operation(Completion):
    """What was posted at once, under one number. It holds its memory until it is done."""

    number = 0
    error: Exception | None = None
    atomic = -1  # the place of what the word was
    result = 0
    tokens: tuple[int, ...] = ()
    whole: Operation | None = None  # the first part, of an operation in several

    def __init__(self, queue: Pair, requests: list[Any], kept: object, credits: int = 0) -> None:
        self._queue = queue
        self.requests = requests
        self.kept = kept
        self.credits = credits

    def fail(self, error: Exception, number: int) -> None:
        """It fails in its turn, as ``number``, and does nothing instead: its place in the order is kept."""
        self.error, self.credits = error, 0
        self.requests = [self._queue.nothing(number)]

    @property
    def done(self) -> bool:
        queue = self._queue
        if queue.done < self.number:
            queue.nic.drain()
        return queue.done >= self.number or queue.bury_if_lost()

    def wait(self, timeout: float = 60.0) -> None:
        queue = self._queue
        if queue.done < self.number:
            outcome = queue.wait(self.number, timeout)
            if outcome == 1:
                raise WaitTimeout(
                    f"verbs: no acknowledgement within {timeout:g} s; the transfer goes on: do not reuse its memory"
                )
            if outcome == 2 and queue.done < self.number:
                queue.bury_if_lost()
                raise PeerLost(queue.why_lost())
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _call_when_done(self, call: Callable[[Completion], object]) -> None:
        self._queue.tell(self, lambda: call(self))


class Pair:
    """``inbound``: the peer posts here, and we return credits. Safe to use from several threads."""

    def __init__(
        self, nic: Nic, life: Life, *, inbound: bool, signals: Signals, broken: Callable[[Pair], None]
    ) -> None:
        self.nic, self.life, self.inbound = nic, life, inbound
        self.sends = min(FEW if inbound else SENDS, nic.most_requests)
        self.receives = min(RECEIVES if inbound else FEW, nic.most_requests)
        self._signals, self._broken = signals, broken
        self._immediate = signals == "immediate"
        self._largest = nic.port.max_message
        self._request, self._sge = nic.ib.SendWR, nic.ib.SGE
        self.lock = threading.Lock()
        self._making = threading.Lock()  # held while the queue pair is made, connected or destroyed
        self.done = 0  # every operation up to this number is
        self.number = 0  # of the operation posted last
        self.lost: Callable[[str], None] = life.lose
        self.why_lost: Callable[[], str] = lambda: life.reason
        self.callbacks: Any = None
        self._pending: deque[Operation] = deque()
        self._room = 0  # for work requests
        self._credits = 0
        self._taken = self._owed = 0  # receives that are not posted again; that the peer does not know of
        self._paused = True  # until it is connected, and while it is made anew
        self._fresh = True  # the peer may not be ready yet
        self._held: list[Any] | None = None
        self._batches = 0
        self._turns = self._crowd = 0  # whenever room may have come; who waits for it
        self._pair: Any = None
        self._at = 0
        self._make_words()

    def _make_words(self) -> None:
        """Words that waiters look at, and one 8-byte place an operation: for its signal, or an atomic's old value."""
        self._words = Memory.wrap(array("Q", bytes(16)))
        self._words.bind(self.nic.life, self.nic.sleepers)
        places = self.nic.registrar.allocate(16 * self.sends, True)
        self._values: memoryview = memoryview(places).cast("B").cast("Q")
        key = self.nic.registrar.cover(places).lkey
        sge, base = self.nic.ib.SGE, places.address
        self._count = len(self._values)
        self._flags = [[sge(base + 8 * i, 8, key)] for i in range(self._count)]

    # ---- the queue pair itself

    def prepare(self) -> Any:
        """A fresh queue pair in state INIT; what the peer must know of it. Raises `PeerLost`."""
        ib, nic = self.nic.ib, self.nic
        with self._making:
            self._check_alive()
            self._pair, self._at = nic.create(self.sends, self.receives)
            self._start = secrets.randbits(24)
            access = ib.AccessFlags
            self._pair.to_init(
                nic.port.number, access.REMOTE_WRITE | access.REMOTE_READ | access.REMOTE_ATOMIC | access.LOCAL_WRITE
            )
            number = self._pair.qp_num
            nic.enter(number, self)
        return ib.QPInfo(number, self._start, nic.port.lid, nic.gid.raw, nic.port.number, _mtu(nic.port.mtu))

    def connect(self, peer: Any, credits: int, *, timeout: int, retries: int) -> None:
        """To the peer's queue pair, which has posted ``credits`` receives. Raises `PeerLost`."""
        with self._making:
            self._check_alive()
            self._connect(peer, credits, timeout, retries)

    def _check_alive(self) -> None:
        """While the queue pair is made: whoever finds the channel lost may bury it at any moment."""
        if self.life.lost or self.nic.life.lost:
            raise PeerLost(self.why_lost())

    def _connect(self, peer: Any, credits: int, timeout: int, retries: int) -> None:
        nic, pair = self.nic, self._pair
        self._receive = nic.ib.RecvWR(_RECEIVE, [])
        pair.to_rtr(
            peer,
            sgid_index=nic.gid.index,
            mtu=min(int(peer.mtu), _mtu(nic.port.mtu)),
            hop_limit=64,
            max_dest_rd_atomic=nic.most_reads,
        )
        pair.post_recv([self._receive] * self.receives)
        pair.to_rts(self._start, timeout=timeout, retry_cnt=retries, rnr_retry=7, max_rd_atomic=nic.most_reads)
        with self.lock:
            self._credits, self._taken, self._owed = credits, 0, 0
            self._room = self.sends
            self._post_again()
            self._paused, self._fresh = False, True
            self._turn()

    def discard(self) -> None:
        """Destroys the queue pair: nothing of it touches memory any more."""
        with self._making:
            with self.lock:
                self._paused = True
                pair, self._pair, self._held = self._pair, None, None
            if pair is not None:
                self.nic.destroy(pair, self._at, self.sends + self.receives)

    def bury(self) -> None:
        """For good: what is outstanding will never be done, and lets go of its memory. Idempotent."""
        self.discard()
        with self.lock:
            pending, self._pending = self._pending, deque()
            self._flags.clear()
            self._values = memoryview(b"")
        for operation in pending:
            operation.kept = None

    def bury_if_lost(self) -> bool:
        """Whether the channel is lost; then nothing of it touches memory any more."""
        if not self.life.lost and not self.nic.life.lost:
            return False
        if (self._pair is not None or self._pending) and not self.life.forked:
            self.bury()
        return True

    # ---- posting

    def beat(self) -> None:
        """Shows whether the peer's NIC answers, if nothing that is outstanding does so anyhow."""
        with self.lock:
            if not self._pending and not self._paused and not self._fresh:
                self._post(Operation(self, [self.nothing(self.number + 1)], None))
            self._fresh = False

    def nothing(self, number: int, kind: int = WRITE, immediate: int = 0) -> Any:
        """A work request that moves nothing."""
        return self._request(number, [], kind, 0, 0, 0, immediate)

    def _enter(self, requests: int, credits: int) -> int:
        """With the lock: waits for room; the number of the next operation."""
        if self._room < requests or self._credits < credits or self._paused:
            self._await_room(requests, credits)
        return self.number + 1

    def _await_room(self, requests: int, credits: int) -> None:
        end = time.monotonic() + POST_SECONDS
        while True:
            self._check_alive()
            if self._held:
                self._flush()
            if not self._paused and self._room >= requests and self._credits >= credits:
                return
            seen = self._turns
            self._crowd += 1
            self.lock.release()
            try:
                if not self.nic.drain():
                    outcome = self.nic.wait(self._words, 8, seen + 1, end - time.monotonic(), self.life)
                    if outcome == 1:
                        raise WaitTimeout(
                            f"verbs: the channel stayed full for {POST_SECONDS:g} s; the operation was not started"
                        )
            finally:
                self.lock.acquire()
                self._crowd -= 1

    def _post(self, operation: Operation) -> Operation:
        """With the lock, and room."""
        requests = operation.requests
        if self._held is None:
            requests[-1].send_flags |= SIGNALED
            self._send(requests)
            return self._note(operation)
        requests[-1].send_flags &= ~SIGNALED
        self._held.extend(requests)
        self._note(operation)
        if len(self._held) >= MOST_PIECES:
            self._flush()
        return operation

    def _note(self, operation: Operation) -> Operation:
        """It is on its way. Whoever reaps completions has to wait for the lock until then."""
        operation.number = self.number = self.number + 1
        self._room -= len(operation.requests)
        self._credits -= operation.credits
        self._pending.append(operation)
        return operation

    def _send(self, requests: list[Any]) -> None:
        if self._pair is None:
            raise PeerLost(self.why_lost())
        try:
            self._pair.post_send(requests)
        except self.nic.ib.VerbsError as error:
            self.lost(f"its queue pair takes no work: {error}")
            raise PeerLost(self.why_lost()) from None

    # ---- batches

    def begin_batch(self) -> None:
        """What is posted from now on goes to the NIC together, with one completion."""
        with self.lock:
            self._batches += 1
            if self._held is None:
                self._held = []

    def end_batch(self) -> None:
        """Ends what ``begin_batch`` began."""
        with self.lock:
            self._batches -= 1
            if self._held:
                self._flush()
            if not self._batches:
                self._held = None

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held:
            held[-1].send_flags |= SIGNALED
            self._send(held)

    # ---- completions

    def reap(self, completion: Any) -> None:
        """What the NIC says of one work request. Called by whoever drains, one at a time."""
        number, status = completion.wr_id, completion.status
        if status == _SUCCESS:
            with self.lock:
                if number != _RECEIVE:
                    self._complete(number)
                    return
                self._taken += 1
                if not self.inbound:
                    self._credits += completion.imm_data
        elif status != _FLUSHED and number != _RECEIVE:
            self._fail(number, status)

    def _complete(self, number: int) -> None:
        pending = self._pending
        while pending and pending[0].number <= number:
            operation = pending.popleft()
            self._room += len(operation.requests)
            if operation.atomic >= 0:
                operation.result = self._values[operation.atomic]
            operation.kept = None
            self.done = operation.number
            for token in operation.tokens:
                self.callbacks.notices.post(token)

    def _fail(self, number: int, status: int) -> None:
        if status not in _REFUSED and status not in _OURS:
            self.lost(_GONE.get(status, f"the queue pair failed with status {status} (IBV_WC_*)"))
            return
        with self.lock:
            if self._pair is None or not self._pending or number < self._pending[0].number:
                return  # of a queue pair that was given up meanwhile
            self._complete(number - 1)
            refused = self._pending[0]
            if status in _REFUSED:
                refused.error = RemoteAccessError(f"verbs: the target refused: {_REFUSED[status]}")
            else:
                refused.error = DeviceError(f"verbs: this NIC refused its own memory ({_OURS[status]}): was it freed?")
            if refused.whole is not None:
                refused.whole.error = refused.whole.error or refused.error
            self._complete(number)
            self._paused = True
        self._broken(self)

    def _post_again(self) -> None:
        """What was behind a refused operation: the peer has executed none of it."""
        for operation in self._pending:
            first = operation.whole
            if first is not None and first.error is not None:
                operation.fail(first.error, operation.number)
            operation.requests[-1].send_flags |= SIGNALED
            self._room -= len(operation.requests)
            self._credits -= operation.credits
            self._send(operation.requests)

    def drained(self) -> None:
        """After a round of completions: waiters are told, and receives posted again."""
        with self.lock:
            if self._words.load(0) != self.done:
                self._words.store(0, self.done)
            if self._taken:
                self._restock()
            if self._crowd:
                self._turn()

    def _turn(self) -> None:
        self._turns += 1
        self._words.store(8, self._turns)

    def _restock(self) -> None:
        taken, self._taken = self._taken, 0
        if self._pair is None or self._paused:
            return
        self._owed += taken
        try:
            self._pair.post_recv([self._receive] * taken)
            if self.inbound and self._owed >= self.receives // 4:
                owed, self._owed = self._owed, 0
                self._post(Operation(self, [self.nothing(self.number + 1, WRITE_IMM, owed)], None))
        except (self.nic.ib.VerbsError, PeerLost) as error:
            self.lost(f"its queue pair takes no work: {error}")

    # ---- waiting

    def wait(self, number: int, seconds: float) -> int:
        """Until that operation is done: 0; 1 timed out, 2 lost."""
        if self._held:
            with self.lock:
                self._flush()
        nic = self.nic
        until = time.monotonic() + min(seconds, _POLL_SECONDS)
        while True:
            nic.drain()
            if self.done >= number:
                return 0
            if time.monotonic() >= until:
                break
        return nic.wait(self._words, 0, number, max(0.0, seconds), self.life)

    def tell(self, operation: Operation, call: Callable[[], object]) -> None:
        """Calls once that operation is done, or the channel lost."""
        token = self.callbacks.add(call)
        with self.lock:
            late = self.done >= operation.number
            if not late:
                operation.tokens += (token,)
        if late:
            self.callbacks.notices.post(token)
        else:
            self.life.notify(self.callbacks.notices, token)
            self.nic.life.notify(self.callbacks.notices, token)
        self.callbacks.rescue(token)


def _mtu(nbytes: int) -> int:
    """As the wire has it: 1 for 256 bytes to 5 for 4096."""
    return max(1, min(5, nbytes.bit_length() - 8))
