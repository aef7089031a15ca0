"""What is posted on a queue pair: writes with their signals, reads, atomics, in pieces that the port can carry.

A signal is an inlined 8-byte write behind its payload, on the same queue pair and posted with it: what arrives in order
is seen in order. With immediate data it wakes who sleeps at the target.
"""

from __future__ import annotations

from typing import Any

from tensorwire.device.contract import Completion
from tensorwire.device.verbs.pair import MOST_PIECES, SIGNALED, WRITE, WRITE_IMM, Operation, Pair
from tensorwire.observe import counters

_READ, _SWAP, _ADD = 4, 5, 6  # IBV_WR_*
_FENCE, _INLINE = 1, 8  # IBV_SEND_*
_INLINE_SIGNALED = _INLINE | SIGNALED


class Queue(Pair):
    """``local`` is (address, bytes, key), ``remote`` (address, key), ``signal`` (address, key, value).

    What is posted holds ``kept`` until it is done.
    """

    def write(
        self,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        signal: tuple[int, int, int] | None,
        fence: bool,
        kept: object,
    ) -> Completion:
        """The payload, if there is any, and the signal, if there is one."""
        address, nbytes, key = local
        if signal is None or fence or not 0 < nbytes <= self._largest or not self._immediate:
            return self._write(local, remote, signal, fence, kept)
        # The same for what is usual, with few calls: whatever comes before the NIC has it delays every transfer.
        with self.lock:
            if self._room < 2 or not self._credits or self._paused:
                self._await_room(2, 1)
            number = self.number + 1
            place = number % self._count
            self._values[place] = signal[2]
            request = self._request
            requests = [
                request(number, [self._sge(address, nbytes, key)], WRITE, 0, *remote),
                request(number, self._flags[place], WRITE_IMM, _INLINE_SIGNALED, signal[0], signal[1]),
            ]
            if self._held is None:
                self._send(requests)
                operation = self._note(Operation(self, requests, kept, 1))
            else:
                operation = self._post(Operation(self, requests, kept, 1))
        counters.sent(nbytes)
        return operation

    def _write(
        self,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        signal: tuple[int, int, int] | None,
        fence: bool,
        kept: object,
    ) -> Completion:
        nbytes = local[1]
        if nbytes > self._largest * MOST_PIECES:
            return self._in_parts(WRITE, local, remote, signal, fence, kept)
        pieces = -(-nbytes // self._largest)
        tail = signal is not None and self._signals == "tail" and signal[:2] == (remote[0] + nbytes, remote[1])
        with self.lock:
            number = self._enter(pieces + 1, int(signal is not None and self._immediate))
            requests = self._pieces(WRITE, local, remote, number) if nbytes or signal is None else []
            credits = 0
            if signal is not None and tail and requests:
                self._append_flag(requests[-1], number, signal[2])
            elif signal is not None:
                credits = self._append_signal(requests, number, signal)
            if fence:
                requests[0].send_flags |= _FENCE
            counters.sent(nbytes)  # before anything of it can be seen at the other end
            return self._post(Operation(self, requests, kept, credits))

    def read(self, local: tuple[int, int, int], remote: tuple[int, int], kept: object) -> Completion:
        """As ``write``, the other way."""
        nbytes = local[1]
        if nbytes > self._largest * MOST_PIECES:
            return self._in_parts(_READ, local, remote, None, False, kept)
        with self.lock:
            number = self._enter(-(-nbytes // self._largest) + 1, 0)
            counters.sent(nbytes)
            return self._post(Operation(self, self._pieces(_READ, local, remote, number), kept))

    def atomic(self, remote: tuple[int, int], first: int, second: int | None) -> Operation:
        """Adds ``first``, or swaps it for ``second``. The waiters of that word are woken behind it."""
        with self.lock:
            number = self._enter(2, int(self._immediate))
            place = number % self._count
            kind = _ADD if second is None else _SWAP
            requests = [self._request(number, self._flags[place], kind, 0, *remote, 0, first, second or 0)]
            if self._immediate:
                requests.append(self.nothing(number, WRITE_IMM))
            operation = Operation(self, requests, None, int(self._immediate))
            operation.atomic = place
            counters.add(messages=1)
            self._post(operation)
        return operation

    def _in_parts(
        self,
        kind: int,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        signal: tuple[int, int, int] | None,
        fence: bool,
        kept: object,
    ) -> Completion:
        """More than one operation may hold. A part that is refused keeps all later ones back."""
        (address, left, key), (there, remote_key) = local, remote
        first: Operation | None = None
        while left:
            nbytes = min(left, self._largest * MOST_PIECES)
            with self.lock:
                number = self._enter(MOST_PIECES + 1, 1)
                requests = self._pieces(kind, (address, nbytes, key), (there, remote_key), number)
                credits = 0
                if signal is not None and nbytes == left:
                    credits = self._append_signal(requests, number, signal)
                if fence and first is None:
                    requests[0].send_flags |= _FENCE
                part = Operation(self, requests, kept, credits)
                part.whole = first
                if first is not None and first.error is not None:
                    part.fail(first.error, number)
                counters.sent(nbytes)
                self._post(part)
            first = first or part
            address, there, left = address + nbytes, there + nbytes, left - nbytes
        return part

    def _pieces(self, kind: int, local: tuple[int, int, int], remote: tuple[int, int], number: int) -> list[Any]:
        """Work requests of at most the port's largest message each."""
        (address, nbytes, key), (there, remote_key) = local, remote
        request, sge, largest = self._request, self._sge, self._largest
        if nbytes <= largest:
            parts = [sge(address, nbytes, key)] if nbytes else []
            return [request(number, parts, kind, 0, there if nbytes else 0, remote_key if nbytes else 0)]
        return [
            request(number, [sge(address + at, min(largest, nbytes - at), key)], kind, 0, there + at, remote_key)
            for at in range(0, nbytes, largest)
        ]

    def _append_signal(self, requests: list[Any], number: int, signal: tuple[int, int, int]) -> int:
        place = number % self._count
        self._values[place] = signal[2]
        kind = WRITE_IMM if self._immediate else WRITE
        requests.append(self._request(number, self._flags[place], kind, _INLINE, signal[0], signal[1]))
        return int(self._immediate)

    def _append_flag(self, request: Any, number: int, value: int) -> None:
        """The paper's single write: the flag is its last 8 bytes."""
        place = number % self._count
        self._values[place] = value
        request.sg_list = [*request.sg_list, *self._flags[place]]
