"""The other processes of an edge group, as the edge layer needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorwire.device import Channel


@dataclass(frozen=True)
class Peers:
    """How process ``me`` reaches the others of the group called ``name``.

    Attributes:
        name: The group, as errors call it.
        me: This process.
        channel: ``channel(peer)``, the channel to a process.
        publish: ``publish(what, peer, value)`` makes bytes known to a process, under a name that is used once.
        lookup: ``lookup(what, peer)`` waits for what that process has published to this one.
        gone_on: ``gone_on(peer, number)``, given the largest number that a process has announced: the error for those
            who still wait for its tensors, or None if it will send them.
    """

    name: str
    me: str
    channel: Callable[[str], Channel]
    publish: Callable[[str, str, bytes], None]
    lookup: Callable[[str, str], bytes]
    gone_on: Callable[[str, int], Exception | None]
