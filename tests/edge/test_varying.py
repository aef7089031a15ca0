"""Bounded and dynamic edges: what holds for both, on every device."""

from __future__ import annotations

import gc
import math
import queue
import random
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.edge import BoundedProducer, Received, Spec
from tensorwire.edge.header import HEADER, pack_number
from tensorwire.edge.words import PeerMemory
from tensorwire.errors import ArgumentError, PeerLost, ProtocolError, RegionClosed, RemoteAccessError, WaitTimeout
from tensorwire.observe import counters
from tensorwire.observe.counting import pickles_counted
from tests.edge.edges import Pair, lost_while
from tests.edge.test_tensors import NUMPY, PROPERTY, loopback, views
from tests.edge.varying import (
    EDGES,
    SECONDS,
    array_of,
    arrived,
    bank_of,
    born,
    copied,
    group_of,
    incoming,
    make,
    outgoing,
)

__all__ = ["loopback"]  # a fixture

BOUND = 1 << 16


@pytest.fixture(params=EDGES)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of edge."""
    name: str = request.param
    return name


def small(producer: Any, step: int, timeout: float = SECONDS) -> None:
    """Sends the step's number, as a tensor."""
    born(
        producer,
        step,
        step.to_bytes(8, "little", signed=True) if abs(step) < 2**63 else b"",
        Spec((), "int64"),
        timeout,
    )


def value(consumer: Any, step: int) -> int:
    """The number that was received; its memory goes back."""
    with consumer.receive(step, SECONDS) as received:
        return int(received.numpy())


def random_array(source: random.Random) -> np.ndarray[Any, Any]:
    """Of any rank up to 8, often empty, of 1 element, or of an odd number of bytes."""
    dtype = source.choice(NUMPY)
    shape = [source.choice((0, 1, 1, 2, 3, 5)) for _ in range(source.randrange(9))]
    count = math.prod(shape)
    raw = np.random.default_rng(source.randrange(2**32)).integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8)
    return (raw % 2 if dtype == "bool" else raw).view(dtype).reshape(shape)


def test_another_shape_every_step(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 2, 5**8 * 16)
    source, ranks, empty = random.Random(3), set(), 0
    for step in range(1, 301):
        array = random_array(source)
        ranks.add(array.ndim)
        empty += array.size == 0
        if step % 2:
            born(producer, step, array.tobytes(), Spec.of(array))
        else:
            copied(producer, step, array)
        received = consumer.receive(step, SECONDS)
        assert received.spec == Spec.of(array)
        assert bytes(received.memory) == array.tobytes()
    assert ranks == set(range(9))
    assert empty > 20


def test_large_and_small_in_turn(pair: Pair, kind: str) -> None:
    """Long enough to let go of the interpreter's lock, and for tcp to lend pages."""
    producer, consumer = make(kind, pair, 2, 3_000_001)
    for step, nbytes in enumerate((3_000_001, 1, 0, 70_000, 2_999_999, 8), 1):
        content = random.Random(step).randbytes(nbytes)
        born(producer, step, content, Spec((nbytes,), "uint8"))
        assert bytes(consumer.receive(step, SECONDS).memory) == content


@PROPERTY
@given(array=views(), kind=st.sampled_from(EDGES))
def test_any_view_arrives_as_it_is(loopback: Pair, array: np.ndarray[Any, Any], kind: str) -> None:
    producer, consumer = make(kind, loopback, 1, BOUND)
    copied(producer, 1, array)
    received = consumer.receive(1, SECONDS)
    assert (received.spec, bytes(received.memory)) == (Spec.of(array), array.tobytes())


def test_the_producer_may_come_first(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 3, BOUND)
    for step in (1, 2, 3):
        born(producer, step, bytes([step]) * step, Spec((step,), "uint8"))
    for _ in range(2):
        with pytest.raises(WaitTimeout):
            small(producer, 4, 0.01)  # no credit yet
    for step in (1, 2, 3):
        assert bytes(consumer.receive(step, SECONDS).memory) == bytes([step]) * step
    small(producer, 4)
    assert value(consumer, 4) == 4


