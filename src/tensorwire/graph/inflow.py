"""What one host receives from one other: the arrival words, and the memory that the values are in."""

from __future__ import annotations

import contextlib
import time

import msgspec

from tensorwire.device import Channel, Region, RemoteRegion
from tensorwire.errors import DeviceError, PlanMismatch, WaitTimeout
from tensorwire.graph.bank import Bank, Held, Ledger, hold, too_many

LINE = 64  # bytes between words: each has its cache line
RUNS = 256  # arrival words of an edge: a source is never as many runs ahead, as each takes one of MOST_BANKS
_LOOK = 1.0  # seconds between looks whether the other host still runs the same graph
BANKS = 2  # to begin with: a run may start while the last one's tensors are alive

# Words in the source's memory, one of each a target; behind them a credit word a bank.
GRANT, BEGUN, RETURNED, PLANNING, CREDITS = range(5)


class Door(msgspec.Struct, frozen=True):
    """What a host tells one other about a plan.

    Its words, its first banks, its memory for what is lent (by edge), and whether it maps the other's memory.
    """

    words: bytes
    banks: list[bytes]
    loans: dict[int, bytes]
    maps: bool


def pack(run: int, bank: int) -> int:
    """A word that says which bank goes with which run. It grows with the run."""
    return run << 8 | bank


def arrival(place: int, run: int) -> int:
    """Where the arrival word is of an edge, the ``place``-th of its pair of hosts, in that run."""
    return 8 * (place * RUNS + run % RUNS)


def wait_for(
    words: Region,
    offset: int,
    at_least: int,
    timeout: float,
    channel: Channel,
    planning: int,
    host: str,
    ledger: Ledger,
) -> None:
    """Waits for the word at ``offset`` that ``host`` raises, unless that has gone on to plan another graph.

    A host says so in the word at ``planning``, after all that it sends. Raises `PlanMismatch`, `PeerLost` or
    `WaitTimeout`.
    """
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            words.wait(offset, at_least, min(_LOOK, left), channel)
            return
        except WaitTimeout:
            elsewhere = words.load(planning) > ledger.plans()
            if elsewhere and words.load(offset) < at_least:
                raise PlanMismatch(
                    f"{host} plans another graph, while this host runs graph {ledger.name} once more: did they get "
                    "arguments of other shapes, or take another branch?"
                ) from None
            if left <= _LOOK:
                raise


class Inflow:
    """What this host receives from ``host``. ``loans``: bytes of each edge that is lent."""

    def __init__(
        self, host: str, channel: Channel, edges: list[int], loans: dict[int, int], nbytes: int, ledger: Ledger
    ) -> None:
        self.host, self._channel, self._nbytes, self._ledger = host, channel, nbytes, ledger
        self.maps = channel.device.capabilities.maps
        self._place = {edge: at for at, edge in enumerate(edges)}
        self._planning = 8 * RUNS * len(edges)  # behind the arrival words
        self._words = channel.device.allocate(self._planning + 8)
        self._banks: list[Bank] = []
        self._regions: list[Region] = []
        self._lent: dict[int, Held] = {}
        self._landings: dict[int, Region] = {}
        self._granted = 0
        self._grants: dict[int, Bank] = {}
        self._now: Held | None = None
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
        elif self._banks:
            self._grant(1)

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

    def _grant(self, run: int) -> None:
        """Lets the source write its values of ``run`` into a bank that nobody holds."""
        if self._granted >= run:
            return
        bank = next((bank for bank in self._banks if not bank.held), None)
        if bank is None:
            bank = self._new_bank()
            self._ledger.publish("in", self.host, bank.number, self._regions[-1].remote("write").pack())
        self._granted, self._grants[run] = run, bank
        bank.held = True
        self._tell(GRANT, pack(run, bank.number))

    def begin(self, run: int) -> None:
        """Run ``run`` begins here."""
        self._now = None
        if not self._banks:
            return
        if not self.maps:
            self._grant(run)
        elif any(bank.held for bank in self._banks):
            self._tell(BEGUN, run)

    def receive(self, edge: int, run: int, timeout: float) -> Held:
        """Waits for ``edge``; the memory in which it lies: the source's outbox, or its own where it is lent."""
        offset = arrival(self._place[edge], run)
        wait_for(self._words, offset, run << 8, timeout, self._channel, self._planning, self.host, self._ledger)
        lent = self._lent.get(edge)
        if lent is not None:
            return lent
        if self._now is None:
            self._now = self._hold(self._words.load(offset) & 255, run)
        return self._now

    def _hold(self, number: int, run: int) -> Held:
        if not self.maps:
            return self._grants.pop(run).hold(run)
        while number >= len(self._banks):
            self._map_bank(self._ledger.find("out", self.host, len(self._banks)))
        return self._banks[number].hold(run, self._credit)

    def _credit(self, bank: Bank) -> None:
        with contextlib.suppress(DeviceError):  # of a peer that is gone, or a channel that was closed
            self._tell(CREDITS + bank.number, bank.run)

    def plan_another(self, number: int) -> None:
        """Tells the source that this host plans its ``number``-th graph, counted from 1."""
        self._tell(PLANNING, number)

    def end(self, run: int, borrows: bool) -> None:
        """Run ``run`` is over here. ``borrows``: it has read what the source had lent."""
        self._now = None
        if borrows and self.maps:
            self._tell(RETURNED, run)
        if not self.maps and any(not bank.held for bank in self._banks):
            self._grant(run + 1)

    def close(self) -> None:
        """Gives the memory back."""
        for region in (self._words, *self._regions, *self._landings.values()):
            region.close()
