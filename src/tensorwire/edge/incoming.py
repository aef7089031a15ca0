"""A peer's tensors in this process: the arrival words, and the tensors' memory."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

from tensorwire._native import Hold, Memory
from tensorwire.device import Completion, Region, RemoteRegion
from tensorwire.edge.bank import Bank, check_number, hold_all, hold_part
from tensorwire.edge.header import Header
from tensorwire.edge.peers import Peers
from tensorwire.edge.pool import Pool
from tensorwire.edge.words import (
    ANNOUNCED,
    BEGUN,
    CREDITS,
    LINE,
    PRODUCER_WORDS,
    RETURNED,
    PeerMemory,
    RemoteWords,
    announced,
    arrival,
    check_maps,
    consumer_words,
    unpack_loans,
    unpack_regions,
    wait_unless,
)
from tensorwire.errors import DeviceError, OutOfMemory, ProtocolError, WaitTimeout
from tensorwire.observe import counters


@dataclass(slots=True)
class _Reading:
    """A read on its way: of what, and what keeps the memory that it fills."""

    header: Header
    hold: Hold
    completion: Completion
    kept: bool = False


class Incoming:
    """What this process receives from ``peer``.

    ``edges``: all of the pair. ``loans``: bytes of each that is lent. ``nbytes``: of the producer's outbox. ``depth``:
    how many banks to begin with; with ``grows`` there may be more. ``pool``: for payloads of any size that cannot be
    mapped. ``defers()``: whether it is a bad moment to send a credit on a device that maps nothing.
    """

    def __init__(
        self,
        peers: Peers,
        peer: str,
        edges: list[int],
        loans: dict[int, int],
        nbytes: int,
        pool: Pool,
        *,
        depth: int,
        grows: bool,
        defers: Callable[[], bool],
    ) -> None:
        self.peer, self._peers, self._nbytes, self._pool = peer, peers, nbytes, pool
        self._depth, self._grows, self._defers, self._loans = depth, grows, defers, loans
        self._channel = channel = peers.channel(peer)
        self.maps = channel.device.capabilities.maps
        self._place = {edge: at for at, edge in enumerate(edges)}
        self._words = channel.device.allocate(consumer_words(len(edges)))
        self._banks: list[Bank] = []
        self._regions: list[Region] = []
        self._lent: dict[int, Hold] = {}
        self._landings: dict[int, Region] = {}
        self._mapped: dict[int, Memory] = {}  # of payloads of any size
        self._reading: _Reading | None = None
        self._bank: Bank | None = None  # of this step
        self._now: Hold | None = None  # all of its bytes
        self._credited: dict[int, int] = {}  # by bank, the last step that it was given back in
        self._owed: collections.deque[tuple[int, int]] = collections.deque()  # banks that were released, and steps
        if not self.maps:
            self._landings = {edge: channel.device.allocate(size) for edge, size in loans.items()}
            self._lent = {edge: hold_all(region) for edge, region in self._landings.items()}
            for _ in range(depth if len(edges) > len(loans) else 0):
                self._new_bank()

    def memory(self) -> PeerMemory:
        """For the producer."""
        loans = {edge: region.remote().pack() for edge, region in self._landings.items()}
        banks = [region.remote().pack() for region in self._regions]
        return PeerMemory(self._words.remote().pack(), banks, loans, self.maps)

    def open(self, memory: PeerMemory) -> None:
        """Takes what the producer said. Raises `ProtocolError` for what does not fit this group."""
        (words,) = unpack_regions([memory.words], PRODUCER_WORDS)
        self._back = RemoteWords(words)
        check_maps(memory, self.maps, self.peer)
        if not self.maps:
            return
        self._map(words)  # so that no credit finds too few descriptors
        for region in unpack_regions(memory.banks, self._nbytes, self._depth if self._nbytes else 0):
            self._map_bank(region)
        for edge, region in unpack_loans(memory, self._loans, self.peer).items():
            self._lent[edge] = hold_all(self._map(region))

    def _map(self, region: RemoteRegion) -> Memory:
        memory = self._channel.map(region.view())
        assert memory is not None
        return memory

    def _map_bank(self, region: RemoteRegion) -> None:
        self._banks.append(Bank(len(self._banks), self._map(region)))

    def _new_bank(self) -> Bank:
        check_number(len(self._banks), self._peers.name)
        region = self._channel.device.allocate(self._nbytes)
        self._regions.append(region)
        self._banks.append(Bank(len(self._banks), region))
        return self._banks[-1]

    def _signal(self, word: int, value: int) -> None:
        self._channel.signal(self._back.at(LINE * word), value)

    def begin(self, step: int) -> None:
        """Step ``step`` begins here. A producer that finds all banks of earlier steps held goes on in another one."""
        self._now = None
        self.give_credits()
        if not self._grows:
            return
        # Not whether they are held: one that is released just now may wait until it is given back.
        kept = [self._credited.get(bank.number, 0) < bank.step for bank in self._banks]
        if not any(kept):
            return
        if all(kept) and not self.maps:
            bank = self._new_bank()
            self._peers.publish(f"inbox {bank.number}", self.peer, self._regions[-1].remote().pack())
        self._signal(BEGUN, step)

    def ready(self, edge: int, step: int) -> bool:
        """Whether ``edge`` has arrived in ``step``."""
        self.give_credits()
        return self._words.load(arrival(self._place[edge], step)) >> 8 >= step

    def receive(self, edge: int, step: int, timeout: float) -> Hold:
        """Waits for ``edge``; the memory in which it lies: the producer's outbox, or its own where it is lent."""
        self.give_credits()
        words, offset, channel = self._words, arrival(self._place[edge], step), self._channel
        if words.closed or words.load(offset) < step << 8:
            wait_unless(lambda seconds: words.wait(offset, step << 8, seconds, channel), timeout, self._gone_on)
        lent = self._lent.get(edge)
        if lent is not None:
            return lent
        if self._now is None:
            self._now = self._hold(words.load(offset) & 255, step)
        return self._now

    @property
    def all_held(self) -> bool:
        """Whether this process looks into every bank that there is."""
        return all(bank.held for bank in self._banks)

    def payload(self, header: Header, held: Hold, timeout: float) -> Hold:
        """The payload that ``header``, which was received in ``held``, leads to: the producer's own where it can be
        mapped, else read into the pool. Raises `ProtocolError`, `OutOfMemory`, `PeerLost`, or `WaitTimeout`: then one
        may go on waiting."""
        region, device = header.region, self._channel.device
        if region is None or region.device != device.name:
            raise ProtocolError(f"{self.peer} sent a header that points to no memory of {device.name}")
        if not self.maps:
            return self._read(header, region, timeout)
        memory = self._find_mapped(region)
        if header.offset + header.nbytes > memory.nbytes:
            raise ProtocolError(f"{self.peer} sent a header that points beyond its {memory.nbytes} bytes of memory")
        counters.mapped(header.nbytes)
        return hold_part(memory, header.offset, header.nbytes, held)

    def _find_mapped(self, region: RemoteRegion) -> Memory:
        memory = self._mapped.get(region.key)
        if memory is None or memory.closed:
            self._mapped = {key: memory for key, memory in self._mapped.items() if not memory.closed}
            memory = self._mapped[region.key] = self._map(region)
        return memory

    def _read(self, header: Header, region: RemoteRegion, timeout: float) -> Hold:
        reading = self._reading
        if reading is None or reading.header != header:
            lease = self._pool.lease(header.nbytes)
            if not header.nbytes:
                return lease.hold
            target = lease.slab.region.view(lease.offset, header.nbytes)
            completion = self._channel.read(target, region.view(header.offset, header.nbytes))
            self._reading = reading = _Reading(header, lease.hold, completion)
        try:
            reading.completion.wait(timeout)
        finally:
            if reading.completion.done:
                self._reading = None
            elif not reading.kept:  # the caller may wait again; until then nobody else gets this memory
                reading.kept = True
                reading.completion.on_done(lambda _: reading)
        return reading.hold

    def _gone_on(self) -> Exception | None:
        self.give_credits()  # what another thread released at a bad moment
        return self._peers.gone_on(self.peer, self._words.load(announced(len(self._place))))

    def _hold(self, number: int, step: int) -> Hold:
        while self.maps and self._grows and number >= len(self._banks):
            packed = self._peers.lookup(f"outbox {len(self._banks)}", self.peer)
            self._map_bank(*unpack_regions([packed], self._nbytes))
        if number >= len(self._banks):
            raise ProtocolError(f"{self.peer} sent a tensor in bank {number} of {len(self._banks)}")
        self._bank = self._banks[number]
        return self._bank.hold(step, self._let_go)

    def part(self, offset: int, nbytes: int, held: Hold) -> Hold:
        """A part of the bank of this step, which was received as ``held``."""
        assert self._bank is not None
        return hold_part(self._bank.owner, offset, nbytes, held)

    def _let_go(self, bank: Bank) -> None:
        """Called as the last tensor in the bank dies, perhaps by the garbage collector in the middle of anything.

        A device that maps stores a word. On others, sending may be what the collector has interrupted.
        """
        self._owed.append((bank.number, bank.step))
        if self.maps or not self._defers():
            self.give_credits()

    def give_credits(self) -> None:
        """Gives back the banks that were released."""
        while self._owed:
            try:
                number, step = self._owed.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self._signal(CREDITS + number, step)
            except (WaitTimeout, OutOfMemory):  # the channel is full: the next one that comes back takes it along
                self._owed.append((number, step))
                return
            except DeviceError:
                pass  # of a peer that is gone, or a channel that was closed
            self._credited[number] = step

    def announce(self, number: int) -> None:
        """See `EdgeGroup.announce`."""
        self._signal(ANNOUNCED, number)

    def end(self, step: int, borrows: bool) -> None:
        """Step ``step`` is over here. ``borrows``: it has read what the producer had lent."""
        self._now = None
        self.give_credits()
        if borrows:
            self._signal(RETURNED, step)

    def close(self) -> None:
        """Gives the memory back."""
        if not self._words.closed:
            self.give_credits()
            self._pool.trim()
        for region in (self._words, *self._regions, *self._landings.values()):
            region.close()
