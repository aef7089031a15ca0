"""What one host sends to one other: where it goes, and what the other has let go of."""

from __future__ import annotations

from collections.abc import Callable

from tensorwire.device import Channel, Completion, RemoteRegion, RemoteView, View
from tensorwire.edge import DynamicProducer, Lease, Pool, Spec
from tensorwire.graph.bank import MOST_BANKS, Bank, Ledger
from tensorwire.graph.inflow import (
    BEGUN,
    CREDITS,
    GRANT,
    LINE,
    PLANNING,
    RETURNED,
    RING,
    RUNS,
    Door,
    T,
    arrival,
    moved_on,
    pack,
    patiently,
)
from tensorwire.observe import counters, spans
from tensorwire.observe.edges import edge_of
from tensorwire.observe.spans import clock


class Outflow:
    """What this host sends to ``host``.

    ``edges``: all of the pair. ``dynamic``: those of no known size, which lie in ``pool``. ``banks``: whether any lies
    in the outbox.
    """

    def __init__(
        self,
        host: str,
        channel: Channel,
        edges: list[int],
        dynamic: list[int],
        banks: bool,
        pool: Pool,
        ledger: Ledger,
    ) -> None:
        self.host, self.channel, self._ledger = host, channel, ledger
        self.pool = pool
        self._rings = {edge: channel.device.allocate(RING.nbytes) for edge in dynamic}
        self.producers: dict[int, DynamicProducer] = {}
        self._uses_banks = banks
        self._place = {edge: at for at, edge in enumerate(edges)}
        self.words = channel.device.allocate(LINE * (CREDITS + MOST_BANKS))
        self._planning = 8 * RUNS * len(edges)
        self._inboxes: list[RemoteRegion] = []
        self._landings: dict[int, RemoteRegion] = {}
        self._sent: list[Completion] = []
        self._granted = 0
        self._memory = edge_of(ledger.name, f"memory of {host}")  # in spans

    def open(self, door: Door) -> None:
        """Takes what the target told."""
        self._arrivals = RemoteRegion.unpack(door.words)
        self.maps = door.maps
        self._inboxes = [RemoteRegion.unpack(packed) for packed in door.banks]
        self._landings = {edge: RemoteRegion.unpack(packed) for edge, packed in door.loans.items()}
        for edge, region in self._rings.items():
            inbox = RemoteRegion.unpack(door.rings[edge]).view()
            self.producers[edge] = DynamicProducer(
                self.channel, inbox, region.view(), ring=RING, pool=self.pool, access="write"
            )

    @property
    def rings(self) -> dict[int, bytes]:
        """For the target: where it gives back what it had of each dynamic edge."""
        return {edge: region.remote("write").pack() for edge, region in self._rings.items()}

    def let_go(self, bank: Bank) -> bool:
        """Whether the target holds nothing of the bank's last run."""
        word = LINE * (CREDITS + bank.number)
        return not self._uses_banks or not self.maps or self.words.load(word) >= bank.run

    def wait_for_credit(self, bank: Bank, timeout: float) -> None:
        """Waits until the target has let go of the bank's last run. Raises `PlanMismatch` or `WaitTimeout`."""
        self._wait(CREDITS + bank.number, bank.run, timeout)

    def has_begun(self, run: int) -> bool:
        """Whether the target said that it began ``run`` while it held an earlier one."""
        return not self._uses_banks or not self.maps or self.words.load(LINE * BEGUN) >= run

    def _inbox(self, run: int, timeout: float) -> RemoteRegion:
        """Where the values of ``run`` go to."""
        if self._granted < run << 8:
            start = clock()
            self._wait(GRANT, run << 8, timeout)
            self._granted = self.words.load(LINE * GRANT)
            spans.add("wait", run, start, clock(), self._memory)
        number = self._granted & 255
        while number >= len(self._inboxes):
            self._inboxes.append(RemoteRegion.unpack(self._ledger.find("in", self.host, len(self._inboxes))))
        return self._inboxes[number]

    def send(self, edge: int, run: int, bank: Bank, source: View, timeout: float) -> None:
        """Makes ``source``, a part of ``bank``, arrive as ``edge``."""
        word, value = self._arrivals.view(arrival(self._place[edge], run), 8), pack(run, bank.number)
        if self.maps:
            counters.mapped(source.nbytes)
            self.channel.signal(word, value)
        else:
            target = self._inbox(run, timeout).view(source.offset, source.nbytes)
            self._write(source, target, (word, value), run)

    def put(self, run: int, source: View, timeout: float) -> None:
        """Brings ``source``, a part of a bank, to the target before what is sent next. It sees what it maps anyway."""
        if not self.maps:
            self._write(source, self._inbox(run, timeout).view(source.offset, source.nbytes), None, run)

    def lend(self, edge: int, run: int, source: View) -> None:
        """Makes ``source``, which is lent, arrive as ``edge``."""
        word, value = self._arrivals.view(arrival(self._place[edge], run), 8), pack(run, 0)
        if self.maps:
            counters.mapped(source.nbytes)
            self.channel.signal(word, value)
        else:
            self._write(source, self._landings[edge].view(), (word, value), run)

    def _write(self, source: View, target: RemoteView, signal: tuple[RemoteView, int] | None, run: int) -> None:
        """Where a trace is made, it says from when to when bytes move."""
        start = clock()
        completion = self.channel.write(source, target, signal)
        self._sent.append(completion)
        if spans.enabled:
            completion.on_done(lambda _: spans.add("transfer", run, start, clock(), self._memory))

    def end(self, run: int, lends: bool, timeout: float) -> None:
        """Returns when the target reads nothing any more that was lent: the owner may change it."""
        if not lends:
            return
        if self.maps:
            start = clock()
            self._wait(RETURNED, run, timeout)
            spans.add("wait", run, start, clock(), self._memory)
        else:
            self.flush(run, timeout)

    def _wait(self, word: int, at_least: int, timeout: float) -> None:
        self._patiently(lambda seconds: self.words.wait(LINE * word, at_least, seconds, self.channel), timeout)

    def _patiently(self, wait: Callable[[float], T], timeout: float) -> T:
        return patiently(wait, timeout, self.host, self._moved_on, self._ledger.name)

    def _moved_on(self) -> str:
        return moved_on(self.words.load(LINE * PLANNING), self._ledger.plans())

    def send_dynamic(self, edge: int, run: int, lease: Lease, spec: Spec, timeout: float) -> None:
        """Makes what lies in ``lease`` arrive as ``edge``, once the target has a place for its header."""
        self._patiently(lambda seconds: self.producers[edge].send(run, lease, spec, timeout=seconds), timeout)

    def plan_another(self, number: int) -> None:
        """Tells the target that this host plans its ``number``-th graph, counted from 1."""
        self.channel.signal(self._arrivals.view(self._planning, 8), number)

    def flush(self, run: int, timeout: float) -> None:
        """Returns, in run ``run``, when everything sent is in the target's memory."""
        if not self._sent:
            return
        start = clock()
        sent, self._sent = self._sent, []
        for completion in sent:
            completion.wait(timeout)
        spans.add("push", run, start, clock(), self._memory)

    def close(self) -> None:
        """Gives the memory back."""
        for region in (self.words, *self._rings.values()):
            region.close()
