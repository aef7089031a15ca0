"""This process's tensors for one peer: their destinations, and the peer's credits."""

from __future__ import annotations

import time

from tensorwire.device import Channel, Completion, RemoteRegion, RemoteView, View
from tensorwire.device.contract import DONE
from tensorwire.edge.bank import Bank
from tensorwire.edge.peers import Peers
from tensorwire.edge.traced_write import write_traced
from tensorwire.edge.words import (
    ANNOUNCED,
    BEGUN,
    CREDITS,
    LINE,
    POLL,
    PRODUCER_WORDS,
    RETURNED,
    PeerMemory,
    RemoteWords,
    announced,
    arrival,
    check_maps,
    consumer_words,
    pack,
    unpack_loans,
    unpack_regions,
    wait_unless,
)
from tensorwire.errors import WaitTimeout
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock

_LOANS = -1  # in the place of a bank's number


class Outgoing:
    """What this process sends to ``peer``.

    ``edges``: all of the pair. ``loans``: bytes of each that is lent. ``nbytes``: of the outbox. ``depth``: how many
    banks there are to begin with.
    """

    def __init__(
        self, peers: Peers, peer: str, edges: list[int], loans: dict[int, int], nbytes: int, depth: int
    ) -> None:
        self.peer, self._peers, self._loans, self._nbytes = peer, peers, loans, nbytes
        self._depth = depth if len(edges) > len(loans) else 0
        self.channel: Channel = peers.channel(peer)
        self.maps = self.channel.device.capabilities.maps
        self._place = {edge: at for at, edge in enumerate(edges)}
        self.words = self.channel.device.allocate(PRODUCER_WORDS)
        self._sent: dict[int, list[Completion]] = {}  # by the bank that it was sent from
        self._inboxes: list[RemoteRegion] = []
        self._landings: dict[int, RemoteRegion] = {}
        self._steps: list[int] = []  # by inbox: the last step that went there
        self._now = 0  # the inbox of this step
        self._kept: set[int] = set()  # banks that a later one overtook on its way back
        self._label = f"{peers.name}, memory of {peer}"  # in spans

    def open(self, memory: PeerMemory) -> None:
        """Takes what the consumer said. Raises `ProtocolError` for what does not fit this group."""
        (words,) = unpack_regions([memory.words], consumer_words(len(self._place)))
        self._arrivals = RemoteWords(words)
        check_maps(memory, self.maps, self.peer)
        if self.maps:
            self.channel.map(words.view())  # so that no signal finds too few descriptors
            return
        self._inboxes = unpack_regions(memory.banks, self._nbytes, self._depth)
        self._steps = [0] * len(self._inboxes)
        self._landings = unpack_loans(memory, self._loans, self.peer)

    # ---- what the consumer has released

    def let_go(self, bank: Bank) -> bool:
        """Whether the consumer holds nothing of the bank's last step."""
        return not self._depth or not self.maps or self._word(CREDITS + bank.number) >= bank.step

    def has_read(self, step: int, bank: int) -> bool:
        """Whether the consumer has released all that it got in ``step``, in which the outbox was ``bank``."""
        if self.maps:
            return self._word(CREDITS + bank) >= step
        return all(last != step or self._word(CREDITS + inbox) >= step for inbox, last in enumerate(self._steps))

    def wait_until_read(self, step: int, bank: int, timeout: float) -> None:
        """Waits until ``has_read(step, bank)``. Raises what a wait raises."""
        numbers = [bank] if self.maps else [inbox for inbox, last in enumerate(self._steps) if last == step]
        for number in numbers:
            self._wait(CREDITS + number, step, timeout)

    def wait_for_one_of(self, banks: list[tuple[int, int]]) -> None:
        """Waits a moment until one of ``banks``, numbers and last steps, is released: the oldest, but for those that
        the consumer seems to keep."""
        self._kept = {number for number, step in banks if number in self._kept and self._word(CREDITS + number) < step}
        number, step = min([bank for bank in banks if bank[0] not in self._kept] or banks, key=lambda bank: bank[1])
        try:
            self._wait(CREDITS + number, step, POLL)
        except WaitTimeout:
            if any(self._word(CREDITS + other) >= last for other, last in banks):
                self._kept.add(number)

    def keeps(self, step: int) -> str:
        """That the consumer gave nothing back that ``step`` could use."""
        return (
            f"{self.peer} gave back nothing in time that step {step} of {self._peers.name} could use: is it slow, or "
            "does it keep what it received?"
        )

    def has_begun(self, step: int) -> bool:
        """Whether the consumer said that it began ``step`` while it held an earlier one."""
        return not self._depth or not self.maps or self._word(BEGUN) >= step

    def _word(self, word: int) -> int:
        return self.words.load(LINE * word)

    def _wait(self, word: int, at_least: int, timeout: float) -> None:
        words, channel = self.words, self.channel
        wait_unless(lambda seconds: words.wait(LINE * word, at_least, seconds, channel), timeout, self._gone_on)

    def _gone_on(self) -> Exception | None:
        return self._peers.gone_on(self.peer, self._word(ANNOUNCED))

    # ---- sending

    def reserve(self, step: int, timeout: float) -> None:
        """Waits until the consumer has an inbox for ``step``. Raises what a wait raises."""
        if not self.maps and self._steps and self._steps[self._now] != step:
            self._inbox(step, timeout)

    def _inbox(self, step: int, timeout: float) -> RemoteRegion:
        """Where the tensors of ``step`` go to: a bank that the consumer has released, or has made for this step."""
        if self._steps[self._now] != step:
            start = clock()
            self._now = self._find_inbox(step, timeout)
            self._steps[self._now] = step
            spans.add("wait", step, start, clock(), self._label)
        return self._inboxes[self._now]

    def _find_inbox(self, step: int, timeout: float) -> int:
        end = time.monotonic() + timeout
        while True:
            begun = self._word(BEGUN) >= step  # first, so that what the consumer released before that is seen
            for number, last in enumerate(self._steps):
                if self._word(CREDITS + number) >= last:
                    return number
            if begun:
                packed = self._peers.lookup(f"inbox {len(self._inboxes)}", self.peer)
                self._inboxes += unpack_regions([packed], self._nbytes)
                self._steps.append(0)
                return len(self._steps) - 1
            if time.monotonic() >= end:
                raise WaitTimeout(self.keeps(step))
            self.wait_for_one_of(list(enumerate(self._steps)))

    def signal(self, edge: int, step: int, bank: int, nbytes: int) -> None:
        """Makes ``edge`` arrive, ``nbytes`` in the bank of that number, at a consumer that maps it."""
        counters.mapped(nbytes)
        self._keep(self.channel.signal(self._arrival(edge, step), pack(step, bank)), bank)

    def _keep(self, completion: Completion, bank: int) -> None:
        """What is not over yet, or failed: ``flush`` says what became of it."""
        if completion is not DONE:
            self._sent.setdefault(bank, []).append(completion)

    def _arrival(self, edge: int, step: int) -> RemoteView:
        return self._arrivals.at(arrival(self._place[edge], step))

    def write(self, edge: int, step: int, bank: int, source: View, timeout: float) -> None:
        """Makes ``source``, a part of that bank, arrive as ``edge`` at a consumer that does not map it."""
        target = self._inbox(step, timeout).view(source.offset, source.nbytes)
        self._write(source, target, (self._arrival(edge, step), pack(step, self._now)), step, bank)

    def put(self, step: int, bank: int, source: View, timeout: float) -> None:
        """Brings ``source``, a part of that bank, to a consumer that does not map it, before what is sent next."""
        self._write(source, self._inbox(step, timeout).view(source.offset, source.nbytes), None, step, bank)

    def lend(self, edge: int, step: int, source: View) -> None:
        """Makes ``source``, which is lent, arrive as ``edge``."""
        word, value = self._arrival(edge, step), pack(step, 0)
        if self.maps:
            counters.mapped(source.nbytes)
            self._keep(self.channel.signal(word, value), _LOANS)
        else:
            self._write(source, self._landings[edge].view(), (word, value), step, _LOANS)

    def _write(
        self, source: View, target: RemoteView, signal: tuple[RemoteView, int] | None, step: int, bank: int
    ) -> None:
        self._keep(write_traced(self.channel, source, target, signal, step, self._label), bank)

    def flush(self, step: int, bank: Bank | None, end: float) -> None:
        """Returns, in ``step``, when what was sent from ``bank`` is in the consumer's memory; None: what was lent.

        ``end``: when to give up, on the clock of spans.
        """
        sent = self._sent.get(_LOANS if bank is None else bank.number)
        if sent:
            start = clock()
            _wait_for_all(sent, end)
            spans.add("push", step, start, clock(), self._label)

    def flush_all(self, timeout: float) -> None:
        """Returns when everything sent is in the consumer's memory, or raises what became of it."""
        end = time.monotonic() + timeout
        for sent in self._sent.values():
            _wait_for_all(sent, end)

    def announce(self, number: int) -> None:
        """See `EdgeGroup.announce`."""
        self.channel.signal(self._arrivals.at(announced(len(self._place))), number)

    def end(self, step: int, lends: bool, timeout: float) -> None:
        """Returns when the consumer reads nothing any more that was lent: the owner may change it."""
        if lends:
            start = clock()
            self._wait(RETURNED, step, timeout)
            spans.add("wait", step, start, clock(), self._label)

    def close(self) -> None:
        """Gives the memory back."""
        self.words.close()


def _wait_for_all(sent: list[Completion], end: float) -> None:
    """Takes those that are over from the list; the caller may wait for the others again."""
    while sent:
        first = sent[0]
        try:
            first.wait(max(0.0, end - time.monotonic()))
        finally:
            if first.done:
                del sent[0]
