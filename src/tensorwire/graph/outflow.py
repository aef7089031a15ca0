"""What one worker sends to one other: where it goes, and what the other has let go of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from tensorwire.device import Channel, Completion, RemoteRegion, RemoteView, View
from tensorwire.errors import WaitTimeout
from tensorwire.graph.bank import MOST_BANKS, Bank, Ledger
from tensorwire.graph.inflow import (
    BANKS,
    BEGUN,
    CREDITS,
    LINE,
    PLANNING,
    POLL,
    RETURNED,
    RUNS,
    Door,
    T,
    arrival,
    moved_on,
    pack,
    patiently,
)
from tensorwire.observe import counters, spans
from tensorwire.observe.edge_names import edge_of
from tensorwire.observe.spans import clock


class Outflow:
    """What this worker sends to ``worker``.

    ``edges``: all of the pair. ``banks``: whether any lies in the outbox.
    """

    def __init__(
        self,
        worker: str,
        channel: Channel,
        edges: list[int],
        banks: bool,
        ledger: Ledger,
    ) -> None:
        self.worker, self.channel, self._ledger = worker, channel, ledger
        self._uses_banks = banks
        self._place = {edge: at for at, edge in enumerate(edges)}
        self.words = channel.device.allocate(LINE * (CREDITS + MOST_BANKS))
        self._planning = 8 * RUNS * len(edges)
        self._inboxes: list[RemoteRegion] = []
        self._landings: dict[int, RemoteRegion] = {}
        self._sent: list[Completion] = []
        self._runs = [0] * BANKS  # by inbox: the last run that went there
        self._now = 0  # the inbox of this run
        self._memory = edge_of(ledger.name, f"memory of {worker}")  # in spans

    def open(self, door: Door) -> None:
        """Takes what the target told."""
        self._arrivals = RemoteRegion.unpack(door.words)
        self.maps = door.maps
        self._inboxes = [RemoteRegion.unpack(packed) for packed in door.banks]
        self._landings = {edge: RemoteRegion.unpack(packed) for edge, packed in door.loans.items()}

    def let_go(self, bank: Bank) -> bool:
        """Whether the target holds nothing of the bank's last run."""
        return not self._uses_banks or not self.maps or self._word(CREDITS + bank.number) >= bank.run

    def has_read(self, run: int, bank: int) -> bool:
        """Whether the target has let go of all that it got in ``run``, in which the outbox was ``bank``."""
        if self.maps:
            return self._word(CREDITS + bank) >= run
        return all(last != run or self._word(CREDITS + inbox) >= run for inbox, last in enumerate(self._runs))

    def wait_for_credit(self, bank: Bank, timeout: float) -> None:
        """Waits until the target has let go of the bank's last run. Raises `PlanMismatch` or `WaitTimeout`."""
        self._wait(CREDITS + bank.number, bank.run, timeout)

    def has_begun(self, run: int) -> bool:
        """Whether the target said that it began ``run`` while it held an earlier one."""
        return not self._uses_banks or not self.maps or self._word(BEGUN) >= run

    def _word(self, word: int) -> int:
        return self.words.load(LINE * word)

    def _inbox(self, run: int, timeout: float) -> RemoteRegion:
        """Where the values of ``run`` go to: a bank that the target has let go of, or one that it made for this run."""
        if self._runs[self._now] != run:
            start = clock()
            self._now = self._find_inbox(run, timeout)
            self._runs[self._now] = run
            spans.add("wait", run, start, clock(), self._memory)
        return self._inboxes[self._now]

    def _find_inbox(self, run: int, timeout: float) -> int:
        end = time.monotonic() + timeout
        while True:
            begun = self._word(BEGUN) >= run  # first: what the target let go of before that is to be seen then
            oldest = min(range(len(self._runs)), key=self._runs.__getitem__)
            for number, last in enumerate(self._runs):
                if self._word(CREDITS + number) >= last:
                    return number
            if begun:
                self._inboxes.append(RemoteRegion.unpack(self._ledger.find("in", self.worker, len(self._inboxes))))
                self._runs.append(0)
                return len(self._runs) - 1
            if time.monotonic() >= end:
                raise WaitTimeout(f"{self.worker} did not begin run {run} of graph {self._ledger.name} in time")
            with contextlib.suppress(WaitTimeout):
                self._wait(CREDITS + oldest, self._runs[oldest], POLL)

    def send(self, edge: int, run: int, bank: Bank, source: View, timeout: float) -> None:
        """Makes ``source``, a part of ``bank``, arrive as ``edge``."""
        word = self._arrivals.view(arrival(self._place[edge], run), 8)
        if self.maps:
            counters.mapped(source.nbytes)
            self.channel.signal(word, pack(run, bank.number))
        else:
            target = self._inbox(run, timeout).view(source.offset, source.nbytes)
            self._write(source, target, (word, pack(run, self._now)), run)

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
        if lends:
            start = clock()
            self._wait(RETURNED, run, timeout)
            spans.add("wait", run, start, clock(), self._memory)

    def _wait(self, word: int, at_least: int, timeout: float) -> None:
        self._patiently(lambda seconds: self.words.wait(LINE * word, at_least, seconds, self.channel), timeout)

    def _patiently(self, wait: Callable[[float], T], timeout: float) -> T:
        return patiently(wait, timeout, self.worker, self._moved_on, self._ledger.name)

    def _moved_on(self) -> str:
        return moved_on(self._word(PLANNING), self._ledger.plans())

    def plan_another(self, number: int) -> None:
        """Tells the target that this worker plans its ``number``-th graph, counted from 1."""
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
        self.words.close()
