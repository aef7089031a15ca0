"""The page of words that tells peers of a death: what it says, who may change it, and what is refused as one."""

from __future__ import annotations

import array as arrays
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.harness.forked import Forked, receive, send

from tensorwire._native import DeathNotifier, Liveness, Memory
from tensorwire.device import ShmDevice, handshake
from tensorwire.testing.fixtures import Pair
from tensorwire.testing.patterns import SECONDS
from tensorwire.testing.spec import DeviceSpec

InThread = Callable[[Callable[[], object]], threading.Thread]
NEVER = 1e5
MANY = 200  # more than one system call can wait for


def wakes() -> bool:
    """Whether the kernel has futex_waitv (Linux 5.16); without it words are looked at on the beat only."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(449, None, 0, 0, None, 0) == -1 and ctypes.get_errno() == errno.EINVAL)


@pytest.fixture(autouse=True, scope="module")
def _kernel() -> None:
    if not wakes():
        pytest.skip("needs Linux 5.16, which wakes who waits for several words")


def wait_for(liveness: Liveness) -> str:
    word = Memory.wrap(bytearray(8))
    word.bind(liveness)
    assert word.wait(0, 1, SECONDS) == 2
    return liveness.reason


def shows_words(pipe: socket.socket, count: int) -> None:
    """A peer with that many words, until it is told to go; its page goes to the test."""
    death_notifier = DeathNotifier(NEVER, NEVER)
    words = [death_notifier.enter(Liveness()) for _ in range(count)]
    socket.send_fds(pipe, [b"!"], [death_notifier.fd])
    send(pipe, words)
    receive(pipe)
    os._exit(0)


def page_of(peer: Forked) -> tuple[int, list[int]]:
    _, fds, _, _ = socket.recv_fds(peer.pipe, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return fds[0], receive(peer.pipe)


@pytest.fixture
def death_notifier() -> Iterator[DeathNotifier]:
    made = DeathNotifier(NEVER, NEVER)
    yield made
    made.close()
    made.close()


def test_the_kernel_marks_every_word_of_the_dead(death_notifier: DeathNotifier) -> None:
    """No socket says anything here, and nobody beats: the words alone do it."""
    with Forked(lambda pipe: shows_words(pipe, 100)) as peer:
        fd, words = page_of(peer)
        lives = [Liveness() for _ in words]
        for word, liveness in zip(words, lives, strict=True):
            death_notifier.watch(death_notifier.enter(liveness), fd, word, NEVER)
        os.close(fd)
        assert not any(liveness.lost for liveness in lives)
        peer.kill()
        assert {wait_for(liveness) for liveness in lives} == {"its process died"}


def test_words_that_one_wait_cannot_hold_are_looked_at_on_the_beat() -> None:
    death_notifier = DeathNotifier(0.05, NEVER)
    with Forked(lambda pipe: shows_words(pipe, MANY)) as peer:
        fd, words = page_of(peer)
        lives = [Liveness() for _ in words]
        for word, liveness in zip(words, lives, strict=True):
            death_notifier.watch(death_notifier.enter(liveness), fd, word, NEVER)
        os.close(fd)
        peer.kill()
        assert {wait_for(liveness) for liveness in lives} == {"its process died"}
    death_notifier.close()


def test_an_exit_without_a_close_is_a_death(death_notifier: DeathNotifier) -> None:
    with Forked(lambda pipe: shows_words(pipe, 1)) as peer:
        fd, words = page_of(peer)
        liveness = Liveness()
        death_notifier.watch(death_notifier.enter(liveness), fd, words[0], NEVER)
        os.close(fd)
        send(peer.pipe, "leave")
        assert wait_for(liveness) == "its process died"


def test_a_word_that_was_given_up_is_the_end_of_its_connection(death_notifier: DeathNotifier) -> None:
    other = DeathNotifier(NEVER, NEVER)
    first, second, gone = Liveness(), Liveness(), Liveness()
    word, kept = other.enter(Liveness()), other.enter(Liveness())
    death_notifier.watch(death_notifier.enter(second), other.fd, kept, NEVER)
    mine = death_notifier.enter(gone)
    death_notifier.watch(mine, other.fd, word, NEVER)
    death_notifier.watch(death_notifier.enter(first), other.fd, word, NEVER)
    death_notifier.leave(mine)  # not watched any more
    other.leave(word)
    assert wait_for(first) == "it closed the connection"
    assert not second.lost
    assert not gone.lost
    assert other.enter(Liveness()) == word  # it is used again
    other.close()


def test_there_are_so_many_words(death_notifier: DeathNotifier) -> None:
    liveness = Liveness()
    words = [death_notifier.enter(liveness) for _ in range(1999)]
    assert sorted(words) == list(range(1, 2000))
    assert death_notifier.enter(liveness) == 0
    death_notifier.leave(77)
    assert death_notifier.enter(liveness) == 77


def test_a_peer_cannot_write_the_page(death_notifier: DeathNotifier) -> None:
    size = os.fstat(death_notifier.fd).st_size
    again = os.open(f"/proc/self/fd/{death_notifier.fd}", os.O_RDWR)
    try:
        for fd in (death_notifier.fd, again):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
    finally:
        os.close(again)


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("strange", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_is_no_page_is_refused(death_notifier: DeathNotifier) -> None:
    size = os.fstat(death_notifier.fd).st_size
    liveness = Liveness()
    word = death_notifier.enter(liveness)
    for fd in (memfd(size, 0), memfd(size // 2, fcntl.F_SEAL_SHRINK), os.open("/dev/zero", os.O_RDONLY)):
        with pytest.raises(OSError):
            death_notifier.watch(word, fd, 1, 1.0)
        os.close(fd)
    for number, beat in ((0, 1.0), (2000, 1.0), (2**32 - 1, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(OSError):
            death_notifier.watch(word, death_notifier.fd, number, beat)
    with pytest.raises(OSError):
        death_notifier.watch(word + 1, death_notifier.fd, 1, 1.0)
    assert not liveness.lost
    empty = memfd(size, fcntl.F_SEAL_SHRINK)  # a page without words: whoever sent it counts as gone
    death_notifier.watch(word, empty, 1, 1.0)
    os.close(empty)
    assert wait_for(liveness) == "it closed the connection"


@pytest.mark.parametrize("spec", [DeviceSpec("tensorwire.device:ShmDevice")], ids=["shm"])
def test_a_page_that_is_none_ends_that_connection_only(pair: Pair, in_thread: InThread) -> None:
    assert isinstance(pair.target, ShmDevice)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SECONDS)
        sock.connect(b"\0tensorwire-" + pair.target._name.hex().encode())
        handshake.initiate(sock, pair.target._token, b"shm")
        fd = memfd(4096, fcntl.F_SEAL_SHRINK)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, arrays.array("i", [fd, fd, fd]))]
        sock.sendmsg([struct.pack("<II", 1, 1000)], ancillary)
        os.close(fd)
        while sock.recv(64):
            pass
    region = pair.target.allocate(8)
    pair.channel.signal(region.remote().view(), 1).wait(SECONDS)
    region.wait(0, 1, SECONDS)


def test_a_forked_child_touches_nothing_of_it(death_notifier: DeathNotifier) -> None:
    liveness = Liveness()
    word = death_notifier.enter(liveness)

    def touch(pipe: socket.socket) -> None:
        told = []
        for attempt in (
            lambda: death_notifier.enter(liveness),
            lambda: death_notifier.watch(word, death_notifier.fd, 1, 1.0),
        ):
            try:
                attempt()
            except OSError as error:
                told.append(error.args[1])
        death_notifier.leave(word)
        death_notifier.close()
        own = DeathNotifier(NEVER, NEVER)
        told.append(str(own.enter(Liveness())))
        own.close()
        send(pipe, told)

    other = DeathNotifier(NEVER, NEVER)
    other.watch(other.enter(liveness), death_notifier.fd, word, NEVER)
    with Forked(touch) as child:
        told = receive(child.pipe)
    assert all("parent process" in text for text in told[:2])
    assert told[2:] == ["1"]
    assert not liveness.lost
    death_notifier.leave(word)
    other.close()


def test_a_closed_death_notifier_watches_nothing() -> None:
    death_notifier = DeathNotifier(1.0, 2.0)
    death_notifier.close()
    with pytest.raises(OSError):
        death_notifier.enter(Liveness())
    death_notifier.leave(1)
