"""How servers find the snapshot buffers of a store, which the publisher's process has made.

The publisher is the server of shard 0. It hands the buffers' descriptors over a socket in the job's folder, which only
this user enters.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
from pathlib import Path

import msgspec

from tensorwire.control import Member
from tensorwire.control.locality import Locality
from tensorwire.control.names import member_name
from tensorwire.errors import AlreadyPublished, ProtocolError, WaitTimeout
from tensorwire.messages import decode_message

PUBLISHER = member_name("server", 0)
_SECONDS = 600.0  # that the other side may take
_ONE = b"\0"


class Announcement(msgspec.Struct, frozen=True):
    """What a publisher tells everybody in the job: its store, where it is, its folder, and where servers get
    descriptors."""

    store: str
    where: Locality
    folder: str
    socket: str


def announce(member: Member, announcement: Announcement) -> None:
    """Tells it: servers under the name of the store, and readers under the next number."""
    packed = msgspec.msgpack.encode(announcement)
    member.client.publish(f"{announcement.store}/versions", packed)
    for number in itertools.count():
        with contextlib.suppress(AlreadyPublished):
            member.client.publish(_numbered(number), packed)
            return


def _numbered(number: int) -> str:
    return f"versions/{number}"


def find_numbered(member: Member, number: int, timeout: float) -> Announcement:
    """What the job's publisher of that number tells; waits for it. Raises `WaitTimeout`, or as `find_announcement`."""
    return decode_message(member.client.lookup(_numbered(number), timeout, owner=PUBLISHER), Announcement)


def find_announcement(member: Member, store: str, timeout: float = _SECONDS) -> Announcement:
    """What the publisher of ``store`` tells; waits for it. Raises `WaitTimeout`, `ProtocolError` or `JobEnded`."""
    packed = member.client.lookup(f"{store}/versions", timeout, owner=PUBLISHER)
    return decode_message(packed, Announcement)


class Giver:
    """Gives ``descriptors`` to whoever asks at ``path``; the caller closes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._listener.settimeout(_SECONDS)

    def give(self, descriptors: list[int]) -> None:
        """To the next that asks. Raises `WaitTimeout` where none does, or `OSError` once this was closed."""
        try:
            asker, _ = self._listener.accept()
        except TimeoutError:
            raise WaitTimeout("a server did not ask for the snapshot buffers in time") from None
        with asker:
            rights = array.array("i", descriptors)
            asker.sendmsg([_ONE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes one that waits
        self._listener.close()
        self._path.unlink(missing_ok=True)


def ask(path: str, count: int) -> list[int]:
    """The ``count`` descriptors that a `Giver` at ``path`` has. Raises `ProtocolError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_SECONDS)
        sock.connect(path)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, count, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) != count:
        for fd in descriptors:
            os.close(fd)
        raise ProtocolError(f"{len(descriptors)} of {count} snapshot buffers were handed over")
    return list(descriptors)
