"""Devices whose channels are set up over IP: their addresses, the sockets that listen, and connections to others."""

from __future__ import annotations

import hashlib
import socket
from abc import abstractmethod
from typing import Any

import msgspec

from tensorwire._native import open_socket
from tensorwire.device import handshake
from tensorwire.device.acceptor import close_socket
from tensorwire.device.contract import Channel, Device
from tensorwire.errors import ArgumentError, PeerLost
from tensorwire.messages import decode_message


class IpAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a device listens, and the token that admits to it."""

    interface: str
    port: int
    token: bytes

    @property
    def device(self) -> int:
        """A number that identifies the device and gives no access to it."""
        return int.from_bytes(hashlib.sha256(self.token).digest()[:8], "little")


class IpDevice(Device):
    """A subclass listens and says where, of its own kind of address, and makes a channel of each connection."""

    _address: IpAddress

    @property
    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._address)

    def connect(self, address: bytes, timeout: float = 30.0) -> Channel:
        self._check_open()
        try:
            where = decode_message(address, type(self._address))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ArgumentError(f"not the address of a {self.name} device") from None
        return handshake.persist(lambda left: self._dial(where, left), timeout)

    def _dial(self, where: IpAddress, timeout: float) -> Channel:
        sock = self._socket(where.interface)
        try:
            sock.settimeout(timeout)
            try:
                sock.connect((where.interface, where.port))
            except (OverflowError, TypeError, ValueError):  # no socket has such an interface or port
                raise ArgumentError(f"not the address of a {self.name} device") from None
            handshake.initiate(sock, where.token, self._purpose())
            return self._open(sock, where)
        except BaseException as error:
            close_socket(sock)
            if isinstance(error, OSError) and not isinstance(error, PeerLost):
                raise PeerLost(f"{self.name}: cannot reach {where.interface}:{where.port}: {error}") from None
            raise

    def _listen(self, interface: str, port: int = 0) -> socket.socket:
        listener = self._socket(interface)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((interface, port))
            listener.listen(128)
        except OSError as error:
            close_socket(listener)
            raise ArgumentError(f"{self.name}: cannot listen on {interface}:{port}: {error.strerror}") from None
        return listener

    def _socket(self, interface: str) -> socket.socket:
        """A socket that listens on an address, or connects to it."""
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        sock = socket.socket(fileno=open_socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock

    @abstractmethod
    def _purpose(self) -> bytes:
        """What this device says of a connection that it opens."""

    @abstractmethod
    def _open(self, sock: socket.socket, where: Any) -> Channel:
        """The channel over a connection to the device ``where``."""
