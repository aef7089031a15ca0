"""What one worker receives from one other: the arrival words, and the memory that the values are in."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tensorwire._native import Hold, Memory
from tensorwire.device import Channel, Region, RemoteRegion
from tensorwire.edge import Pool
from tensorwire.edge.header import Header
from tensorwire.errors import DeviceError, PlanMismatch, ProtocolError, WaitTimeout
from tensorwire.graph.bank import Bank, Held, Ledger, hold, too_many
from tensorwire.observe import counters

T = TypeVar("T")
LINE = 64  # bytes between words: each has its cache line
RUNS = 256  # arrival words of an edge: a source is never as many runs ahead, as each takes one of MOST_BANKS
OVER = 1 << 62  # the number of a plan that nobody makes: a worker that says it runs no graph any more
_LOOK = 1.0  # seconds between looks whether the other worker still runs the same graph
POLL = 0.005  # seconds between looks at two words at once
BANKS = 2  # to begin with: a run may start while the last one's tensors are alive

# Words in the source's memory, one of each a target; behind them a credit word a bank.
BEGUN, RETURNED, PLANNING, CREDITS = range(4)


class Door(msgspec.Struct, frozen=True):
    """What a worker tells one other about a plan.

    Its words, its first banks, by edge its memory for what is lent, and whether it maps the other's memory.
    """

    words: bytes
    banks: list[bytes]
    loans: dict[int, bytes]
    maps: bool


def pack(run: int, bank: int) -> int:
    """A word that says which bank goes with which run. It grows with the run."""
    return run << 8 | bank


def arrival(place: int, run: int) -> int:
    """Where the arrival word is of an edge, the ``place``-th of its pair of workers, in that run."""
    return 8 * (place * RUNS + run % RUNS)


def moved_on(planning: int, plans: int) -> str:
    """What a worker does that last said ``planning``, if not what this one does, which has made ``plans`` plans."""
    if planning <= plans:
        return ""
    return "runs no graph any more" if planning >= OVER else "plans another graph"


def mismatch(worker: str, does: str, name: str) -> PlanMismatch:
    """That ``worker`` does something else, while this worker runs graph ``name``."""
    return PlanMismatch(
        f"{worker} {does}, while this worker runs graph {name} once more: did they get arguments of other shapes, take "
        "another branch, or another number of steps?"
    )


def patiently(wait: Callable[[float], T], timeout: float, worker: str, does: Callable[[], str], name: str) -> T:
    """``wait(seconds)`` for something that ``worker`` sends in a run of graph ``name``, unless that has moved on.

    ``does()``: as `moved_on`; a worker says so after all that it sent before. Raises `PlanMismatch`, or what ``wait``
    raises.
    """
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            return wait(min(_LOOK, left))
        except WaitTimeout:
            if not does():
                if left <= _LOOK:
                    raise
                continue
        try:
            return wait(0.0)
        except WaitTimeout:
            raise mismatch(worker, does(), name) from None


class Inflow:
    """What this worker receives from ``worker``.

    ``edges``: all of the pair. ``loans``: bytes of each that is lent. ``nbytes``: of the source's outbox. ``pool``: for
    payloads of any size that cannot be mapped.
    """

    def __init__(
        self,
        worker: str,
        channel: Channel,
        edges: list[int],
        loans: dict[int, int],
        nbytes: int,
        pool: Pool,
        ledger: Ledger,
    ) -> None:
        self.worker, self._channel, self._nbytes, self._ledger = worker, channel, nbytes, ledger
        self._pool = pool
        self.maps = channel.device.capabilities.maps
        self._place = {edge: at for at, edge in enumerate(edges)}
        self._planning = 8 * RUNS * len(edges)  # behind the arrival words
        self._words = channel.device.allocate(self._planning + 8)
        self._banks: list[Bank] = []
        self._regions: list[Region] = []
        self._lent: dict[int, Held] = {}
        self._landings: dict[int, Region] = {}
        self._mapped_regions: dict[int, Memory] = {}  # of payloads of any size
        self._now: Held | None = None
        # Banks that were let go of, and their runs.
        self._owed: collections.deque[tuple[int, int]] = collections.deque()
        if not self.maps:
            self._landings = {edge: channel.device.allocate(size) for edge, size in loans.items()}
            self._lent = {edge: hold(memoryview(region)) for edge, region in self._landings.items()}
            for _ in range(BANKS if len(edges) > len(loans) else 0):
                self._new_bank()

    def door(self) -> Door:
        """For the source."""
        loans = {edge: region.remote("write").pack() for edge, region in self._landings.items()}
        banks = [region.remote("write").pack() for region in self._regions]
        return Door(self._words.remote("write").pack(), banks, loans, self.maps)

    def open(self, door: Door) -> None:
        """Takes what the source told."""
        self._back = RemoteRegion.unpack(door.words)
        if self.maps:
            for packed in door.banks:
                self._map_bank(packed)
            self._lent = {edge: hold(self._mapped(packed)) for edge, packed in door.loans.items()}

    def _mapped(self, packed: bytes) -> memoryview:
        memory = self._channel.map(RemoteRegion.unpack(packed).view())
        assert memory is not None
        return memoryview(memory)

    def _map_bank(self, packed: bytes) -> None:
        self._banks.append(Bank(len(self._banks), self._mapped(packed)))

    def _new_bank(self) -> Bank:
        too_many(len(self._banks), self._ledger.name)
        region = self._channel.device.allocate(self._nbytes)
        self._regions.append(region)
        self._banks.append(Bank(len(self._banks), memoryview(region)))
        return self._banks[-1]

    def _tell(self, word: int, value: int) -> None:
        self._channel.signal(self._back.view(LINE * word, 8), value)

    def begin(self, run: int) -> None:
        """Run ``run`` begins here. A source that finds all banks of earlier runs held goes on in another one."""
        self._now = None
        self._give_credits()
        held = [bank.held for bank in self._banks]
        if not any(held):
            return
        if all(held) and not self.maps:
            bank = self._new_bank()
            self._ledger.publish("in", self.worker, bank.number, self._regions[-1].remote("write").pack())
        self._tell(BEGUN, run)

    def receive(self, edge: int, run: int, timeout: float) -> Held:
        """Waits for ``edge``; the memory in which it lies: the source's outbox, or its own where it is lent."""
        offset = arrival(self._place[edge], run)
        self._patiently(lambda seconds: self._words.wait(offset, run << 8, seconds, self._channel), timeout)
        lent = self._lent.get(edge)
        if lent is not None:
            return lent
        if self._now is None:
            self._now = self._hold(self._words.load(offset) & 255, run)
        return self._now

    def payload(self, header: Header, held: Held, timeout: float) -> Hold | Held:
        """The payload that ``header``, which was received in ``held``, leads to: the source's own where it can be
        mapped, else read into the pool. Raises `ProtocolError`, `OutOfMemory`, `PeerLost` or `WaitTimeout`."""
        region, device = header.region, self._channel.device
        if region is None or region.device != device.name:
            raise ProtocolError(f"{self.worker} sent a header that leads to no memory of {device.name}")
        if self.maps:
            memory = self._map(region)
            if header.offset + header.nbytes > memory.nbytes:
                raise ProtocolError(
                    f"{self.worker} sent a header that leads behind its {memory.nbytes} bytes of memory"
                )
            found = hold(memory[header.offset : header.offset + header.nbytes])
            found.keeps = held
            counters.mapped(header.nbytes)
            return found
        lease = self._pool.lease(header.nbytes)
        if header.nbytes:
            source = region.view(header.offset, header.nbytes)
            completion = self._channel.read(lease.slab.region.view(lease.offset, header.nbytes), source)
            kept = lease.hold
            completion.on_done(lambda _: kept)  # a read that is given up may still write there
            completion.wait(timeout)
        return lease.hold

    def _map(self, region: RemoteRegion) -> memoryview:
        memory = self._mapped_regions.get(region.key)
        if memory is None or memory.closed:
            self._mapped_regions = {key: memory for key, memory in self._mapped_regions.items() if not memory.closed}
            memory = self._channel.map(region.view())
            assert memory is not None
            self._mapped_regions[region.key] = memory
        return memoryview(memory)

    def _patiently(self, wait: Callable[[float], T], timeout: float) -> T:
        return patiently(wait, timeout, self.worker, self._moved_on, self._ledger.name)

    def _moved_on(self) -> str:
        return moved_on(self._words.load(self._planning), self._ledger.plans())

    def _hold(self, number: int, run: int) -> Held:
        while self.maps and number >= len(self._banks):
            self._map_bank(self._ledger.find("out", self.worker, len(self._banks)))
        return self._banks[number].hold(run, self._let_go)

    def _let_go(self, bank: Bank) -> None:
        """Called as the last tensor in the bank dies, by the garbage collector in the middle of anything.

        A device that maps stores a word. On others, sending may be what the collector has interrupted.
        """
        if self.maps:
            self._credit(bank.number, bank.run)
        else:
            self._owed.append((bank.number, bank.run))

    def _give_credits(self) -> None:
        while self._owed:
            self._credit(*self._owed.popleft())

    def _credit(self, number: int, run: int) -> None:
        with contextlib.suppress(DeviceError):  # of a peer that is gone, or a channel that was closed
            self._tell(CREDITS + number, run)

    def plan_another(self, number: int) -> None:
        """Tells the source that this worker plans its ``number``-th graph, counted from 1."""
        self._tell(PLANNING, number)

    def end(self, run: int, borrows: bool) -> None:
        """Run ``run`` is over here. ``borrows``: it has read what the source had lent."""
        self._now = None
        self._give_credits()
        if borrows:
            self._tell(RETURNED, run)

    def close(self) -> None:
        """Gives the memory back."""
        for region in (self._words, *self._regions, *self._landings.values()):
            region.close()