def test_the_consumer_may_come_first(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 1, BOUND)
    for _ in range(2):
        with pytest.raises(WaitTimeout):
            consumer.receive(1, 0.01)
    assert not consumer.ready()
    received: list[bytes] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        received.append(bytes(consumer.receive(1, SECONDS).memory))

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    born(producer, 1, b"hello", Spec((5,), "uint8"))
    thread.join(SECONDS)
    assert received == [b"hello"]


def test_steady_state_costs_nothing(pair: Pair, kind: str) -> None:
    """One message there; back, a credit, and for a dynamic edge that is not mapped the read in front of it."""
    producer, consumer = make(kind, pair, 2, BOUND)
    mapped = pair.producer.capabilities.maps
    content, steps = b"x" * 1000, 50
    step = 0
    for _ in range(3):
        born(producer, step := step + 1, content, Spec((1000,), "uint8"))
        consumer.receive(step, SECONDS)
    with pickles_counted():
        before = counters.snapshot()
        for i in range(steps):
            born(producer, step := step + 1, content[i:], Spec((1000 - i,), "uint8"))
            consumer.receive(step, SECONDS)
        done = counters.since(before)
    assert (done.copies, done.copied_bytes, done.rpcs, done.registrations, done.pickles) == (0, 0, 0, 0, 0)
    assert done.messages == steps * (3 if kind == "dynamic" and not mapped else 2)
    payload = sum(1000 - i for i in range(steps))
    if mapped:
        assert (done.mapped_bytes, done.bytes) == (payload + steps * HEADER, 0)
    else:
        assert (done.mapped_bytes, done.bytes) == (0, payload + steps * HEADER)


def send_until_full(pair: Pair, kind: str, depth: int) -> tuple[Any, Any, list[Received]]:
    """An edge all of whose slots are the consumer's, and what it received."""
    producer, consumer = make(kind, pair, depth, BOUND)
    kept = []
    for step in range(1, depth + 1):
        born(producer, step, bytes([step]) * 8, Spec((8,), "uint8"))
        kept.append(consumer.receive(step, SECONDS))
    return producer, consumer, kept


def only_mapped_waits(pair: Pair, kind: str) -> bool:
    """Whether the producer's memory, or the consumer's slot, is the consumer's until it lets go."""
    return kind == "bounded" or pair.producer.capabilities.maps


def test_memory_comes_back_in_any_order(pair: Pair, kind: str) -> None:
    producer, consumer, kept = send_until_full(pair, kind, 4)
    if only_mapped_waits(pair, kind):
        with pytest.raises(WaitTimeout):
            small(producer, 5, 0.01)
    held = {received.memory[0]: received for received in kept}
    del kept
    source, step = random.Random(7), 4
    for _ in range(100):
        for _ in range(source.randrange(1, 4)):
            if held:
                held.pop(source.choice(sorted(held)))
        while len(held) < 4:
            step += 1
            born(producer, step, bytes([step % 251]) * 8, Spec((8,), "uint8"))
            held[1000 + step] = consumer.receive(step, SECONDS)
        for number in held:  # not their values: a variable that is left over keeps its tensor
            assert set(held[number].memory) == {(number - 1000) % 251 if number > 1000 else number}


def test_a_wait_in_vain_raises_the_cause(pair: Pair, kind: str) -> None:
    producer, consumer, kept = send_until_full(pair, kind, 2)
    if only_mapped_waits(pair, kind):
        with pytest.raises(WaitTimeout, match=r"gave back nothing in time .* or does it keep what it received"):
            small(producer, 3, 0.01)
        with pytest.raises(WaitTimeout, match="nothing can arrive: all memory of this edge is still held here"):
            consumer.receive(3, 0.01)
    kept.clear()
    with pytest.raises(WaitTimeout, match="may still arrive"):
        consumer.receive(3, 0.01)


def test_release_gives_back_at_once_and_only_once(pair: Pair, kind: str) -> None:
    producer, consumer, kept = send_until_full(pair, kind, 2)
    view = kept[0].memory
    kept[0].release()
    kept[0].release()
    with pytest.raises(ArgumentError, match="was released"):
        _ = kept[0].memory
    assert "released" in repr(kept[0])
    small(producer, 3)
    if only_mapped_waits(pair, kind):
        with pytest.raises(WaitTimeout):
            small(producer, 4, 0.01)  # one slot came back, not two
    assert value(consumer, 3) == 3
    with kept[1] as second:
        assert bytes(second.memory) == b"\2" * 8
    del view, kept, second
    for step in (5, 6):
        small(producer, step)
    assert [value(consumer, step) for step in (5, 6)] == [5, 6]


