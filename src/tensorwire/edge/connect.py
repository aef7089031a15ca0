"""An edge between two processes, connected by one call at each end, which exchanges the places of its memory.

Each end allocates its part, sends one message (`_Offer`, msgpack, at most 64 KiB), and checks the other's: both must
describe the same edge. Nothing is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, overload

import msgspec

from tensorwire.device import Channel, RemoteRegion
from tensorwire.device.meeting import Meeting
from tensorwire.device.region import Access
from tensorwire.edge.agreement import EdgeOffer, Side, agree
from tensorwire.edge.bank import MOST_BANKS
from tensorwire.edge.ends import ConsumerEnd, ProducerEnd, StaticConsumer, StaticProducer
from tensorwire.edge.garbage_collection import garbage_collection
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.header import HEADER
from tensorwire.edge.peers import Peers
from tensorwire.edge.pool import Pool
from tensorwire.edge.static import Consumer, Producer, Word
from tensorwire.edge.tensor import Spec
from tensorwire.edge.varying import BoundedProducer, DynamicProducer, VaryingConsumer
from tensorwire.errors import ArgumentError
from tensorwire.sizes import round_up

_LINE = 64  # bytes between two slots: no two share a cache line
_PAGE = 4096

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Edge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both ends must agree on. Static edges have a dtype and a shape, bounded ones a bound."""

    kind: Literal["static", "bounded", "dynamic"]
    depth: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    dtype: str = ""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)] = ()
    bound: Count = 0


class _Offer(EdgeOffer, frozen=True, tag="tensorwire edge 2", forbid_unknown_fields=True):
    """One end's message: its side, the edge, and where its memory lies."""

    edge: _Edge
    memory: bytes


@overload
def connect_edge(
    channel: Channel, pipe: Meeting, side: Literal["producer"], *, spec: Spec, depth: int = ..., timeout: float = ...
) -> StaticProducer:
    """The sending end of a static edge."""


@overload
def connect_edge(
    channel: Channel, pipe: Meeting, side: Literal["producer"], *, bound: int, depth: int = ..., timeout: float = ...
) -> BoundedProducer:
    """The sending end of a bounded edge."""


@overload
def connect_edge(
    channel: Channel,
    pipe: Meeting,
    side: Literal["producer"],
    *,
    depth: int = ...,
    limit: int = ...,
    access: Access = ...,
    timeout: float = ...,
) -> DynamicProducer:
    """The sending end of a dynamic edge."""


@overload
def connect_edge(
    channel: Channel,
    pipe: Meeting,
    side: Literal["producer"],
    *,
    spec: Spec | None = ...,
    bound: int | None = ...,
    depth: int = ...,
    limit: int = ...,
    access: Access = ...,
    timeout: float = ...,
) -> ProducerEnd:
    """The sending end."""


@overload
def connect_edge(
    channel: Channel,
    pipe: Meeting,
    side: Literal["consumer"],
    *,
    spec: Spec | None = ...,
    bound: int | None = ...,
    depth: int = ...,
    limit: int = ...,
    access: Access = ...,
    timeout: float = ...,
) -> ConsumerEnd:
    """The receiving end."""


def connect_edge(
    channel: Channel,
    pipe: Meeting,
    side: Literal["producer", "consumer"],
    *,
    spec: Spec | None = None,
    bound: int | None = None,
    depth: int = 2,
    limit: int = 1 << 30,
    access: Access = "read",
    timeout: float = 60.0,
) -> ProducerEnd | ConsumerEnd:
    """One end of an edge to the process at the other end of ``channel``, which connects the other end.

    With ``spec`` the edge is static, with ``bound`` it is bounded, and with neither it is dynamic. Both processes pass
    the same ``spec``, ``bound`` and ``depth``, and connect edges that share a pipe in the same order.

    Args:
        channel: This process's channel to the other one, such as that of ``connect_peer``.
        pipe: As for ``connect_peer``. It carries one message each way, and may be closed afterwards.
        side: The end of this process, ``"producer"`` or ``"consumer"``.
        spec: Shape and dtype of every tensor.
        bound: The largest tensor, in bytes.
        depth: How many steps the producer may send before the consumer releases one.
        limit: The most registered memory for payload, in bytes, at each end that needs some (dynamic edges).
        access: The consumer's access to payload in the producer's memory (dynamic edges).
        timeout: Seconds to wait for the other process.

    Returns:
        The end, with its memory. Close it before the channel, such as at the end of a ``with`` block.

    Raises:
        ArgumentError: The two ends describe different edges, or both are the same side.
        OutOfMemory: There is no memory for this end.
        PeerLost, WaitTimeout: The other process ended, or did not answer in time.
        ProtocolError: The answer is not Tensorwire's.
    """
    if side not in ("producer", "consumer"):
        raise ArgumentError(f"side must be 'producer' or 'consumer', not {side!r}")
    edge = _describe(spec, bound, depth)
    if spec is not None:
        return _static(edge, spec, channel, pipe, side, timeout)
    return _varying(edge, channel, pipe, side, limit, access, timeout)


