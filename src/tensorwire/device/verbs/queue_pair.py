"""One reliable-connected queue pair: its capacity, its outstanding operations, and its completions.

The target of a channel keeps empty receives posted. A signal takes one and so wakes the sleeper there. The target posts
them again and returns them as credits, by a write of nothing whose immediate data is their number: no sender sends
without a receive.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from tensorwire._native import Liveness, Memory
from tensorwire.device.contract import Completion
from tensorwire.device.verbs.failures import loss, refusal
from tensorwire.device.verbs.operation import Operation
from tensorwire.device.verbs.registrations import remote_access
from tensorwire.device.verbs.requests import Local, Remote, Requests, Word
from tensorwire.errors import PeerLost, WaitTimeout
from tensorwire.observe import counters

if TYPE_CHECKING:
    from tensorwire.device.verbs.nic import Nic

Signals = Literal["immediate", "write", "tail"]

POST_SECONDS = 60.0  # how long a full queue may take to drain before a new operation gives up
SENDS, RECEIVES = 512, 512  # work requests of an initiator, signals that a target can take without looking
FEW = 32  # of each for the way back
MOST_PIECES = 64  # work requests of one operation
_POLL_SECONDS = 20e-6  # a completion usually comes within this; a sleep costs more
_RECEIVE = 0  # the number of every receive; operations are counted from 1


class QueuePair:
    """``inbound``: the peer posts here, and we return credits. Safe to use from several threads.

    What is posted holds ``kept`` until it is done.
    """

    def __init__(
        self, nic: Nic, liveness: Liveness, *, inbound: bool, signals: Signals, broken: Callable[[QueuePair], None]
    ) -> None:
        self.nic, self.liveness, self.inbound = nic, liveness, inbound
        self.sends = min(FEW if inbound else SENDS, nic.most_requests)
        self.receives = min(RECEIVES if inbound else FEW, nic.most_requests)
        self._broken = broken
        self._immediate, self._tail = signals == "immediate", signals == "tail"
        self._make = Requests(nic.ib, nic.registrar, places=2 * self.sends, immediate=self._immediate)
        self._largest, self._signaled = nic.port.max_message, self._make.signaled
        self._success, self._flushed = int(nic.ib.WCStatus.SUCCESS), int(nic.ib.WCStatus.WR_FLUSH_ERR)
        self.lock = threading.Lock()
        self._making = threading.Lock()  # held while the queue pair is made, connected or destroyed
        self.done = 0  # every operation up to this number is
        self.number = 0  # of the operation posted last
        self.lost: Callable[[str], None] = liveness.lose
        self.why_lost: Callable[[], str] = lambda: liveness.reason
        self.callbacks: Any = None
        self._pending: deque[Operation] = deque()
        self._room = 0  # for work requests
        self._credits = 0
        self._taken = self._owed = 0  # receives that are not posted again; that the peer does not know of
        self._paused = True  # until it is connected, and while it is made anew
        self._fresh = True  # the peer may not be ready yet
        self._held: list[Any] | None = None
        self._batches = 0
        self._turns = self._waiters = 0  # whenever room may have come; how many wait for it
        self._qp: Any = None
        self._at = 0
        # Two words that waiters look at: the last operation that is done, and the turns.
        self._words = Memory.wrap(array("Q", bytes(16)))
        self._words.bind(nic.liveness, nic.sleepers)

    # ---- the queue pair itself

    def prepare(self) -> Any:
        """A fresh queue pair in state INIT; what the peer must know of it. Raises `PeerLost`."""
        nic = self.nic
        with self._making:
            self._check_alive()
            self._qp, self._at = nic.create(self.sends, self.receives)
            self._start = secrets.randbits(24)
            self._qp.to_init(nic.port.number, remote_access("write"))
            number = self._qp.qp_num
            nic.add(number, self)
        return nic.ib.QPInfo(number, self._start, nic.port.lid, nic.gid.raw, nic.port.number, _mtu(nic.port.mtu))

    def connect(self, peer: Any, credits: int, *, timeout: int, retries: int) -> None:
        """To the peer's queue pair, which has posted ``credits`` receives. Raises `PeerLost`."""
        with self._making:
            self._check_alive()
            self._connect(peer, credits, timeout, retries)

    def _check_alive(self) -> None:
        """While the queue pair is made: a thread that finds the channel lost may destroy it at any moment."""
        if self.liveness.lost or self.nic.liveness.lost:
            raise PeerLost(self.why_lost())

    def _connect(self, peer: Any, credits: int, timeout: int, retries: int) -> None:
        nic, qp = self.nic, self._qp
        self._receive = nic.ib.RecvWR(_RECEIVE, [])
        qp.post_recv([self._receive] * self.receives)  # first: the peer may send as soon as this end is ready
        qp.to_rtr(
            peer,
            sgid_index=nic.gid.index,
            mtu=min(int(peer.mtu), _mtu(nic.port.mtu)),
            hop_limit=64,
            max_dest_rd_atomic=nic.most_reads,
        )
        qp.to_rts(self._start, timeout=timeout, retry_cnt=retries, rnr_retry=7, max_rd_atomic=nic.most_reads)
        with self.lock:
            self._credits, self._taken, self._owed = credits, 0, 0
            self._room = self.sends
            self._post_again()
            self._paused, self._fresh = False, True
            self._wake_waiters()

    def reset(self) -> None:
        """Destroys the NIC's queue pair: nothing of it touches memory any more. `prepare` makes another one."""
        with self._making:
            with self.lock:
                self._paused = True
                qp, self._qp, self._held = self._qp, None, None
            if qp is not None:
                self.nic.destroy(qp, self._at, self.sends + self.receives)

    def destroy(self) -> None:
        """For good: what is outstanding will never be done, and lets go of its memory. Idempotent."""
        self.reset()
        with self.lock:
            pending, self._pending = self._pending, deque()
            self._make.drop_places()
            for operation in pending:
                operation.kept = None

    def destroy_if_lost(self) -> bool:
        """Whether the channel is lost; then nothing of it touches memory any more."""
        if not self.liveness.lost and not self.nic.liveness.lost:
            return False
        if (self._qp is not None or self._pending) and not self.liveness.forked:
            self.destroy()
        return True

    # ---- posting

    def heartbeat(self) -> None:
        """Shows whether the peer's NIC answers, if nothing that is outstanding does so anyhow."""
        with self.lock:
            if not self._pending and not self._paused and not self._fresh:
                self._post(Operation(self, [self._make.nothing(self.number + 1)], None))
            self._fresh = False

    def write(self, local: Local, remote: Remote, signal: Word | None, fence: bool, kept: object) -> Completion:
        """The payload, if there is any, and the signal, if there is one."""
        nbytes = local[1]
        if signal is None or fence or not 0 < nbytes <= self._largest or not self._immediate:
            return self._write(local, remote, signal, fence, kept)
        with self.lock:
            if self._room < 2 or not self._credits or self._paused:
                self._await_room(2, 1)
            requests = self._make.write_and_signal(self.number + 1, local, remote, signal)
            if self._held is None:
                self._send(requests)
                operation = self._record(Operation(self, requests, kept, 1))
            else:
                operation = self._post(Operation(self, requests, kept, 1))
        counters.sent(nbytes)
        return operation

    def _write(self, local: Local, remote: Remote, signal: Word | None, fence: bool, kept: object) -> Completion:
        nbytes, make = local[1], self._make
        if nbytes > self._largest * MOST_PIECES:
            return self._post_parts(make.write, local, remote, signal, fence, kept)
        pieces = -(-nbytes // self._largest)
        with self.lock:
            number = self._reserve(pieces + 1, int(signal is not None and self._immediate))
            requests = make.pieces(number, make.write, local, remote, self._largest) if nbytes or signal is None else []
            credits = 0
            if signal is not None and self._tail and requests and signal[:2] == (remote[0] + nbytes, remote[1]):
                make.append_flag(requests[-1], number, signal[2])
            elif signal is not None:
                requests.append(make.signal(number, signal))
                credits = int(self._immediate)
            if fence:
                requests[0].send_flags |= make.fence
            counters.sent(nbytes)  # before anything of it can be seen at the other end
            return self._post(Operation(self, requests, kept, credits))

    def read(self, local: Local, remote: Remote, kept: object) -> Completion:
        """As ``write``, the other way."""
        nbytes, make = local[1], self._make
        if nbytes > self._largest * MOST_PIECES:
            return self._post_parts(make.read, local, remote, None, False, kept)
        with self.lock:
            number = self._reserve(-(-nbytes // self._largest) + 1, 0)
            counters.sent(nbytes)
            return self._post(Operation(self, make.pieces(number, make.read, local, remote, self._largest), kept))

    def atomic(self, remote: Remote, first: int, second: int | None) -> Operation:
        """Adds ``first``, or swaps it for ``second``. The waiters of that word are woken after it."""
        with self.lock:
            number = self._reserve(2, int(self._immediate))
            requests = self._make.atomic(number, remote, first, second)
            operation = Operation(self, requests, None, int(self._immediate))
            operation.is_atomic = True
            counters.add(messages=1)
            self._post(operation)
        return operation

    def _post_parts(
        self, opcode: int, local: Local, remote: Remote, signal: Word | None, fence: bool, kept: object
    ) -> Completion:
        """More than one operation may hold. A part that is refused keeps all later ones back."""
        (address, left, key), (there, remote_key) = local, remote
        make = self._make
        first: Operation | None = None
        while left:
            nbytes = min(left, self._largest * MOST_PIECES)
            with self.lock:
                number = self._reserve(MOST_PIECES + 1, 1)
                requests = make.pieces(number, opcode, (address, nbytes, key), (there, remote_key), self._largest)
                credits = 0
                if signal is not None and nbytes == left:
                    requests.append(make.signal(number, signal))
                    credits = int(self._immediate)
                if fence and first is None:
                    requests[0].send_flags |= make.fence
                part = Operation(self, requests, kept, credits)
                part.whole = first
                if first is not None and first.error is not None:
                    part.fail(first.error, make.nothing(number))
                counters.sent(nbytes)
                self._post(part)
            first = first or part
            address, there, left = address + nbytes, there + nbytes, left - nbytes
        return part

    def _reserve(self, requests: int, credits: int) -> int:
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
            self._waiters += 1
            self.lock.release()
            try:
                if not self.nic.drain():
                    outcome = self.nic.wait(self._words, 8, seen + 1, end - time.monotonic(), self.liveness)
                    if outcome == 1:
                        raise WaitTimeout(
                            f"verbs: the channel stayed full for {POST_SECONDS:g} s; the operation was not started"
                        )
            finally:
                self.lock.acquire()
                self._waiters -= 1

    def _post(self, operation: Operation) -> Operation:
        """With the lock, and room."""
        requests = operation.requests
        if self._held is None:
            requests[-1].send_flags |= self._signaled
            self._send(requests)
            return self._record(operation)
        requests[-1].send_flags &= ~self._signaled
        self._held.extend(requests)
        self._record(operation)
        if len(self._held) >= MOST_PIECES:
            self._flush()
        return operation

    def _record(self, operation: Operation) -> Operation:
        """It is posted. A thread that reaps completions has to wait for the lock until then."""
        operation.number = self.number = self.number + 1
        self._room -= len(operation.requests)
        self._credits -= operation.credits
        self._pending.append(operation)
        return operation

    def _send(self, requests: list[Any]) -> None:
        if self._qp is None:
            raise PeerLost(self.why_lost())
        try:
            self._qp.post_send(requests)
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
            held[-1].send_flags |= self._signaled
            self._send(held)

    # ---- completions

    def reap(self, completion: Any) -> None:
        """What the NIC says of one work request. Called by the thread that drains, one at a time."""
        number, status = completion.wr_id, completion.status
        if status == self._success:
            with self.lock:
                if number != _RECEIVE:
                    self._complete(number)
                    return
                self._taken += 1
                if not self.inbound:
                    self._credits += completion.imm_data
        elif status != self._flushed and number != _RECEIVE:
            self._fail(number, status)

    def _complete(self, number: int) -> None:
        pending = self._pending
        while pending and pending[0].number <= number:
            operation = pending.popleft()
            self._room += len(operation.requests)
            if operation.is_atomic:
                operation.result = self._make.found(operation.number)
            operation.kept = None
            self.done = operation.number
            for token in operation.tokens:
                self.callbacks.notices.post(token)

    def _fail(self, number: int, status: int) -> None:
        error = refusal(self.nic.ib, status)
        if error is None:
            self.lost(loss(self.nic.ib, status))
            return
        with self.lock:
            if self._qp is None or not self._pending or number < self._pending[0].number:
                return  # of a queue pair that was given up meanwhile
            self._complete(number - 1)
            refused = self._pending[0]
            refused.error = error
            if refused.whole is not None:
                refused.whole.error = refused.whole.error or error
            self._complete(number)
            self._paused = True
        self._broken(self)

    def _post_again(self) -> None:
        """What came after a refused operation: the peer has executed none of it."""
        for operation in self._pending:
            first = operation.whole
            if first is not None and first.error is not None:
                operation.fail(first.error, self._make.nothing(operation.number))
            operation.requests[-1].send_flags |= self._signaled
            self._room -= len(operation.requests)
            self._credits -= operation.credits
            self._send(operation.requests)

    def drained(self) -> None:
        """After a round of completions: wakes waiters, and posts receives again."""
        with self.lock:
            if self._words.load(0) != self.done:
                self._words.store(0, self.done)
            if self._taken:
                self._restock()
            if self._waiters:
                self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._turns += 1
        self._words.store(8, self._turns)

    def _restock(self) -> None:
        taken, self._taken = self._taken, 0
        if self._qp is None or self._paused:
            return
        self._owed += taken
        try:
            self._qp.post_recv([self._receive] * taken)
            if self.inbound and self._owed >= self.receives // 4:
                owed, self._owed = self._owed, 0
                self._post(Operation(self, [self._make.nothing(self.number + 1, self._make.write_imm, owed)], None))
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
        return nic.wait(self._words, 0, number, max(0.0, seconds), self.liveness)

    def call_when_done(self, operation: Operation, call: Callable[[], object]) -> None:
        """Calls once that operation is done, or the channel lost."""
        token = self.callbacks.add(call)
        with self.lock:
            late = self.done >= operation.number
            if not late:
                operation.tokens += (token,)
        if late:
            self.callbacks.notices.post(token)
        else:
            self.liveness.notify(self.callbacks.notices, token)
            self.nic.liveness.notify(self.callbacks.notices, token)


def _mtu(nbytes: int) -> int:
    """As the wire has it: 1 for 256 bytes to 5 for 4096."""
    return max(1, min(5, nbytes.bit_length() - 8))
