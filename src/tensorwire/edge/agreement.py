"""Two ends of an edge say what they are, and go on if they describe the same edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import msgspec

from tensorwire.device.meeting import Meeting, introduce
from tensorwire.errors import ArgumentError

Side = Literal["producer", "consumer"]


class EdgeOffer(msgspec.Struct, frozen=True):
    """One end's message."""

    side: Side


AnOffer = TypeVar("AnOffer", bound=EdgeOffer)


def agree(
    ours: AnOffer, alike: Callable[[AnOffer], Mapping[str, object]], pipe: Meeting, timeout: float, call: str
) -> AnOffer:
    """The other end's offer, which has the other side, and the same of what is to be ``alike``.

    Raises `ArgumentError`, or as `introduce`.
    """
    theirs = introduce(pipe, ours, timeout, "an edge", call)
    if theirs.side == ours.side:
        raise ArgumentError(f"both ends are the {ours.side}'s: one process is the producer, the other the consumer")
    there = alike(theirs)
    for name, here in alike(ours).items():
        if here != there[name]:
            raise ArgumentError(f"the two ends differ: {name} is {here!r} here and {there[name]!r} there")
    return theirs
