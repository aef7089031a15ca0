"""State on its way: what is sent arrives, in parts of bounded size; nothing else is believed; nobody waits forever."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tensorwire.device import Channel, Device, LoopbackDevice, RemoteRegion, ShmDevice, TcpDevice
from tensorwire.errors import DeviceError, ProtocolError, WaitTimeout
from tensorwire.store import state_transfer
from tensorwire.store.state_transfer import Entry, Item, StateReceiver, StateSender
from tensorwire.testing.patience import patient

SECONDS = patient(30.0)


@pytest.fixture(params=[LoopbackDevice, ShmDevice, TcpDevice])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    """A channel in each direction between two devices."""
    with request.param() as one, request.param() as other:
        yield one.connect(other.address), other.connect(one.address)


def items(sizes: list[int]) -> list[Item]:
    generator = random.Random(5)
    made = []
    for i, n in enumerate(sizes):
        dtype = ("float32", "bfloat16", "float64")[i % 3]
        nbytes = n * {"float32": 4, "bfloat16": 2, "float64": 8}[dtype]
        made.append((Entry(i, f"key {i}", dtype, (2, n), True, n, 2 * n), memoryview(generator.randbytes(nbytes))))
    return made


def send(channel: Channel, endpoint: bytes, what: list[Item]) -> threading.Thread:
    """In a thread, as servers do; whatever it meets is what the receiver's side is tested by."""

    def run() -> None:
        with StateSender(channel, endpoint) as sender:
            try:
                sender.send(what)
            except DeviceError:
                pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("sizes", [[], [1], [5, 0, 7], [1000] * 30, [40_000, 3, 100_001, 17]])
def test_what_is_sent_arrives(pair: tuple[Channel, Channel], sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "PART_BYTES", 64 << 10)
    there, back = pair
    what = items(sizes)
    found: dict[int, bytearray] = {}
    with StateReceiver(back) as receiver:
        thread = send(there, receiver.endpoint, what)
        for entry, data in receiver.receive(SECONDS):
            original, _ = what[entry.tensor]
            mine = found.setdefault(entry.tensor, bytearray())
            assert entry.start == original.start + len(mine) // (original.nbytes // max(1, sizes[entry.tensor]))
            assert (entry.key, entry.dtype, entry.shape) == (original.key, original.dtype, original.shape)
            assert data.nbytes == entry.nbytes <= 64 << 10
            mine += data
        thread.join(SECONDS)
    assert not thread.is_alive()
    assert found == {e.tensor: bytearray(data) for e, data in what if data.nbytes}


@pytest.mark.parametrize("taken", [0, 1])
def test_a_receiver_that_gives_up_frees_the_sender(
    pair: tuple[Channel, Channel], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_transfer, "PART_BYTES", 64 << 10)
    there, back = pair
    receiver = StateReceiver(back)
    thread = send(there, receiver.endpoint, items([100_000]))
    receiver._edge.receive(1, SECONDS)  # the sender now waits for its credit, or will
    for _ in zip(range(taken), receiver.receive(SECONDS), strict=False):
        pass
    receiver.close()
    thread.join(SECONDS)  # far less than CREDIT_SECONDS
    assert not thread.is_alive()


def test_a_sender_that_never_comes(pair: tuple[Channel, Channel]) -> None:
    with StateReceiver(pair[1]) as receiver, pytest.raises(WaitTimeout):
        next(receiver.receive(0.01))


def test_memory_of_another_kind_is_refused(pair: tuple[Channel, Channel]) -> None:
    there, back = pair
    with back.device.allocate(4096) as small, pytest.raises(ProtocolError):
        StateSender(there, small.remote("write").pack())


def part(device: Device) -> bytearray:
    """A good one."""
    with device.allocate(4096) as credit:
        entry = Entry(0, "key", "float32", (4,), True, 0, 4)
        at = state_transfer._HEAD.size
        table = msgspec.msgpack.encode([(at, entry)])
        head = state_transfer._HEAD.pack(b"TWST", 1, True, len(table), at + 16, credit.remote("write").pack())
        return bytearray(head + bytes(16) + table + bytes(64))


def change(entry: tuple[Any, ...], *, offset: int = state_transfer._HEAD.size) -> Any:
    return msgspec.msgpack.encode([(offset, entry)])


TABLES: list[bytes] = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode({"a": 1}),
    change((0, "key", "float32", (4,), True, 0, 5)),
    change((0, "key", "float32", (4,), True, 3, 1)),
    change((0, "key", "float32", (4,), True, -1, 1)),
    change((0, "key", "object", (4,), True, 0, 4)),
    change((0, "key", "float64", (4,), True, 0, 4)),
    change((0, "key", "float32", (4,), True, 0, 4), offset=0),
    change((0, "key", "float32", (4,), True, 0, 4), offset=2**40),
    change((0, "key", "float32", (4,), "yes", 0, 4)),
]


def test_malformed_parts_are_refused() -> None:
    with LoopbackDevice() as device:
        good = part(device)
        assert len(state_transfer._unpack(memoryview(good))[2]) == 1
        at = state_transfer._HEAD.size + 16
        for table in TABLES:
            bad = good[:at] + table + bytes(64)
            struct.pack_into("<I", bad, 8, len(table))
            with pytest.raises(ProtocolError):
                state_transfer._unpack(memoryview(bad))
        for position, value in [(0, 0), (4, 9), (8, 2**31), (12, 2**40), (12, 1)]:
            bad = bytearray(good)
            struct.pack_into("<I" if position < 12 else "<Q", bad, position, value)
            with pytest.raises(ProtocolError):
                state_transfer._unpack(memoryview(bad))


def test_a_door_is_32_bytes_of_capability() -> None:
    with LoopbackDevice() as device, device.connect(device.address) as channel, StateReceiver(channel) as receiver:
        assert RemoteRegion.unpack(receiver.endpoint).access == "write"
