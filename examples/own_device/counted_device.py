"""A device in one file, from a package of its own: tcp, with a count of what each process sends over it."""

from __future__ import annotations

from tensorwire.device import Channel, Completion, RemoteView, TcpDevice, View
from tensorwire.device.contract import Signal


class CountedDevice(TcpDevice):
    """Transfers over TCP that are counted, over all such devices of the process: bytes of payload, and signals."""

    name = "counted"
    nbytes = 0
    signals = 0

    def connect(self, address: bytes, timeout: float = 30.0) -> Channel:
        return CountedChannel(self, super().connect(address, timeout))


class CountedChannel(Channel):
    """Counts what is sent, and has a channel of the tcp device do it."""

    def __init__(self, device: CountedDevice, channel: Channel) -> None:
        super().__init__(device, channel.liveness)
        self._channel = channel

    def write(
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        completion = self._channel.write(local, remote, signal, fence=fence)
        CountedDevice.nbytes += local.nbytes
        CountedDevice.signals += signal is not None
        return completion

    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        CountedDevice.signals += 1
        return self._channel.signal(target, value, fence=fence)

    def read(self, local: View, remote: RemoteView) -> Completion:
        return self._channel.read(local, remote)

    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        return self._channel.fetch_add(target, value, timeout)

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        return self._channel.compare_swap(target, expected, value, timeout)

    def settle(self, timeout: float = 60.0) -> None:
        self._channel.settle(timeout)

    def close(self) -> None:
        self._channel.close()
