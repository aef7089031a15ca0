"""The words by which the processes of an edge group announce their memory and its contents.

All words have 8 bytes and grow. In the memory of a consumer, for each producer:

- *arrival*, a ring of them per edge: the step whose tensor has arrived, and in the low 8 bits its bank;
- *announced*, after these: see `EdgeGroup.announce`.

In the memory of a producer, for each consumer:

- *begun*: the step that the consumer began while it still held an earlier one;
- *returned*: the step after which it reads no lent tensor any more;
- *announced*, as above;
- *credit*, one per bank: the last step of that bank that the consumer released.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tensorwire.device import RemoteRegion, RemoteView
from tensorwire.edge.bank import MOST_BANKS
from tensorwire.errors import ArgumentError, ProtocolError, WaitTimeout

LINE = 64  # bytes between the words of a producer: each has its cache line
RING = 256  # arrival words of an edge: a producer is never as many steps ahead, as each takes one of MOST_BANKS
BEGUN, RETURNED, ANNOUNCED, CREDITS = range(4)
PRODUCER_WORDS = LINE * (CREDITS + MOST_BANKS)  # bytes of a producer's words
POLL = 0.005  # seconds between looks at two words at once
_LOOK = 1.0  # seconds between looks whether the peer has gone on to something else


class PeerMemory(msgspec.Struct, frozen=True):
    """What one process of a group says to another one: packed remote regions, and whether it maps the other's memory.

    ``words``: its words. ``banks``: its first banks. ``loans``: by edge, the memory for what is lent.
    """

    words: bytes
    banks: list[bytes]
    loans: dict[int, bytes]
    maps: bool


class RemoteWords:
    """The words of a peer. A channel knows views that it has seen, so each word keeps its own."""

    def __init__(self, region: RemoteRegion) -> None:
        self.region = region
        self._views: dict[int, RemoteView] = {}

    def at(self, offset: int) -> RemoteView:
        """The word there."""
        view = self._views.get(offset)
        if view is None:
            view = self._views[offset] = self.region.view(offset, 8)
        return view


def announced(edges: int) -> int:
    """Where a consumer has its word for announcements: after the arrival words of so many edges of the pair."""
    return arrival(edges, 0)


def consumer_words(edges: int) -> int:
    """Bytes of a consumer's words, for so many edges of the pair."""
    return announced(edges) + 8


def check_maps(memory: PeerMemory, maps: bool, peer: str) -> None:
    """Refuses a peer whose device maps where ours does not, or the other way round. Raises `ProtocolError`."""
    if memory.maps != maps:
        raise ProtocolError(f"{peer} says {'that' if memory.maps else 'not that'} it maps this process's memory")


def unpack_regions(packed: list[bytes], nbytes: int, count: int | None = None) -> list[RemoteRegion]:
    """The regions of a peer: ``count`` of at least ``nbytes``. Raises `ProtocolError` for others."""
    if count is not None and len(packed) != count:
        raise ProtocolError(f"a peer shows {len(packed)} banks of this group, which has {count}")
    try:
        regions = [RemoteRegion.unpack(one) for one in packed]
    except ArgumentError as error:
        raise ProtocolError(f"a peer shows malformed memory: {error}") from None
    if small := [region for region in regions if region.length < nbytes]:
        raise ProtocolError(f"a peer shows memory of {small[0].length} bytes, where this group needs {nbytes}")
    return regions


def unpack_loans(memory: PeerMemory, loans: dict[int, int], peer: str) -> dict[int, RemoteRegion]:
    """By edge, the memory for what is lent; ``loans``: the bytes of each. Raises `ProtocolError` for others."""
    if memory.loans.keys() != loans.keys():
        raise ProtocolError(f"{peer} shows memory for {len(memory.loans)} loans of this group, which has {len(loans)}")
    return {edge: unpack_regions([memory.loans[edge]], nbytes)[0] for edge, nbytes in loans.items()}


def pack(step: int, bank: int) -> int:
    """An arrival word: which bank goes with which step. It grows with the step."""
    return step << 8 | bank


def arrival(place: int, step: int) -> int:
    """Where the arrival word is of an edge, the ``place``-th of its pair of processes, in that step."""
    return 8 * (place * RING + step % RING)


def wait_unless(wait: Callable[[float], object], timeout: float, gone_on: Callable[[], BaseException | None]) -> None:
    """``wait(seconds)``, until the peer has gone on to something else.

    ``gone_on()``: the error to raise then; a peer says so after all that it sent before. Raises it, or what ``wait``
    raises.
    """
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            wait(min(_LOOK, left))
            return
        except WaitTimeout:
            error = gone_on()
            if error is None:
                if left <= _LOOK:
                    raise
                continue
        try:
            wait(0.0)
            return
        except WaitTimeout:
            raise error from None
