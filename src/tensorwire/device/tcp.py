"""The tcp device: one-sided operations that a native engine of the target applies. Runs everywhere.

The kernel copies payload on its way through a socket; Tensorwire itself copies nothing. Frames: docs/devices.md.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Callable

from tensorwire._native import NO_SIGNAL, Connection, Engine, Liveness, Memory
from tensorwire.addresses import address_text
from tensorwire.device.acceptor import Acceptor
from tensorwire.device.checks import check_fillable, check_signal, check_sizes, check_value, check_word, refused
from tensorwire.device.contract import Capabilities, Channel, Completion, Signal
from tensorwire.device.ip_device import IpAddress, IpDevice
from tensorwire.device.operands import explain
from tensorwire.device.peer_monitor import check_heartbeat, milliseconds
from tensorwire.device.region import Access, Region, RemoteView, View
from tensorwire.errors import PeerLost, RegionClosed, WaitTimeout

_POST_SECONDS = 60.0  # how long a full channel may take to drain before a new operation gives up
# On loopback: smaller buffers cost up to twice the processor time where several connections share the cores, larger
# ones spill the cache. On real links the kernel's autotuning must stay on.
_LOOPBACK_BUFFER = 1 << 20
# There is no network there to share, and a congestion control that paces (BBR) costs timers. Everybody may choose this.
_LOOPBACK_CONTROL = b"reno"
_PURPOSE = b"tcp"
_TERMS = struct.Struct("<QI")  # after the purpose: the initiator's device, milliseconds between its signs of life


class TcpAddress(IpAddress, frozen=True):
    """``beat``: milliseconds between the device's signs of life."""

    beat: int = 1000


class TcpDevice(IpDevice):
    """Transfers over TCP, which a native thread of the target carries out.

    Args:
        interface: The IP address to listen on; by default only this machine can connect.
        port: The port to listen on; 0: any that is free.
        heartbeat: Seconds between two signs of life of this process, 0.001 to 3600.
        lost_after: Seconds of silence after which a peer is lost; at least twice ``heartbeat``.

    Raises:
        ArgumentError: It cannot listen there, or a number is out of range.
    """

    name = "tcp"
    capabilities = Capabilities(maps=False, shares_registered=True, one_sided=False)
    _address: TcpAddress

    def __init__(
        self, interface: str = "127.0.0.1", port: int = 0, heartbeat: float = 1.0, lost_after: float = 10.0
    ) -> None:
        super().__init__()
        check_heartbeat(heartbeat, lost_after)
        self._lost_after = lost_after
        self._engine = Engine(self.liveness, heartbeat, lost_after)
        self._token = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._channels: set[TcpChannel] = set()
        try:
            listener = self._listen(interface, port)
        except BaseException:
            self._engine.close()
            raise
        self._address = TcpAddress(interface, listener.getsockname()[1], self._token, milliseconds(heartbeat))
        self._acceptor = Acceptor(listener, self._token, self._greet, "tensorwire-tcp")

    @classmethod
    def for_job(cls, *, interface: str, heartbeat: float, lost_after: float) -> TcpDevice:
        return cls(interface, heartbeat=heartbeat, lost_after=lost_after)

    def _purpose(self) -> bytes:
        return _PURPOSE + _TERMS.pack(self._address.device, self._address.beat)

    def _open(self, sock: socket.socket, peer: TcpAddress) -> Channel:
        liveness = Liveness(self.liveness, address_text(peer.interface, peer.port))
        connection = self._engine.connect(_release(sock), True, liveness, peer.device, peer.beat / 1000)
        channel = TcpChannel(self, connection, liveness, peer.device)
        with self._lock:
            self._channels.add(channel)
        return channel

    def _greet(self, sock: socket.socket, purpose: bytes) -> None:
        # A peer that announces no signs of life gets none, and is not watched.
        terms = purpose[len(_PURPOSE) :]
        device, beat = _TERMS.unpack(terms) if len(terms) == _TERMS.size else (0, 0)
        liveness = Liveness(self.liveness, address_text(*sock.getpeername()[:2]), inbound=True)
        self._engine.connect(_release(sock), False, liveness, device, beat / 1000)

    def _bind(self, memory: Memory) -> None:
        memory.bind(self.liveness, self._engine)

    def _expose(self, region: Region, access: Access) -> int:
        if access not in region.keys:
            region.keys[access] = secrets.randbits(64)
            self._engine.expose(region.keys[access], region, access == "write")
        return region.keys[access]

    def _withdraw(self, region: Region) -> None:
        for key in region.keys.values():
            self._engine.withdraw(key)

    def abort(self, reason: str) -> None:
        # First, because waits end with the device's liveness: the peers must know before anybody reuses memory.
        self._end_channels(reason)
        super().abort(reason)
        self._end_channels(reason)  # those that were made meanwhile

    def _end_channels(self, reason: str, *, own: bool = False) -> None:
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel._connection.close(reason, own)  # waits where another thread is at it
        with self._lock:
            self._channels.difference_update(channels)

    def close(self) -> None:
        if self.liveness.forked:  # the parent's: a lock may be held forever
            return
        self._end_channels("the device was closed", own=True)  # first, as in abort()
        self.liveness.close("the device was closed")
        self._end_channels("the device was closed", own=True)
        self._close_regions()
        self._acceptor.close()
        self._engine.close()
        self.callbacks.close()

    def _socket(self, interface: str) -> socket.socket:
        sock = super()._socket(interface)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._lost_after * 1000))
        if interface in ("127.0.0.1", "::1"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER)
            with contextlib.suppress(OSError):  # a machine whose administrator allows others only
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONTROL)
        return sock


