"""Large writes over tcp within one machine: their pages go by reference, and nobody sees what became of them later."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import Forked, quick, receive, send

from tensorwire.device import Channel, Region, RemoteRegion, TcpDevice
from tensorwire.errors import PeerLost
from tensorwire.testing.patterns import HEAD, SECONDS, array, pattern

LEAST = 256 << 10  # from here on they do
SIZES = (LEAST - 1, LEAST, LEAST + 1, (1 << 20) + 4095, (5 << 20) + 8)


@pytest.fixture
def devices() -> Iterator[tuple[TcpDevice, TcpDevice]]:
    with TcpDevice() as source, TcpDevice() as target:
        yield source, target


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def check(channel: Channel, source: Region, inbox: Region) -> None:
    """Writes of all sizes from odd places to odd places, all on their way at once."""
    remote, step = inbox.remote(), inbox.load(0)
    offsets = np.cumsum([HEAD, *SIZES]) + np.arange(len(SIZES) + 1) * 13
    for at, nbytes in zip(offsets, SIZES, strict=False):
        step += 1
        array(source)[at + 1 : at + 1 + nbytes] = pattern(step, nbytes)
        channel.write(source.view(at + 1, nbytes), remote.view(at, nbytes), (remote.view(0, 8), step))
    inbox.wait(0, step, SECONDS)
    for number, (at, nbytes) in enumerate(zip(offsets, SIZES, strict=False), step - len(SIZES) + 1):
        assert (array(inbox)[at : at + nbytes] == pattern(number, nbytes)).all(), nbytes


def test_sizes_and_places(devices: tuple[TcpDevice, TcpDevice]) -> None:
    source, target = devices
    before = descriptors()
    with source.allocate(16 << 20) as memory, target.allocate(16 << 20) as inbox:
        own = descriptors()
        with source.connect(target.address) as channel:
            check(channel, memory, inbox)
            assert descriptors() == own + 4  # two sockets, and the pipe
            with source.register(array(memory)[4096:]) as part:
                check(channel, part, inbox)
        while target._engine.connections:
            os.sched_yield()
        assert descriptors() == own
    del memory, inbox, part
    assert descriptors() == before


def test_without_a_descriptor_for_the_pipe(devices: tuple[TcpDevice, TcpDevice]) -> None:
    source, target = devices
    memory, inbox = source.allocate(16 << 20), target.allocate(16 << 20)
    with source.connect(target.address) as channel:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            check(channel, memory, inbox)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        check(channel, memory, inbox)


def serve(pipe: socket.socket) -> None:
    """The target: shows a region, and says what is in it once its only connection is over."""
    with quick("tcp") as device, device.allocate(HEAD + 2 * LEAST) as region:
        assert isinstance(device, TcpDevice)
        send(pipe, (device.address, region.remote().pack()))
        receive(pipe)
        end = time.monotonic() + SECONDS
        while device._engine.connections and time.monotonic() < end:
            os.sched_yield()
        send(pipe, (device._engine.connections, region.load(0)))


@pytest.mark.parametrize("how", ["closed", "device closed", "silent"])
def test_memory_reused_after_the_end_is_never_signalled(how: str) -> None:
    """The target is stopped, a whole payload in its queue; before it goes on, its sender gives up and writes there."""
    with Forked(serve) as peer, quick("tcp") as device:
        address, packed = receive(peer.pipe)
        remote = RemoteRegion.unpack(packed)
        channel = device.connect(address)
        memory = device.allocate(2 * LEAST)
        array(memory)[:] = 1
        channel.write(memory.view(0, 8), remote.view(HEAD, 8)).wait(SECONDS)
        peer.signal(signal.SIGSTOP)
        os.waitpid(peer.pid, os.WUNTRACED)
        written = channel.write(memory.view(), remote.view(HEAD, 2 * LEAST), (remote.view(0, 8), 1))
        if how == "closed":
            channel.close()
        if how == "device closed":
            device.close()
        with pytest.raises(PeerLost):
            written.wait(SECONDS)
        array(memory)[:] = 2
        peer.signal(signal.SIGCONT)
        send(peer.pipe, "the end")
        assert receive(peer.pipe) == (0, 0)
