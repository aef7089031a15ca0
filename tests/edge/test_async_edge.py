"""Edges whose ends need no Python: their functions, called as a program in C++ calls them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tensorwire._native import Memory
from tensorwire.device import Device, LoopbackDevice, ShmDevice, TcpDevice, VerbsDevice, connect_peer
from tensorwire.edge.async_edge import AsyncEdges
from tensorwire.edge.async_posts import AsyncPosts
from tensorwire.errors import ArgumentError
from tensorwire.observe import counters
from tensorwire.testing.patience import patient
from tests.edge.async_functions import (
    ALLOCATE,
    DONE,
    LOST,
    REFUSED,
    TIMED_OUT,
    Header,
    Outcome,
    functions,
    header_of,
)
from tests.harness.fake_nic import fabric as fabric
from tests.harness.fake_nic import ibverbs as ibverbs

pytestmark = pytest.mark.usefixtures("fabric")


class Taken(Outcome):
    """A tensor that is being taken: it may stay where it lies, or is copied, or ``refuses``."""

    def __init__(self, stays: bool = False, refuses: bool = False) -> None:
        super().__init__()
        self.step = self.slot = 0
        self.whole, self._stays, self._refuses = False, stays, refuses
        self.allocate = ALLOCATE(self._allocate)

    def _allocate(self, _: Any, header: Any, whole: int | None, slot: int) -> int | None:
        self.step, self.slot, self.whole = header[0].step, slot, whole is not None
        self.nbytes = header[0].nbytes
        if self._refuses:
            return None
        self._memory = ctypes.create_string_buffer(self.nbytes + 1)
        self.address = whole if whole and self._stays else ctypes.addressof(self._memory)
        return self.address

    @property
    def data(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)


class Pair:
    """Two devices of one kind, and the ends of an edge between them."""

    def __init__(
        self, kind: type[Device], nbytes: int, depth: int, seconds: float, lends: Memory | None = None
    ) -> None:
        self.devices = kind(), kind()
        pipes = multiprocessing.Pipe()
        ends: dict[str, Any] = {}

        def connect(side: Any, device: Device, pipe: Any) -> None:
            channel = connect_peer(device, pipe)
            edges = AsyncEdges(device, seconds, lends if side == "producer" else None)
            end = edges.connect(channel, pipe, side, carries="bytes", nbytes=nbytes, depth=depth, timeout=patient(30.0))
            ends[side] = edges, end, channel

        threads = [
            threading.Thread(target=connect, args=each)
            for each in zip(("producer", "consumer"), self.devices, pipes, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.edges = [ends["producer"][0], ends["consumer"][0]]
        self._kept = ends
        self.producer, self.consumer = ends["producer"][1].address, ends["consumer"][1].address

    def send(self, step: int, data: bytes, **fields: Any) -> Outcome:
        outcome = Outcome()
        outcome.kept = ctypes.create_string_buffer(data, len(data) or 1)  # type: ignore[attr-defined]
        address = ctypes.addressof(outcome.kept)  # type: ignore[attr-defined]
        return self.send_from(header_of(step, len(data), **fields), address, outcome)

    def send_from(self, header: Header, address: int, outcome: Outcome) -> Outcome:
        functions.send(self.producer, header, address, outcome.call, None)
        return outcome

    def take(self, taken: Taken | None = None) -> Taken:
        taken = taken or Taken()
        functions.take(self.consumer, taken.allocate, taken.call, None)
        return taken

    def reason(self) -> str:
        text = ctypes.create_string_buffer(200)
        functions.reason(self.consumer, text, len(text))
        return text.value.decode()


@contextlib.contextmanager
def pair(
    kind: type[Device], nbytes: int = 100, depth: int = 2, seconds: float = 60.0, lends: Memory | None = None
) -> Iterator[Pair]:
    made = Pair(kind, nbytes, depth, patient(seconds), lends)
    try:
        yield made
    finally:
        for edges in made.edges:
            edges.close()
        for device in made.devices:
            device.close()


def data_of(step: int, nbytes: int = 100) -> bytes:
    return (bytes(range(step, step + 199)) * (nbytes // 199 + 1))[:nbytes]


KINDS = [LoopbackDevice, ShmDevice, TcpDevice, VerbsDevice]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_size_arrive_in_the_order_in_which_they_are_sent(kind: type[Device]) -> None:
    """Either end comes first; what fills more than a slot comes in pieces, and more are sent than there are slots."""
    sizes = [0, 1, 99, 100, 101, 100 + 355, 100 + 356, 100 + 357, 5000, 0, 7]  # a slot has 356 bytes
    with pair(kind) as ends:
        for sizes_now, early in ((sizes, True), (sizes, False)):
            taken = ends.take() if early else None
            before = counters.snapshot()
            sent = [ends.send(step, data_of(step, nbytes)) for step, nbytes in enumerate(sizes_now, 1)]
            for step, nbytes in enumerate(sizes_now, 1):
                taken = taken or ends.take()
                assert taken.wait() == DONE
                assert (taken.step, taken.data, taken.whole) == (step, data_of(step, nbytes), nbytes <= 100)
                taken = None
            assert [outcome.wait() for outcome in sent] == [DONE] * len(sizes)
            assert counters.since(before).copied_bytes == 2 * sum(sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_in_its_slot_may_be_released_in_any_order(kind: type[Device]) -> None:
    with pair(kind, depth=3) as ends:
        sent = [ends.send(step, data_of(step)) for step in (7, 5, 6)]
        taken = [Taken(stays=True) for _ in range(3)]
        assert [ends.take(each).wait() for each in taken] == [DONE] * 3
        assert [outcome.wait() for outcome in sent] == [DONE] * 3
        later = ends.send(8, data_of(8))
        for each, step in zip(taken, (7, 5, 6), strict=True):
            assert (each.step, each.data) == (step, data_of(step))
        for each in (taken[2], taken[1]):
            functions.release(ends.consumer, each.slot)
        assert later.value is None  # the first slot is still in use
        functions.release(ends.consumer, taken[0].slot)
        assert later.wait() == DONE
        last = ends.take()
        assert (last.wait(), last.data) == (DONE, data_of(8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_may_look_whether_something_has_arrived(kind: type[Device]) -> None:
    with pair(kind) as ends:
        assert functions.arrives(ends.consumer, 0.0) == 0
        assert functions.arrives(ends.consumer, 0.001) == 0
        sender = threading.Thread(target=lambda: ends.send(1, data_of(1)).wait())
        sender.start()
        assert functions.arrives(ends.consumer, patient(30.0)) == 1
        sender.join()
        assert functions.arrives(ends.consumer, 0.0) == 1
        assert ends.take().wait() == DONE
        assert functions.arrives(ends.consumer, 0.0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_ends_in_time_or_with_the_edge(kind: type[Device]) -> None:
    with pair(kind, seconds=0.5) as ends:
        assert ends.take().wait() == TIMED_OUT
        sent = [ends.send(step, data_of(step)) for step in (1, 2, 3)]
        assert [each.wait() for each in sent] == [DONE, DONE, TIMED_OUT]
        assert ends.send(4, data_of(4)).wait() == TIMED_OUT  # for ever
        assert [ends.take().wait() for _ in range(2)] == [DONE, DONE]
        waiting = ends.take()
        ends.edges[1].close()
        assert waiting.wait() in (LOST, TIMED_OUT)
        assert ends.take().wait() == LOST


def test_a_tensor_whose_pieces_are_late_goes_on_arriving() -> None:
    with pair(VerbsDevice, seconds=0.5) as ends:
        writes, gate = ends.edges[0]._posts._writes, threading.Event()
        write = writes[0]

        def late(signal: int, at: int, nbytes: int) -> object:
            if signal == 2:
                gate.wait(patient(30.0))
            return write(signal, at, nbytes)

        writes[0] = late
        ends.send(1, data_of(1, 400))
        begun = ends.take()
        assert begun.wait() == TIMED_OUT
        gate.set()
        assert ends.take().wait() == DONE
        assert begun.data == data_of(1, 400)


@pytest.mark.parametrize("kind", [ShmDevice, TcpDevice, VerbsDevice])
def test_the_loss_of_the_peer_ends_what_waits(kind: type[Device]) -> None:
    with pair(kind, seconds=600.0) as ends:
        waiting = ends.take()
        ends.devices[0].close()
        assert waiting.wait() == LOST
        assert ends.reason()


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_lent_memory_is_read_there_and_kept_until_it_is_released(kind: type[Device]) -> None:
    """It takes one slot, however large it is."""
    nbytes, memory = 3 << 20, Memory.allocate(4 << 20, reserve=False)
    with pair(kind, nbytes=nbytes if kind in (TcpDevice, VerbsDevice) else 100, lends=memory) as ends:
        maps = ends.devices[0].capabilities.maps
        view, at = memoryview(memory), memory.nbytes - nbytes
        view[at:] = data_of(1, nbytes)
        before = counters.snapshot()
        lent = ends.send_from(header_of(1, nbytes), memory.address + at, Outcome())
        stays = ends.take(Taken(stays=True))
        assert stays.wait() == DONE
        assert counters.since(before).copies == (0 if maps else 1)
        assert lent.value == (None if maps else DONE)
        other = ends.send(2, data_of(2))  # which lies elsewhere
        copy = ends.take()
        assert (copy.wait(), copy.data, stays.data) == (DONE, data_of(2), data_of(1, nbytes))
        functions.release(ends.consumer, stays.slot)
        assert [lent.wait(), other.wait()] == [DONE, DONE]


LIES = {
    "a number with a shape or a payload": {"kind": 77},
    "malformed header: 100 bytes for": {"rank": 2},
    "what is encoded is not bytes": {"kind": 5, "dtype": 2},
    "a tensor with a number": {"value": 1},
    "where nothing is lent": {"region": (2, 0, 255, 255)},
}


@pytest.mark.parametrize("kind", [ShmDevice, TcpDevice])
@pytest.mark.parametrize("why", LIES)
def test_a_peer_that_lies_is_refused(kind: type[Device], why: str) -> None:
    with pair(kind) as ends:
        ends.send(1, data_of(1), **LIES[why])
        for _ in range(2):
            assert ends.take().wait() == REFUSED
            assert why in ends.reason()


def test_what_has_no_memory_is_refused() -> None:
    with pair(LoopbackDevice) as ends:
        ends.send(1, data_of(1))
        assert ends.take(Taken(refuses=True)).wait() == REFUSED


def test_ends_that_differ_are_refused() -> None:
    pipes, devices = multiprocessing.Pipe(), (LoopbackDevice(), LoopbackDevice())
    said: list[str] = []

    def connect(side: Any, number: int, carries: str) -> None:
        device, pipe = devices[number], pipes[number]
        channel = connect_peer(device, pipe)
        try:
            AsyncEdges(device, 1.0).connect(channel, pipe, side, carries=carries, nbytes=8, timeout=patient(30.0))
        except ArgumentError as error:
            said.append(str(error))

    threads = [threading.Thread(target=connect, args=each) for each in (("producer", 0, "a"), ("consumer", 1, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [
        "the two ends differ: carries is 'a' here and 'b' there",
        "the two ends differ: carries is 'b' here and 'a' there",
    ]
    for device in devices:
        device.close()


def test_ends_that_connect_at_once_get_numbers_of_their_own_for_their_writes() -> None:
    posts, count = AsyncPosts(), 64
    together, numbers = threading.Barrier(count), dict[int, int]()

    def add(mine: int) -> None:
        together.wait()
        numbers[mine] = posts.add(lambda step, nbytes: None)

    threads = [threading.Thread(target=add, args=(mine,)) for mine in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    posts.close()
    assert sorted(numbers.values()) == list(range(count))