class TcpChannel(Channel):
    """A channel over one TCP connection."""

    def __init__(self, device: TcpDevice, connection: Connection, liveness: Liveness, peer_device: int) -> None:
        super().__init__(device, liveness)
        self.connection = self._connection = connection
        self._peer_device = peer_device
        self._engine = device._engine

    def write(
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        try:
            posted = self._connection.write_view(local, remote, signal, fence, _POST_SECONDS)
            if posted:
                return TcpCompletion(self, posted, local.region)
            return self._write(local, remote, signal, fence)
        except TimeoutError as error:
            if isinstance(error, WaitTimeout):
                raise
            return self._completion(0)
        except (TypeError, AttributeError) as error:
            raise explain(error, "write", local=local, remote=remote, signal=signal) from None

    def _write(self, local: View, remote: RemoteView, signal: Signal | None, fence: bool) -> Completion:
        check_sizes(local.nbytes, remote.nbytes)
        check_signal(signal)
        self._check_alive()
        if local.region.closed:
            raise RegionClosed("the source region was closed")
        region = remote.region
        key, at, value = (
            (signal[0].region.key, signal[0].offset, signal[1]) if signal is not None else (0, NO_SIGNAL, 0)
        )
        posted = self._connection.write(
            local.region, local.offset, local.nbytes, region.key, remote.offset, key, at, value, _POST_SECONDS, fence
        )
        return self._completion(posted, local.region)

    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        try:
            check_signal((target, value))
            self._check_alive()
            posted = self._connection.signal(target.region.key, target.offset, value, _POST_SECONDS, fence)
            return self._completion(posted)
        except (TypeError, AttributeError) as error:
            raise explain(error, "signal", remote=target, values=(value,)) from None

    def read(self, local: View, remote: RemoteView) -> Completion:
        try:
            check_sizes(remote.nbytes, local.nbytes)
            check_fillable(local)
            self._check_alive()
            if local.region.closed:
                raise RegionClosed("the target region was closed")
            posted = self._connection.read(
                local.region, local.offset, local.nbytes, remote.region.key, remote.offset, _POST_SECONDS
            )
            return self._completion(posted, local.region)
        except (TypeError, AttributeError) as error:
            raise explain(error, "read", local=local, remote=remote) from None

    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        try:
            check_word(target)
            key, at, added = target.region.key, target.offset, value % 2**64
            return self._atomic(self._connection.fetch_add, key, at, added, timeout=timeout)
        except (TypeError, AttributeError) as error:
            raise explain(error, "fetch_add", remote=target, values=(value,)) from None

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        try:
            check_word(target)
            check_value(expected, value)
            key, at = target.region.key, target.offset
            return self._atomic(self._connection.compare_swap, key, at, expected, value, timeout=timeout)
        except (TypeError, AttributeError) as error:
            raise explain(error, "compare_swap", remote=target, values=(expected, value)) from None

    def _atomic(self, post: Callable[..., int], *arguments: int, timeout: float) -> int:
        self._check_alive()
        posted = post(*arguments, timeout)
        self._completion(posted).wait(timeout)
        return self._connection.old_value(posted)

    def _completion(self, posted: int, memory: Region | None = None) -> Completion:
        if posted == 0:
            self._check_alive()
            raise WaitTimeout(f"tcp: the channel stayed full for {_POST_SECONDS:g} s; the operation was not started")
        return TcpCompletion(self, posted, memory)

    def settle(self, timeout: float = 60.0) -> None:
        self._check_lost()
        # What the peer had sent over a connection of its own may still arrive. A peer that lives learns of it.
        self._engine.expel(self._peer_device, "another connection to it was lost")

    def close(self) -> None:
        device = self.device
        assert isinstance(device, TcpDevice)
        if self.liveness.forked:
            return
        self._connection.close("the channel was closed", own=True)
        self.liveness.close("the channel was closed")  # it may have been lost before
        with device._lock:
            device._channels.discard(self)


class TcpCompletion(Completion):
    """An operation on its way; keeps its memory alive."""

    __slots__ = ("_channel", "_memory", "_posted")

    def __init__(self, channel: TcpChannel, posted: int, memory: Region | None) -> None:
        self._channel = channel
        self._posted = posted
        self._memory = memory

    @property
    def done(self) -> bool:
        return self._channel._connection.done >= self._posted or self._channel.lost

    def _call_when_done(self, call: Callable[[Completion], object]) -> None:
        channel = self._channel
        callbacks = channel.device.callbacks
        token = callbacks.add(lambda: call(self))
        channel._connection.notify(self._posted, callbacks.notices, token)

    def wait(self, timeout: float = 60.0) -> None:
        channel = self._channel
        outcome = channel._connection.wait(channel._engine, self._posted, timeout)
        if outcome == 0:
            return
        if outcome == 1:
            raise WaitTimeout(
                f"tcp: no acknowledgement within {timeout:g} s; the transfer goes on: do not reuse its memory"
            )
        if outcome == 2:
            raise PeerLost(channel.device.why_lost(channel))
        raise refused("tcp", channel._connection.refusal(self._posted))


def _release(sock: socket.socket) -> int:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock.detach()
