"""Edges whose ends need no Python: their functions, called as a program in C++ calls them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tensorwire._native import Memory, async_edges
from tensorwire.device import Device, LoopbackDevice, ShmDevice, TcpDevice, VerbsDevice, connect_peer
from tensorwire.edge.async_edge import AsyncEdges
from tensorwire.edge.async_posts import AsyncPosts
from tensorwire.errors import ArgumentError
from tensorwire.observe import counters
from tensorwire.testing.patience import patient
from tests.harness.fake_nic import fabric as fabric
from tests.harness.fake_nic import ibverbs as ibverbs

pytestmark = pytest.mark.usefixtures("fabric")

_u64, _pointer = ctypes.c_uint64, ctypes.c_void_p
CALL = ctypes.CFUNCTYPE(None, _pointer, ctypes.c_int)
DONE, TIMED_OUT, LOST = range(3)


class Functions(ctypes.Structure):
    """``struct tw_async_edges``."""

    _fields_ = [
        ("version", _u64),
        ("send", ctypes.CFUNCTYPE(None, _pointer, _u64, _pointer, _u64, CALL, _pointer)),
        ("receive", ctypes.CFUNCTYPE(_u64, _pointer, _u64, CALL, _pointer)),
        ("arrives", ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _u64, ctypes.c_double)),
        ("cancel", ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _u64)),
        ("slot", ctypes.CFUNCTYPE(_pointer, _pointer, _u64)),
        ("release", ctypes.CFUNCTYPE(None, _pointer, _u64)),
        ("copied", ctypes.CFUNCTYPE(None, _u64)),
        ("reason", ctypes.CFUNCTYPE(None, _pointer, ctypes.c_char_p, _u64)),
    ]


functions = Functions.from_address(async_edges())
assert functions.version == 2


class Outcome:
    """Of one call."""

    def __init__(self) -> None:
        self.value: int | None = None
        self._there = threading.Event()
        self.call = CALL(self._take)

    def _take(self, _: Any, outcome: int) -> None:
        self.value = outcome
        self._there.set()

    def wait(self) -> int | None:
        assert self._there.wait(patient(30.0))
        return self.value


class Pair:
    """Two devices of one kind, and the ends of an edge between them."""

    def __init__(
        self, kind: type[Device], nbytes: int, depth: int, seconds: float, lends: Memory | None = None
    ) -> None:
        self.devices = kind(), kind()
        self.nbytes = nbytes
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

    def send(self, step: int, data: bytes) -> Outcome:
        outcome = Outcome()
        outcome.kept = ctypes.create_string_buffer(data, len(data))  # type: ignore[attr-defined]
        return self.send_from(step, ctypes.addressof(outcome.kept), outcome)  # type: ignore[attr-defined]

    def send_from(self, step: int, address: int, outcome: Outcome) -> Outcome:
        functions.send(self.producer, step, address, self.nbytes, outcome.call, None)
        return outcome

    def receive(self, step: int) -> tuple[Outcome, int]:
        outcome = Outcome()
        return outcome, functions.receive(self.consumer, step, outcome.call, None)

    def taken(self, step: int) -> bytes:
        data = ctypes.string_at(functions.slot(self.consumer, step), self.nbytes)
        functions.release(self.consumer, step)
        return data


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
    return bytes((step + at) % 256 for at in range(nbytes))


KINDS = [LoopbackDevice, ShmDevice, TcpDevice, VerbsDevice]


@pytest.mark.parametrize("kind", KINDS)
def test_either_end_may_come_first_and_slots_are_used_again(kind: type[Device]) -> None:
    with pair(kind) as ends:
        early = [ends.receive(step)[0] for step in (1, 2)]
        for step in (1, 2):
            assert ends.send(step, data_of(step)).wait() == DONE
        assert [outcome.wait() for outcome in early] == [DONE, DONE]
        assert [ends.taken(step) for step in (1, 2)] == [data_of(1), data_of(2)]
        sent = [ends.send(step, data_of(step)) for step in range(3, 10)]  # more than there are slots
        for step in range(3, 10):
            assert ends.receive(step)[0].wait() == DONE
            assert ends.taken(step) == data_of(step)
        assert [outcome.wait() for outcome in sent] == [DONE] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_steps_may_be_sent_and_released_in_any_order(kind: type[Device]) -> None:
    with pair(kind, depth=3) as ends:
        sent = {step: ends.send(step, data_of(step)) for step in (3, 2, 1)}
        assert [ends.receive(step)[0].wait() for step in (2, 3, 1)] == [DONE] * 3
        assert [outcome.wait() for outcome in sent.values()] == [DONE] * 3
        later = ends.send(4, data_of(4))
        assert [ends.taken(step) for step in (3, 2)] == [data_of(3), data_of(2)]
        assert later.value is None  # the slot of step 1 is still in use
        assert ends.taken(1) == data_of(1)
        assert later.wait() == DONE
        assert ends.receive(4)[0].wait() == DONE
        assert ends.taken(4) == data_of(4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_may_look_whether_a_step_has_arrived(kind: type[Device]) -> None:
    with pair(kind) as ends:
        assert functions.arrives(ends.consumer, 1, 0.0) == 0
        assert functions.arrives(ends.consumer, 1, 0.001) == 0
        sender = threading.Thread(target=lambda: ends.send(1, data_of(1)).wait())
        sender.start()
        assert functions.arrives(ends.consumer, 1, patient(30.0)) == 1
        sender.join()
        assert ends.receive(1)[0].wait() == DONE
        assert functions.arrives(ends.consumer, 1, 0.0) == 1
        assert ends.taken(1) == data_of(1)
        assert functions.arrives(ends.consumer, 2, 0.0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_is_cancelled_or_ends_in_time_or_with_the_edge(kind: type[Device]) -> None:
    with pair(kind, seconds=0.5) as ends:
        outcome, ticket = ends.receive(1)
        assert functions.cancel(ends.consumer, ticket) == 1
        assert functions.cancel(ends.consumer, ticket) == 0
        assert ends.receive(1)[0].wait() == TIMED_OUT
        sent = [ends.send(step, data_of(step)) for step in (1, 2, 3)]
        assert [each.wait() for each in sent] == [DONE, DONE, TIMED_OUT]
        assert ends.send(4, data_of(4)).wait() == TIMED_OUT  # that of step 3 never comes
        waiting, _ = ends.receive(9)
        ends.edges[1].close()
        assert waiting.wait() in (LOST, TIMED_OUT)
        assert ends.receive(9)[0].wait() == LOST
        assert outcome.value is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_predecessors_never_come_ends_in_time(kind: type[Device]) -> None:
    with pair(kind, seconds=0.5) as ends:
        early = [ends.send(step, data_of(step)) for step in (3, 2)]
        assert [each.wait() for each in early] == [TIMED_OUT] * 2
        assert ends.send(1, data_of(1)).wait() == TIMED_OUT


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_of_an_early_step_ends_when_it_is_sent(kind: type[Device]) -> None:
    with pair(kind, depth=4, seconds=0.5) as ends:
        early = [ends.send(step, data_of(step)) for step in (3, 2, 1)]
        assert [each.wait() for each in early] == [DONE] * 3
        assert ends.receive(9)[0].wait() == TIMED_OUT  # so that as much time has passed
        assert ends.send(4, data_of(4)).wait() == DONE


@pytest.mark.parametrize("kind", [ShmDevice, TcpDevice, VerbsDevice])
def test_the_loss_of_the_peer_ends_what_waits(kind: type[Device]) -> None:
    with pair(kind, seconds=600.0) as ends:
        waiting, _ = ends.receive(1)
        ends.devices[0].close()
        assert waiting.wait() == LOST
        text = ctypes.create_string_buffer(200)
        functions.reason(ends.consumer, text, len(text))
        assert text.value


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_lent_memory_is_read_there_and_kept_until_it_is_released(kind: type[Device]) -> None:
    nbytes, memory = 300 << 10, Memory.allocate(4 << 20, reserve=False)
    with pair(kind, nbytes=nbytes, lends=memory) as ends:
        maps = ends.devices[0].capabilities.maps
        view, at = memoryview(memory), 12345
        view[at : at + nbytes] = data_of(1, nbytes)
        before = counters.snapshot()
        lent = ends.send_from(1, memory.address + at, Outcome())
        assert ends.receive(1)[0].wait() == DONE
        assert counters.since(before).copies == (0 if maps else 1)
        assert lent.value == (None if maps else DONE)
        other = ends.send(2, data_of(2, nbytes))  # which lies elsewhere
        assert ends.receive(2)[0].wait() == DONE
        assert [ends.taken(step) for step in (1, 2)] == [data_of(1, nbytes), data_of(2, nbytes)]
        assert [lent.wait(), other.wait()] == [DONE, DONE]


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