def _describe(spec: Spec | None, bound: int | None, depth: int) -> _Edge:
    if spec is not None and bound is not None:
        raise ArgumentError("an edge takes a spec (static) or a bound (bounded), not both")
    if bound is not None and bound < 0:
        raise ArgumentError(f"the bound of an edge must be 0 bytes or more, not {bound}")
    most = 1 << 20 if spec is not None else MOST_BANKS
    if not 1 <= depth <= most:
        raise ArgumentError(f"the depth of such an edge must be 1 to {most}, not {depth}")
    if spec is not None:
        return _Edge("static", depth, spec.dtype, spec.shape)
    return _Edge("dynamic", depth) if bound is None else _Edge("bounded", depth, bound=bound)


def _agree(ours: _Offer, pipe: Meeting, timeout: float) -> _Offer:
    return agree(ours, lambda offer: msgspec.structs.asdict(offer.edge), pipe, timeout, "connect_edge")


# ---- static: the consumer's memory has the arrival word and the slots, the producer's the credit and what is written


def _static(
    edge: _Edge, spec: Spec, channel: Channel, pipe: Meeting, side: Side, timeout: float
) -> ProducerEnd | ConsumerEnd:
    alone = side == "producer" and channel.device.capabilities.maps  # no slots of its own
    here = channel.device.allocate(_LINE if alone else _at(spec, edge.depth))
    try:
        theirs = _agree(_Offer(side, edge, here.remote().pack()), pipe, timeout)
        there = RemoteRegion.unpack(theirs.memory)
        if side == "producer":
            slots, source = _slots(spec, edge, there), [] if alone else _slots(spec, edge, here)
            credit = Word(here, 0, channel)
            producer = Producer(channel, there.view(0, 8), slots=slots, source=source, credit=credit, spec=spec)
            return StaticProducer(producer, here)
        views = _slots(spec, edge, here)
        consumer = Consumer(
            Word(here, 0, channel), slots=[view.buffer for view in views], credit=(channel, there.view(0, 8)), spec=spec
        )
        return StaticConsumer(consumer, here, [view.offset for view in views])
    except BaseException:
        here.close()
        raise


def _at(spec: Spec, slot: int) -> int:
    """Where a slot begins, after the word."""
    return _PAGE + slot * round_up(spec.nbytes, _LINE)


def _slots(spec: Spec, edge: _Edge, region: Any) -> list[Any]:
    return [region.view(_at(spec, i), spec.nbytes) for i in range(edge.depth)]


# ---- bounded and dynamic


@dataclass(frozen=True, slots=True)
class _OnlyEdge:
    """The one edge of its group."""

    nbytes: int | None
    name: str = "tensor"
    source: str = "producer"
    targets: tuple[str, ...] = ("consumer",)
    slot: int = 0
    offset: int = 0
    lent: bool = False
    header: None = None


def _varying(
    edge: _Edge, channel: Channel, pipe: Meeting, side: Side, limit: int, access: Access, timeout: float
) -> ProducerEnd | ConsumerEnd:
    pool = Pool(channel.device, limit=limit)
    bound = edge.bound if edge.kind == "bounded" else None
    if side == "consumer" and not channel.device.capabilities.maps:
        garbage_collection.watch()
    group = EdgeGroup(
        [_OnlyEdge(None if bound is None else HEADER + bound)],
        {"producer": HEADER + (bound or 0), "consumer": 0},
        _peers(edge, channel, pipe, side, timeout),
        pools=lambda _: pool,
        timeout=timeout,
        depth=edge.depth,
        access=access,
        traced=False,
        defers=garbage_collection.running,
    )
    if side == "consumer":
        return VaryingConsumer(group, bound)
    return DynamicProducer(group, pool) if bound is None else BoundedProducer(group, bound)


def _peers(edge: _Edge, channel: Channel, pipe: Meeting, side: Side, timeout: float) -> Peers:
    """The other end, as a peer: each end publishes one message, and looks up the other's."""
    ours: list[bytes] = []

    def publish(what: str, peer: str, value: bytes) -> None:
        ours.append(value)

    def lookup(what: str, peer: str) -> bytes:
        return _agree(_Offer(side, edge, ours.pop()), pipe, timeout).memory

    return Peers("this edge", side, lambda _: channel, publish, lookup, lambda peer, number: None)
