"""How a worker and a server tell each other where their memory is, before the first step or request."""

from __future__ import annotations

import msgspec

from tensorwire.control import Member
from tensorwire.device import Region, RemoteRegion
from tensorwire.errors import ProtocolError
from tensorwire.messages import decode_message

_SECONDS = 600.0  # that the other side may take: workers may be slow to come


class _Endpoint(msgspec.Struct, frozen=True):
    """Packed remote regions. ``memory``: for the other side to write to; ``more``: the same, or to look at; or none."""

    memory: bytes
    more: bytes


def show(member: Member, name: str, peer: str, memory: Region, more: RemoteRegion | None = None) -> None:
    """Tells ``peer`` where this process has memory for what both call ``name``."""
    endpoint = _Endpoint(memory.remote("write").pack(), b"" if more is None else more.pack())
    member.client.publish(f"{name}/{member.name}/{peer}", msgspec.msgpack.encode(endpoint), to=[peer])


def find(member: Member, name: str, peer: str) -> tuple[RemoteRegion, RemoteRegion | None]:
    """What ``peer`` shows this process. Waits for it.

    Raises `ProtocolError`, `WaitTimeout`, `JobEnded`, or `PeerLost` where it is lost.
    """
    packed = member.client.lookup(f"{name}/{peer}/{member.name}", timeout=_SECONDS, owner=peer)
    endpoint = decode_message(packed, _Endpoint)
    memory, device = RemoteRegion.unpack(endpoint.memory), member.channel(peer).device
    if memory.device != device.name:
        raise ProtocolError(f"{peer} answers over {memory.device}, we over {device.name}")
    return memory, RemoteRegion.unpack(endpoint.more) if endpoint.more else None
