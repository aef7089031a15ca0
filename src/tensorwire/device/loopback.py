"""The loopback device: peers are devices of the same process. For tests, examples and one-process jobs."""

from __future__ import annotations

import secrets
import weakref

from tensorwire._native import Liveness, Memory
from tensorwire.device.contract import Capabilities, Channel, Device
from tensorwire.device.mapped import MappedChannel
from tensorwire.device.region import Access, Region, RemoteRegion, RemoteView
from tensorwire.errors import PeerLost

_devices: weakref.WeakValueDictionary[bytes, LoopbackDevice] = weakref.WeakValueDictionary()


class LoopbackDevice(Device):
    """Transfers between devices of one process, for tests and examples. It takes no arguments."""

    name = "loopback"
    capabilities = Capabilities(maps=True, shares_registered=True, other_processes=False)

    def __init__(self) -> None:
        super().__init__()
        self._address = secrets.token_bytes(16)
        self._exposed: dict[int, tuple[Region, Access]] = {}
        self._inbound: weakref.WeakSet[LoopbackChannel] = weakref.WeakSet()
        self._outbound: weakref.WeakSet[LoopbackChannel] = weakref.WeakSet()
        _devices[self._address] = self

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, address: bytes, timeout: float = 30.0) -> Channel:
        self._check_open()
        peer = _devices.get(address)
        if peer is None or peer.liveness.lost:
            raise PeerLost("loopback: no open device of this process has that address")
        channel = LoopbackChannel(self, peer)
        self._outbound.add(channel)
        peer._inbound.add(channel)
        return channel

    def _expose(self, region: Region, access: Access) -> int:
        if access not in region.keys:
            region.keys[access] = secrets.randbits(64)
            self._exposed[region.keys[access]] = (region, access)
        return region.keys[access]

    def _withdraw(self, region: Region) -> None:
        for key in region.keys.values():
            self._exposed.pop(key, None)

    def close(self) -> None:
        for channel in list(self._outbound):
            channel.close()
        for channel in list(self._inbound):
            channel.liveness.lose("its device was closed")
            channel._reverse.lose("its device was closed")
        self._close_regions()
        self.liveness.close("the device was closed")
        self.callbacks.close()


class LoopbackChannel(MappedChannel):
    """A channel to a device of this process."""

    def __init__(self, device: LoopbackDevice, peer: LoopbackDevice) -> None:
        super().__init__(device, Liveness(device.liveness, "a device of this process"))
        self._peer = peer
        self._reverse = Liveness(peer.liveness, "a device of this process", inbound=True)  # what the peer's waiters see

    def _find(self, region: RemoteRegion) -> Memory:
        found = self._peer._exposed.get(region.key)
        if found is None:
            raise self._refused("no open region has that key")
        if found[1] != region.access and region.access == "write":
            raise self._refused("the region is read-only for this key")
        return found[0]

    def map(self, target: RemoteView) -> Memory | None:
        memory = super().map(target)
        if memory is None or target.region.access == "write" or not memory.writable:
            return memory
        return Memory.map(memory.fd, False) if memory.fd >= 0 else None

    def close(self) -> None:
        self.liveness.close("the channel was closed")
        self._reverse.lose("its channel was closed")
