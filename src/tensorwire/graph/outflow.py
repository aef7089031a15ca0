"""What one host sends to one other: where it goes, and what the other has let go of."""

from __future__ import annotations

from tensorwire.device import Channel, Completion, RemoteRegion, View
from tensorwire.graph.bank import MOST_BANKS, Bank, Ledger
from tensorwire.graph.inflow import (
    BEGUN,
    CREDITS,
    GRANT,
    LINE,
    PLANNING,
    RETURNED,
    RUNS,
    Door,
    arrival,
    pack,
    wait_for,
)
from tensorwire.observe import counters


class Outflow:
    """What this host sends to ``host``. ``banks``: whether any of it lies in the outbox."""

    def __init__(self, host: str, channel: Channel, edges: list[int], banks: bool, ledger: Ledger) -> None:
        self.host, self.channel, self._ledger = host, channel, ledger
        self._uses_banks = banks
        self._place = {edge: at for at, edge in enumerate(edges)}
        self.words = channel.device.allocate(LINE * (CREDITS + MOST_BANKS))
        self._planning = 8 * RUNS * len(edges)
        self._inboxes: list[RemoteRegion] = []
        self._landings: dict[int, RemoteRegion] = {}
        self._sent: list[Completion] = []
        self._granted = 0

    def open(self, door: Door) -> None:
        """Takes what the target told."""
        self._arrivals = RemoteRegion.unpack(door.words)
        self.maps = door.maps
        self._inboxes = [RemoteRegion.unpack(packed) for packed in door.banks]
        self._landings = {edge: RemoteRegion.unpack(packed) for edge, packed in door.loans.items()}

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
            self._wait(GRANT, run << 8, timeout)
            self._granted = self.words.load(LINE * GRANT)
        number = self._granted & 255
        while number >= len(self._inboxes):
            self._inboxes.append(RemoteRegion.unpack(self._ledger.find("in", self.host, len(self._inboxes))))
        return self._inboxes[number]

    def send(self, edge: int, run: int, bank: Bank, source: View, timeout: float) -> None:
        """Makes ``source``, a part of ``bank``, arrive as ``edge``."""
        word, value = self._arrivals.view(arrival(self._place[edge], run), 8), pack(run, bank.number)
        if self.maps:
            self.channel.signal(word, value)
            counters.mapped(source.nbytes)
        else:
            target = self._inbox(run, timeout).view(source.offset, source.nbytes)
            self._sent.append(self.channel.write(source, target, (word, value)))

    def lend(self, edge: int, run: int, source: View) -> None:
        """Makes ``source``, which is lent, arrive as ``edge``."""
        word, value = self._arrivals.view(arrival(self._place[edge], run), 8), pack(run, 0)
        if self.maps:
            self.channel.signal(word, value)
            counters.mapped(source.nbytes)
        else:
            self._sent.append(self.channel.write(source, self._landings[edge].view(), (word, value)))

    def end(self, run: int, lends: bool, timeout: float) -> None:
        """Returns when the target reads nothing any more that was lent: the owner may change it."""
        if not lends:
            return
        if self.maps:
            self._wait(RETURNED, run, timeout)
        else:
            self.flush(timeout)

    def _wait(self, word: int, at_least: int, timeout: float) -> None:
        where = (self.channel, LINE * PLANNING, self.host, self._ledger)
        wait_for(self.words, LINE * word, at_least, timeout, *where)

    def plan_another(self, number: int) -> None:
        """Tells the target that this host plans its ``number``-th graph, counted from 1."""
        self.channel.signal(self._arrivals.view(self._planning, 8), number)

    def flush(self, timeout: float) -> None:
        """Returns when everything sent is in the target's memory."""
        sent, self._sent = self._sent, []
        for completion in sent:
            completion.wait(timeout)

    def close(self) -> None:
        """Gives the memory back."""
        self.words.close()
