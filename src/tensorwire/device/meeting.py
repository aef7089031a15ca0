"""Connects the devices of two processes: they exchange addresses over an existing connection."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, Union

import msgspec

from tensorwire.device.contract import Channel, Device
from tensorwire.device.handshake import receive_exactly
from tensorwire.errors import ArgumentError, PeerLost, ProtocolError, WaitTimeout
from tensorwire.messages import decode_message

Message = TypeVar("Message", bound=msgspec.Struct)
MOST_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


class Pipe(Protocol):
    """What carries messages to the other process and back, such as a ``multiprocessing`` connection."""

    def send_bytes(self, data: bytes, /) -> Any:
        """Sends one message."""

    def recv_bytes(self, maxlength: int = ..., /) -> bytes:
        """The next message of the other process."""


# A pipe, a connected stream socket, or a function that hands over our message and returns the other process's.
Meeting = Union[Pipe, socket.socket, Callable[[bytes], bytes]]  # noqa: UP007  # as a value, for Python 3.10


class _Hello(msgspec.Struct, frozen=True, tag="tensorwire device 1", forbid_unknown_fields=True):
    """What both processes say before they connect."""

    device: str
    address: bytes


def connect_peer(device: Device, pipe: Meeting, timeout: float = 60.0) -> Channel:
    """Connects to the device of the process at the other end of ``pipe``, which calls this function, too.

    Args:
        device: This process's device; the other process has one of the same kind.
        pipe: What only these two processes share: an object with ``send_bytes`` and ``recv_bytes``, such as a
            ``multiprocessing`` connection; a connected stream socket; or a function that takes our message and returns
            that of the other process. Its readers can connect to both devices.
        timeout: Seconds to wait for the other process, and for the connection.

    Returns:
        A channel to the device of the other process.

    Raises:
        ArgumentError: The devices are of different kinds, or ``pipe`` is none of these.
        PeerLost: The other process ended, or cannot be reached.
        WaitTimeout: The other process did not answer in time.
        ProtocolError: Something other than Tensorwire answered.
    """
    theirs = introduce(pipe, _Hello(device.name, device.address), timeout, "a device", "connect_peer")
    if theirs.device != device.name:
        raise ArgumentError(f"the devices differ: {device.name} here, {theirs.device} there")
    return device.connect(theirs.address, timeout)


def introduce(pipe: Meeting, ours: Message, timeout: float, what: str, call: str) -> Message:
    """Sends a struct, and returns the other process's of the same type. Raises as ``connect_peer`` does.

    ``what`` both connect by which ``call``, for messages.
    """
    try:
        return decode_message(exchange(pipe, msgspec.msgpack.encode(ours), timeout), type(ours))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProtocolError(
            f"the other process does not connect {what} here: both must call {call}, in the same order, with the same "
            "version"
        ) from None


def exchange(pipe: Meeting, ours: bytes, timeout: float) -> bytes:
    """Sends ``ours``, and returns what the other process sent, of at most 64 KiB. Raises as ``connect_peer`` does."""
    try:
        if isinstance(pipe, socket.socket):
            theirs = _over_socket(pipe, ours, timeout)
        elif hasattr(pipe, "send_bytes") and hasattr(pipe, "recv_bytes"):
            theirs = _over_pipe(pipe, ours, timeout)
        elif callable(pipe):
            theirs = pipe(ours)
        else:
            raise ArgumentError(
                "a pipe must be a socket, a function, or an object with send_bytes and recv_bytes; "
                f"not {type(pipe).__name__}"
            )
    except (PeerLost, WaitTimeout):
        raise
    except TimeoutError:
        raise WaitTimeout(f"the other process sent nothing within {timeout:g} s") from None
    except (EOFError, OSError) as error:
        raise PeerLost(f"the connection to the other process ended: {error or type(error).__name__}") from None
    if not isinstance(theirs, bytes) or len(theirs) > MOST_BYTES:
        raise ProtocolError(f"the other process's message is not bytes, or has more than {MOST_BYTES} of them")
    return theirs


def _over_pipe(pipe: Pipe, ours: bytes, timeout: float) -> bytes:
    pipe.send_bytes(ours)
    poll = getattr(pipe, "poll", None)
    if poll is None:
        return pipe.recv_bytes()
    if not poll(timeout):
        raise TimeoutError
    return pipe.recv_bytes(MOST_BYTES)  # what can be polled is of multiprocessing, and takes a limit


def _over_socket(sock: socket.socket, ours: bytes, timeout: float) -> bytes:
    before = sock.gettimeout()
    sock.settimeout(timeout)
    try:
        sock.sendall(_LENGTH.pack(len(ours)) + ours)
        (nbytes,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
        if nbytes > MOST_BYTES:
            raise ProtocolError(f"the other process announces a message of {nbytes} bytes")
        return receive_exactly(sock, nbytes)
    finally:
        sock.settimeout(before)
