"""The work requests of a queue pair: posting operations to the NIC, and the memory of their signals.

A signal is an inlined 8-byte write after its payload, on the same queue pair and posted with it, so both become visible
in order. Immediate data wakes a sleeping waiter at the target.
"""

from __future__ import annotations

from typing import Any

from tensorwire.device.verbs.memory import Registrar

Local = tuple[int, int, int]  # address, bytes, key
Remote = tuple[int, int]  # address, key
Word = tuple[int, int, int]  # address, key, value


class Requests:
    """Makes the work requests of one queue pair, whose lock its caller holds.

    Args:
        ib: The module ``ibverbs``.
        registrar: For ``places`` words of 8 bytes: an operation's number says which holds its signal, or what an
            atomic found.
        places: At least as many as there can be operations on their way.
        immediate: Whether a signal wakes a waiter that sleeps at the target.
    """

    def __init__(self, ib: Any, registrar: Registrar, *, places: int, immediate: bool) -> None:
        opcode, flag = ib.WROpcode, ib.SendFlags
        # Plain integers: to combine two flags of an enum takes a microsecond, and every transfer would.
        self.write, self.write_imm = int(opcode.RDMA_WRITE), int(opcode.RDMA_WRITE_WITH_IMM)
        self.read = int(opcode.RDMA_READ)
        self._swap, self._add = int(opcode.ATOMIC_CMP_AND_SWP), int(opcode.ATOMIC_FETCH_AND_ADD)
        self.signaled, self.fence, self._inline = int(flag.SIGNALED), int(flag.FENCE), int(flag.INLINE)
        self._inline_signaled = self._inline | self.signaled
        self._signal = self.write_imm if immediate else self.write
        self._request, self._sge = ib.SendWR, ib.SGE
        self.immediate = immediate
        self._take_places(registrar, places)

    def _take_places(self, registrar: Registrar, count: int) -> None:
        memory = registrar.allocate(8 * count, True)
        key, sge, base = registrar.cover(memory).lkey, self._sge, memory.address
        self._values: memoryview = memoryview(memory).cast("B").cast("Q")
        self._count = len(self._values)
        self._places = [[sge(base + 8 * i, 8, key)] for i in range(self._count)]

    def drop_places(self) -> None:
        """Gives back the memory of signals: nothing is posted any more."""
        self._places.clear()
        self._values = memoryview(b"")

    def write_and_signal(self, number: int, local: Local, remote: Remote, signal: Word) -> list[Any]:
        """What is usual, with few calls: whatever comes before the NIC has it delays every transfer.

        One message of payload, and a signal that asks for a completion.
        """
        place = number % self._count
        self._values[place] = signal[2]
        request = self._request
        return [
            request(number, [self._sge(*local)], self.write, 0, *remote),
            request(number, self._places[place], self._signal, self._inline_signaled, signal[0], signal[1]),
        ]

    def pieces(self, number: int, opcode: int, local: Local, remote: Remote, largest: int) -> list[Any]:
        """Requests of at most ``largest`` bytes each; one that moves nothing for no bytes."""
        (address, nbytes, key), (there, remote_key) = local, remote
        request, sge = self._request, self._sge
        if nbytes <= largest:
            parts = [sge(address, nbytes, key)] if nbytes else []
            return [request(number, parts, opcode, 0, there if nbytes else 0, remote_key if nbytes else 0)]
        return [
            request(number, [sge(address + at, min(largest, nbytes - at), key)], opcode, 0, there + at, remote_key)
            for at in range(0, nbytes, largest)
        ]

    def signal(self, number: int, signal: Word) -> Any:
        """The request that sets a word of the peer's."""
        place = number % self._count
        self._values[place] = signal[2]
        return self._request(number, self._places[place], self._signal, self._inline, signal[0], signal[1])

    def append_flag(self, request: Any, number: int, value: int) -> None:
        """The paper's single write: the flag is the last 8 bytes of the payload's own request."""
        place = number % self._count
        self._values[place] = value
        request.sg_list = [*request.sg_list, *self._places[place]]

    def atomic(self, number: int, remote: Remote, first: int, second: int | None) -> list[Any]:
        """Adds ``first``, or swaps it for ``second``; then wakes the waiters of that word."""
        opcode = self._add if second is None else self._swap
        place = self._places[number % self._count]
        made = [self._request(number, place, opcode, 0, *remote, 0, first, second or 0)]
        return [*made, self.nothing(number, self.write_imm)] if self.immediate else made

    def found(self, number: int) -> int:
        """What the atomic of that number found."""
        return int(self._values[number % self._count])

    def nothing(self, number: int, opcode: int | None = None, immediate: int = 0) -> Any:
        """A request that moves nothing: a write, if no opcode says otherwise."""
        return self._request(number, [], self.write if opcode is None else opcode, 0, 0, 0, immediate)
