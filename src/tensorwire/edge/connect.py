"""An edge between two processes, set up in one call at each end: they tell each other where its memory lies.

Each end allocates its part, sends one message (`_Offer`, msgpack, at most 64 KiB), and checks the other's: both must
describe the same edge. Nothing is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, overload

import msgspec

from tensorwire.device import Channel, Region, RemoteRegion, RemoteView
from tensorwire.device.meeting import Meeting, exchange
from tensorwire.device.region import Access
from tensorwire.edge.bounded import BoundedConsumer, BoundedProducer
from tensorwire.edge.checked import CheckedConsumer, CheckedProducer
from tensorwire.edge.dynamic import DynamicConsumer, DynamicProducer
from tensorwire.edge.ends import ConsumerEnd, InOrder, ProducerEnd
from tensorwire.edge.pool import Pool
from tensorwire.edge.ring import Ring
from tensorwire.edge.static import TRAILER, Consumer, Producer, Word
from tensorwire.edge.striped import StripedConsumer, StripedProducer, stripes
from tensorwire.edge.tensor import Spec
from tensorwire.errors import ArgumentError, ProtocolError

_LINE = 64  # bytes between two words: no two share a cache line
_PAGE = 4096

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Edge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both ends must agree on. Static edges have a dtype and a shape, bounded ones a bound."""

    kind: Literal["static", "bounded", "dynamic"]
    depth: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    check: bool = False
    dtype: str = ""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)] = ()
    bound: Count = 0


class _Offer(msgspec.Struct, frozen=True, tag="tensorwire edge 1", forbid_unknown_fields=True):
    """One end's message: the edge, this end's side, the lanes of its channel, and the capability for its memory."""

    edge: _Edge
    side: Literal["producer", "consumer"]
    lanes: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    memory: bytes


_offer = msgspec.msgpack.Decoder(_Offer)


@dataclass(frozen=True)
class _Ends:
    """Both ends' memory, as this end sees it."""

    channel: Channel
    edge: _Edge
    here: Region
    there: RemoteRegion
    lanes: int  # that both channels have


@overload
def connect_edge(
    channel: Channel,
    pipe: Meeting,
    side: Literal["producer"],
    *,
    spec: Spec | None = ...,
    bound: int | None = ...,
    depth: int = ...,
    check: bool = ...,
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
    check: bool = ...,
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
    check: bool = False,
    limit: int = 1 << 30,
    access: Access = "read",
    timeout: float = 60.0,
) -> ProducerEnd | ConsumerEnd:
    """One end of an edge to the process at the other end of ``channel``, which connects the other end.

    With ``spec`` the edge is static, with ``bound`` it is bounded, and with neither it is dynamic. Both processes name
    the same ``spec``, ``bound``, ``depth`` and ``check``. Edges that share a pipe are connected in the same order by
    both processes.

    Args:
        channel: This process's channel to the other one, such as that of ``connect_peer``.
        pipe: As for ``connect_peer``. It carries one message each way, and may be closed afterwards.
        side: Which end this process has, ``"producer"`` or ``"consumer"``.
        spec: Shape and dtype of every tensor.
        bound: The largest tensor, in bytes.
        depth: How many steps may be sent that the consumer has not given back.
        check: Whether to send a checksum with each tensor (static edges).
        limit: The most registered memory for payload, in bytes, at each end that needs some (dynamic edges).
        access: What the consumer may do to payload that it looks at in the producer's memory (dynamic edges).
        timeout: Seconds to wait for the other process.

    Returns:
        The end, with its memory. Close it before the channel, such as at the end of a ``with`` block.

    Raises:
        ArgumentError: If the two ends describe different edges, or both are the same side.
        OutOfMemory: If there is no memory for this end.
        PeerLost, WaitTimeout: If the other process ends, or does not answer in time.
        ProtocolError: If something else than Tensorwire answers.
    """
    if side not in ("producer", "consumer"):
        raise ArgumentError(f"side is 'producer' or 'consumer', not {side!r}")
    edge = _describe(spec, bound, depth, check)
    here = channel.device.allocate(_nbytes(edge, channel, side))
    try:
        offer = _Offer(edge, side, len(channel.lanes), here.remote("write").pack())
        theirs = _check(offer, exchange(pipe, msgspec.msgpack.encode(offer), timeout))
        there = RemoteRegion.unpack(theirs.memory)
        ends = _Ends(channel, edge, here, there, min(offer.lanes, theirs.lanes))
        if side == "producer":
            return _produce(ends, limit, access)
        return _consume(ends, limit)
    except BaseException:
        here.close()
        raise


def _describe(spec: Spec | None, bound: int | None, depth: int, check: bool) -> _Edge:
    if spec is not None and bound is not None:
        raise ArgumentError("an edge has a spec (static) or a bound (bounded), not both")
    if check and spec is None:
        raise ArgumentError("the content check is for static edges: name a spec")
    if depth < 1:
        raise ArgumentError(f"an edge has a depth of 1 or more, not {depth}")
    if spec is not None:
        return _Edge("static", depth, check, spec.dtype, spec.shape)
    return _Edge("dynamic", depth) if bound is None else _Edge("bounded", depth, bound=Ring(depth, bound).bound)