def test_memory_that_other_threads_and_the_collector_drop(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 8, BOUND)
    steps = 300
    handed: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def drop() -> None:
        while handed.get() is not None:
            gc.collect()

    def produce() -> None:
        for step in range(1, steps + 1):
            born(producer, step, step.to_bytes(8, "little"), Spec((), "int64"))

    gc.collect()
    gc.freeze()  # collections are quick then, and leave nothing that is ours for later
    threads = [threading.Thread(target=work) for work in (drop, drop, produce)]
    for thread in threads:
        thread.start()
    wrong = []
    for step in range(1, steps + 1):
        while not consumer.ready():  # slots may be garbage: a collection that finds another one running does nothing
            gc.collect()
        received = consumer.receive(step, SECONDS)
        if array_of(received) != step:
            wrong.append(step)
        ring: list[object] = [received]
        ring.append(ring)
        if step % 5 == 0:
            handed.put(received)
        del received, ring
    handed.put(None)
    handed.put(None)
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    gc.unfreeze()
    assert wrong == []


def test_steps_must_grow(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 4, BOUND)
    for step in (0, -1, 2**64):
        with pytest.raises(ArgumentError, match="steps grow"):
            small(producer, step)
    small(producer, 5)
    for step in (5, 4):
        with pytest.raises(ArgumentError, match="steps grow"):
            small(producer, step)
    assert value(consumer, 5) == 5
    for step in (5, 0):
        with pytest.raises(ArgumentError, match="steps grow"):
            consumer.receive(step, SECONDS)
    small(producer, 9)
    for step in (6, 10):
        with pytest.raises(ProtocolError, match=f"step 9, not {step}"):
            consumer.receive(step, SECONDS)
    assert value(consumer, 9) == 9


def test_what_is_not_a_header(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 2, BOUND)
    small(producer, 1)
    producer.flush(SECONDS)
    arrived(consumer, 1)
    header = bank_of(consumer, 1)
    right = header[4]
    header[4] = 99
    for _ in range(2):
        with pytest.raises(ProtocolError, match="this version"):
            consumer.receive(1, SECONDS)
    header[4] = right
    assert value(consumer, 1) == 1


def test_a_step_that_was_begun_and_not_sent_does_not_hold_up_the_end(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 2, BOUND)
    small(producer, 1)
    assert value(consumer, 1) == 1
    if isinstance(producer, BoundedProducer):
        producer.slot(2, SECONDS)
    producer.fill(2, np.zeros(3), SECONDS)
    producer.close(SECONDS)


def test_a_producer_that_timed_out_still_waits_for_its_bytes(pair: Pair, kind: str) -> None:
    """Memory that is being written from is not handed out, however often one asks."""
    producer, _ = make(kind, pair, 1, BOUND)
    small(producer, 1)

    class Late:
        done = False

        def wait(self, timeout: float) -> None:
            raise WaitTimeout("it goes on")

    late: Any = Late()
    outgoing(producer)._sent[0] = [late]
    if outgoing(producer).maps:
        outgoing(producer).words.store(64 * 3, 1)  # as if it had been let go of
    for _ in range(3):
        with pytest.raises(WaitTimeout, match="it goes on"):
            small(producer, 2, 0.01)


def test_a_step_is_sent_as_what_it_was_filled_for(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 2, BOUND)
    producer.fill(5, np.zeros(3), SECONDS)
    with pytest.raises(ArgumentError, match="nothing was written for step 6"):
        producer.send(6)
    producer.send(5)
    assert consumer.receive(5, SECONDS).spec.shape == (3,)


def test_a_producer_that_was_closed_sends_nothing(pair: Pair, kind: str) -> None:
    producer, _ = make(kind, pair, 2, BOUND)
    producer.close(SECONDS)
    with pytest.raises(RegionClosed, match="this edge was closed"):
        small(producer, 1)


