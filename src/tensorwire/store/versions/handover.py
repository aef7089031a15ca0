"""How servers, and readers on their machine, find the snapshot buffers of a store, which the publisher has made.

The publisher is the server of shard 0. It hands the buffers' descriptors over a socket in the job's folder, which only
this user enters.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import threading
from pathlib import Path

import msgspec

from tensorwire.control import Member
from tensorwire.control.locality import Locality
from tensorwire.control.names import member_name
from tensorwire.errors import AlreadyPublished, ProtocolError
from tensorwire.messages import decode_message

PUBLISHER = member_name("server", 0)
_SECONDS = 600.0  # that the other side may take
_ONE = b"\0"


class Announcement(msgspec.Struct, frozen=True):
    """What a publisher tells everybody in the job: its store, where it is, its folder, and where the machine's
    processes get descriptors; and the folder of the job's checkpoints, if it has one."""

    store: str
    where: Locality
    folder: str
    socket: str
    checkpoints: str = ""


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
    """Gives the ``descriptors`` of a store to all who ask at ``path``, in a thread, until ``close()``.

    All have the open file descriptions that this process has: the kernel counts them as one user of the files.
    """

    def __init__(self, store: str, path: Path, descriptors: list[int]) -> None:
        self._path, self._rights = path, array.array("i", descriptors)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._give, name=f"{store} descriptors", daemon=True)
        self._thread.start()

    def _give(self) -> None:
        while True:
            try:
                asker, _ = self._listener.accept()
            except OSError:
                return
            with asker, contextlib.suppress(OSError):
                asker.sendmsg([_ONE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self._rights)])

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
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