def _check(ours: _Offer, message: bytes) -> _Offer:
    """The other end's offer. Raises `ProtocolError` or `ArgumentError`."""
    try:
        theirs = _offer.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProtocolError(
            "the other process connects no edge here: both call connect_edge, in the same order, with the same version"
        ) from None
    if theirs.side == ours.side:
        raise ArgumentError(f"both ends are the {ours.side}'s: one process is the producer, the other the consumer")
    for name in _Edge.__struct_fields__:
        here, there = getattr(ours.edge, name), getattr(theirs.edge, name)
        if here != there:
            raise ArgumentError(f"the two ends differ: {name} is {here!r} here and {there!r} there")
    return theirs


# ---- what lies where: a static edge's words and slots; a ring's layout is its own


def _spec(edge: _Edge) -> Spec:
    return Spec(edge.shape, edge.dtype)


def _slot_nbytes(edge: _Edge) -> int:
    return _spec(edge).nbytes + TRAILER * edge.check


def _first(channel: Channel) -> int:
    """Where the slots of a static edge begin: behind the arrival words."""
    return -(-_LINE * len(channel.lanes) // _PAGE) * _PAGE


def _at(edge: _Edge, first: int, slot: int) -> int:
    return first + slot * (-(-_slot_nbytes(edge) // _LINE) * _LINE)


def _nbytes(edge: _Edge, channel: Channel, side: str) -> int:
    """Bytes of this end's memory."""
    maps = channel.device.capabilities.maps
    if edge.kind != "static":
        ring = Ring(edge.depth, edge.bound)
        return ring.words_nbytes if maps and side == "producer" else ring.nbytes
    if side == "producer":  # the credit, and what is sent across
        return _LINE if maps else _at(edge, _PAGE, edge.depth)
    return _at(edge, _first(channel), edge.depth)


def _views(edge: _Edge, region: Any, first: int) -> list[Any]:
    return [region.view(_at(edge, first, i), _slot_nbytes(edge)) for i in range(edge.depth)]


def _arrivals(ends: _Ends) -> int:
    return 1 if ends.edge.check else stripes(_spec(ends.edge).nbytes, ends.lanes)


def _produce(ends: _Ends, limit: int, access: Access) -> ProducerEnd:
    channel, edge, here, there = ends.channel, ends.edge, ends.here, ends.there
    if edge.kind != "static":
        ring, inbox = Ring(edge.depth, edge.bound), there.view(0, Ring(edge.depth, edge.bound).nbytes)
        if edge.kind == "bounded":
            return ProducerEnd(BoundedProducer(channel, inbox, here.view(), ring=ring), here)
        pool = Pool(channel.device, limit=limit)
        return ProducerEnd(DynamicProducer(channel, inbox, here.view(), ring=ring, pool=pool, access=access), here)
    first = there.length - (_at(edge, 0, edge.depth))  # the consumer may have more lanes
    options: dict[str, Any] = {
        "slots": _views(edge, there, first),
        "source": [] if channel.device.capabilities.maps else _views(edge, here, _PAGE),
        "credit": Word(here, 0, channel),
        "spec": _spec(edge),
    }
    words = [there.view(_LINE * i, 8) for i in range(_arrivals(ends))]
    if len(words) > 1:
        return ProducerEnd(StripedProducer(channel, words, **options), here)
    return ProducerEnd((CheckedProducer if edge.check else Producer)(channel, words[0], **options), here)


def _consume(ends: _Ends, limit: int) -> ConsumerEnd:
    channel, edge, here, there = ends.channel, ends.edge, ends.here, ends.there
    if edge.kind != "static":
        ring, outbox = Ring(edge.depth, edge.bound), there.view()
        if edge.kind == "bounded":
            return ConsumerEnd(BoundedConsumer(channel, here.view(), outbox, ring=ring), here)
        pool = None if channel.device.capabilities.maps else Pool(channel.device, limit=limit)
        return ConsumerEnd(DynamicConsumer(channel, here.view(), outbox, ring=ring, pool=pool), here)
    views = _views(edge, here, _first(channel))
    credit: tuple[Channel, RemoteView] = (channel, there.view(0, 8))
    options: dict[str, Any] = {"slots": [view.buffer for view in views], "credit": credit, "spec": _spec(edge)}
    words = [Word(here, _LINE * i, channel) for i in range(_arrivals(ends))]
    consumer: Consumer
    if len(words) > 1:
        consumer = StripedConsumer(words, **options)
    else:
        consumer = (CheckedConsumer if edge.check else Consumer)(words[0], **options)
    return ConsumerEnd(InOrder(consumer, here, [view.offset for view in views]), here)