def test_a_tensor_that_is_refused_holds_up_no_end(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 2, BOUND)
    producer.fill(1, np.zeros((1,) * 9), SECONDS)
    with pytest.raises(ArgumentError, match="up to 8 dimensions"):
        producer.send(1)
    small(producer, 1)
    assert value(consumer, 1) == 1
    producer.close(SECONDS)


def test_a_consumer_that_closed_is_seen_by_its_producer(pair: Pair, kind: str) -> None:
    """Its channel goes on, such as for another edge."""
    producer, consumer = make(kind, pair, 2, BOUND)
    small(producer, 1)
    assert value(consumer, 1) == 1
    consumer.close()
    small(producer, 2)
    with pytest.raises(RemoteAccessError):
        producer.flush(SECONDS)


def test_credits_of_a_bad_moment_are_given_later(pair: Pair, kind: str) -> None:
    """What the collector lets go of while it runs is given back when something else is received, or at the end."""
    producer, consumer = make(kind, pair, 1, BOUND)
    bad = True
    incoming(consumer)._defers = lambda: bad
    small(producer, 1)
    consumer.receive(1, SECONDS).release()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(value(consumer, 2)))
    thread.start()
    small(producer, 2)
    thread.join(SECONDS)
    assert got == [2]
    consumer.close()
    producer.close(SECONDS)


@pytest.mark.parametrize("change", ["maps", "banks", "loans", "words", "small"])
def test_memory_that_does_not_fit_the_group(pair: Pair, kind: str, change: str) -> None:
    producer, consumer = make(kind, pair, 2, BOUND)
    for end, right in ((outgoing(producer), incoming(consumer).memory()), (incoming(consumer), shown(producer))):
        region = pair.consumer.allocate(8).remote().pack()
        wrong = {
            "maps": msgspec.structs.replace(right, maps=not right.maps),
            "banks": msgspec.structs.replace(right, banks=[region] * 251),
            "loans": msgspec.structs.replace(right, loans={7: region}),
            "words": msgspec.structs.replace(right, words=b"short"),
            "small": msgspec.structs.replace(right, words=region),
        }[change]
        if change in ("banks", "loans") and (end is outgoing(producer)) == pair.producer.capabilities.maps:
            continue  # which nobody looks at
        with pytest.raises(ProtocolError):
            end.open(wrong)


def shown(producer: Any) -> PeerMemory:
    """What a producer shows its consumer."""
    memory: PeerMemory = group_of(producer)._shown_to("consumer", outgoing(producer))
    return memory


def test_numbers_are_no_tensors(pair: Pair, kind: str) -> None:
    """They are for graphs, whose plan says what they are."""
    producer, consumer = make(kind, pair, 2, BOUND)
    small(producer, 1)
    producer.flush(SECONDS)
    arrived(consumer, 1)
    pack_number(bank_of(consumer, 1), 0, 1, 7)
    with pytest.raises(ProtocolError, match="carries tensors"):
        consumer.receive(1, SECONDS)


@pytest.mark.parametrize("bank", [2, 255])
def test_a_bank_that_there_is_not(pair: Pair, kind: str, bank: int) -> None:
    _, consumer = make(kind, pair, 2, BOUND)
    incoming(consumer)._words.store(8, 1 << 8 | bank)
    with pytest.raises(ProtocolError, match=f"in bank {bank} of 2"):
        consumer.receive(1, SECONDS)


def test_a_lost_peer_wakes_both_ends(pair: Pair, kind: str) -> None:
    producer, consumer = make(kind, pair, 1, BOUND)
    born(producer, 1, b"x", Spec((1,), "uint8"))
    producer.flush(SECONDS)  # or what is still on its way is refused by a region that is closing
    lost_while(lambda: small(producer, 2), pair.consumer.close)
    with pytest.raises((RegionClosed, PeerLost)):  # the consumer's own device is what closed
        consumer.receive(2, SECONDS)


def test_what_is_dropped_after_the_end_of_the_channel(pair: Pair, kind: str) -> None:
    _, _, kept = send_until_full(pair, kind, 2)
    first = np.frombuffer(kept[0].memory, np.uint8)
    pair.back.close()
    kept.pop().release()
    kept.clear()
    assert np.all(first == 1)
    del first
