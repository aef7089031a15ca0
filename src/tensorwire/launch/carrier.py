"""Large values between workers: each is read, one-sided, from the memory of the worker that has it.

The carrier has devices of its own. Its peers come and go at any time, which would end waits without a channel on the
member's devices: see ``Region.wait``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import numpy as np

from tensorwire.control import Cause, Member
from tensorwire.control.reach import CANDIDATES, Card, connect, endpoint
from tensorwire.device import Channel, Device, Region, RemoteRegion
from tensorwire.errors import WaitTimeout
from tensorwire.launch.values import Bytes


class Offer(msgspec.Struct, frozen=True):
    """How others reach a span of a worker's memory: its devices, and the region on each."""

    card: Card
    regions: dict[str, bytes]
    nbytes: int


class Carrier:
    """This worker's devices for large values. They open with the first one and close with the job."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._devices: dict[str, Device] = {}
        self._card: Card | None = None
        self._channels: dict[int, Channel] = {}
        self._unfinished: list[Region] = []  # that a read may still fill

    def _open(self) -> Card:
        if self._card is not None:
            return self._card
        member = self._member
        names = list(member.devices)
        if len(names) > 1:  # what both ends would have to agree on is too much for what is rare
            names = [name for name in names if not CANDIDATES[name].agreed]
        for name in names:
            self._devices[name] = member.new_device(name)
        self._card = Card(member.where, {name: endpoint(device) for name, device in self._devices.items()})
        member.client.on_end(self._ended)
        return self._card

    def _ended(self, cause: Cause | None) -> None:
        if cause is not None:
            for device in self._devices.values():
                device.abort(f"the job ended: {cause}")

    @contextlib.contextmanager
    def offer(self, nbytes: int) -> Iterator[tuple[Bytes, Offer]]:
        """Memory that others may read while the block lasts. Raises `OutOfMemory`."""
        card = self._open()
        (name, first), *others = self._devices.items()
        with contextlib.ExitStack() as regions:
            own = regions.enter_context(first.allocate(nbytes))
            open_to = {name: own.remote("read").pack()}
            for other, device in others:
                open_to[other] = regions.enter_context(device.register(memoryview(own))).remote("read").pack()
            yield np.frombuffer(memoryview(own), np.uint8), Offer(card, open_to, nbytes)

    def fetch(self, rank: int, offer: Offer, start: int, target: Bytes, timeout: float) -> None:
        """Fills ``target`` from what worker ``rank`` offers, from its byte ``start`` on.

        Raises `WaitTimeout`, `PeerLost`, or `RemoteAccessError` where that worker does not offer it any more.
        """
        if not target.nbytes:
            return
        self._open()
        if rank not in self._channels:
            self._channels[rank], _ = connect(self._devices, self._member.where, offer.card)
        channel = self._channels[rank]
        region = channel.device.register(target)
        source = RemoteRegion.unpack(offer.regions[channel.device.name]).view(start, target.nbytes)
        try:
            channel.read(region.view(), source).wait(timeout)
        except WaitTimeout:
            self._unfinished.append(region)
            raise
        except BaseException:
            region.close()
            raise
        region.close()

    def rest(self) -> None:
        """Gives back what reading took: a channel keeps what it has mapped of its peer's memory."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def close(self) -> None:
        """Closes the devices. Idempotent."""
        for device in self._devices.values():
            device.close()
