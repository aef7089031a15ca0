"""The shm device: peers on this machine map each other's memory.

Regions are sealed memfds, passed over a Unix socket to processes of the same user that hold the device's address.
Nothing has a name in the file system, so nothing outlives the processes.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading

from tensorwire._native import Life, Memory, Monitor, close_on_fork, forget_fd
from tensorwire.device import handshake
from tensorwire.device.acceptor import Acceptor
from tensorwire.device.contract import Capabilities, Channel, Device, unshared
from tensorwire.device.mapped import MappedChannel
from tensorwire.device.region import Access, Region, RemoteRegion
from tensorwire.errors import ArgumentError, PeerLost, ProtocolError, RemoteAccessError

_ASK = struct.Struct("<QB")  # key, 1: for writing
_NAME, _TOKEN = 16, 32


class ShmDevice(Device):
    """Transfers between processes of one user on one machine."""

    name = "shm"
    capabilities = Capabilities(maps=True, shares_registered=False)

    def __init__(self) -> None:
        super().__init__()
        self._name = secrets.token_bytes(_NAME)
        self._token = secrets.token_bytes(_TOKEN)
        self._monitor = Monitor()
        self._exposed: dict[int, tuple[Region, Access]] = {}
        self._channels: set[ShmChannel] = set()
        self._inbound: set[socket.socket] = set()
        self._lock = threading.Lock()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0tensorwire-" + self._name.hex().encode())
        listener.listen(128)
        self._acceptor = Acceptor(listener, self._greet, "tensorwire-shm")

    @property
    def address(self) -> bytes:
        return self._name + self._token

    def connect(self, address: bytes, timeout: float = 30.0) -> Channel:
        self._check_open()
        if len(address) != _NAME + _TOKEN:
            raise ArgumentError("not the address of a shm device")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(b"\0tensorwire-" + address[:_NAME].hex().encode())
            _check_same_user(sock)
            handshake.initiate(sock, address[_NAME:], b"shm")
        except OSError as error:
            sock.close()
            if isinstance(error, PeerLost):
                raise
            raise PeerLost(f"shm: cannot reach that device: {error}") from None
        except BaseException:
            sock.close()
            raise
        channel = ShmChannel(self, sock)
        with self._lock:
            self._channels.add(channel)
        return channel

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(30.0)
        _check_same_user(sock)
        handshake.accept(sock, self._token)
        life = Life(self.life)
        close_on_fork(sock.fileno())
        with self._lock:
            self._inbound.add(sock)
        self._monitor.watch(sock.fileno(), life)
        sock.settimeout(None)
        try:
            while True:
                key, write = _ASK.unpack(handshake.receive_exactly(sock, _ASK.size))
                self._answer(sock, key, bool(write))
        finally:
            with self._lock:
                mine = sock in self._inbound
                self._inbound.discard(sock)
            if mine:
                self._monitor.forget(sock.fileno())
                forget_fd(sock.fileno())
                life.lose("its process closed the connection or died")
                sock.close()

    def _answer(self, sock: socket.socket, key: int, write: bool) -> None:
        found = self._exposed.get(key)
        if found is None or found[0].closed:
            sock.sendall(b"\x01")
        elif write and found[1] != "write":
            sock.sendall(b"\x03")
        elif write:
            socket.send_fds(sock, [b"\x00"], [found[0].fd])
        else:
            # Opened anew: the peer's descriptor itself cannot write.
            fd = os.open(f"/proc/self/fd/{found[0].fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(sock, [b"\x00"], [fd])
            finally:
                os.close(fd)

    def _expose(self, region: Region, access: Access) -> int:
        if region.fd < 0:
            raise unshared(self.name)
        if access not in region.keys:
            region.keys[access] = secrets.randbits(64)
            self._exposed[region.keys[access]] = (region, access)
        return region.keys[access]

    def _withdraw(self, region: Region) -> None:
        for key in region.keys.values():
            self._exposed.pop(key, None)

    def close(self) -> None:
        if self.life.forked or self.life.lost and not self._channels and not self._inbound:
            self._acceptor.close()
            self._monitor.close()
            return
        self._acceptor.close()
        with self._lock:
            channels, inbound = list(self._channels), list(self._inbound)
        for channel in channels:
            channel.close()
        for region, _ in list(self._exposed.values()):
            region.close()
        for sock in inbound:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # its thread cleans up
            except OSError:
                pass
        self.life.lose("the device was closed")
        self._monitor.close()


class ShmChannel(MappedChannel):
    """A channel to a process of this machine."""

    def __init__(self, device: ShmDevice, sock: socket.socket) -> None:
        super().__init__(device, Life(device.life))
        self._sock = sock
        self._mapped: dict[tuple[int, Access], Memory] = {}
        self._lock = threading.Lock()
        close_on_fork(sock.fileno())
        device._monitor.watch(sock.fileno(), self.life)

    def _find(self, region: RemoteRegion) -> Memory:
        memory = self._mapped.get((region.key, region.access))
        return memory if memory is not None else self._map(region)

    def _map(self, region: RemoteRegion) -> Memory:
        write = region.access == "write"
        with self._lock:
            self._check_alive()
            try:
                self._sock.sendall(_ASK.pack(region.key, write))
                status, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
            except OSError as error:
                raise PeerLost(f"shm: the peer is lost: {error}") from None
            if not status:
                raise PeerLost("shm: the peer is lost: it closed the connection")
            if status != b"\x00" or len(fds) != 1:
                for fd in fds:
                    os.close(fd)
                why = "the region is read-only for this key" if status == b"\x03" else "no open region has that key"
                raise RemoteAccessError(f"shm: the target refused: {why}")
            try:
                memory = Memory.map(fds[0], write)
            except OSError as error:
                raise ProtocolError(f"shm: the peer's region cannot be mapped: {error.args[1]}") from None
            finally:
                os.close(fds[0])
            memory.bind(self.device.life, None)
            self._mapped[region.key, region.access] = memory
            return memory

    def close(self) -> None:
        device = self.device
        assert isinstance(device, ShmDevice)
        with device._lock:
            if self not in device._channels:
                return
            device._channels.discard(self)
        device._monitor.forget(self._sock.fileno())
        forget_fd(self._sock.fileno())
        self.life.lose("the channel was closed")
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


def _check_same_user(sock: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise RemoteAccessError("shm: the other process belongs to another user")
