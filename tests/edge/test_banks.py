"""Several edges that share banks: a bank goes back once nobody looks into any of its tensors."""

from __future__ import annotations

import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tensorwire._native import Hold
from tensorwire.edge import Pool, Spec
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.header import HEADER
from tensorwire.edge.peers import Peers
from tests.edge.edges import Pair
from tests.edge.varying import LIMIT, SECONDS

NBYTES = 1000
SPEC = Spec((NBYTES,), "uint8")


@dataclass(frozen=True)
class OneEdge:
    """An edge of a group; ``nbytes`` None: a dynamic one."""

    slot: int
    nbytes: int | None
    name: str = "tensor"
    source: str = "producer"
    targets: tuple[str, ...] = ("consumer",)
    offset: int = 0
    lent: bool = False
    header: None = None


ROOM = HEADER + NBYTES
DYNAMIC = (0, 1)
STATIC = (2, 3)
EDGES = [OneEdge(ROOM * i, None if i in DYNAMIC else NBYTES) for i in range(4)]


def groups(pair: Pair) -> tuple[EdgeGroup, EdgeGroup]:
    """Both ends of a group whose outbox has two dynamic edges and two static ones."""
    said: dict[str, queue.SimpleQueue[bytes]] = defaultdict(queue.SimpleQueue)

    def make(me: str) -> EdgeGroup:
        channel = pair.there if me == "producer" else pair.back
        pool = Pool(channel.device, limit=LIMIT)
        peers = Peers(
            *("banks", me, lambda _: channel),
            lambda what, peer, value: said[f"{me} {what}"].put(value),
            lambda what, peer: said[f"{peer} {what}"].get(timeout=SECONDS),
            lambda peer, number: None,
        )
        outboxes = {"producer": ROOM * len(EDGES), "consumer": 0}
        return EdgeGroup(EDGES, outboxes, peers, pools=lambda _: pool, timeout=SECONDS, defers=lambda: False)

    with ThreadPoolExecutor(1) as other:
        consumer = other.submit(make, "consumer")
        return make("producer"), consumer.result(SECONDS)


class Steps:
    """Steps in which all edges send a byte that is the step's number, many times."""

    def __init__(self, pair: Pair) -> None:
        self.producer, self.consumer = groups(pair)

    def send(self) -> None:
        """One step of the producer. It keeps nothing of it."""
        group = self.producer
        group.begin(holds=False)
        content = bytes([group.step]) * NBYTES
        for index in DYNAMIC:
            lease = group.room(index, NBYTES)
            lease.memory[:] = content
            group.send_dynamic(index, lease, SPEC)
        for index in STATIC:
            assert group.bank is not None
            at = ROOM * index
            group.bank.memory[at : at + NBYTES] = content
            group.send(index, NBYTES)
        group.end()

    def receive(self) -> dict[int, Hold]:
        """One step of both: what arrived, by edge, each as a part of its own."""
        group = self.consumer
        group.begin()
        self.send()
        found = {index: group.receive_dynamic(index)[0] for index in DYNAMIC}
        found |= {index: group.part(index, ROOM * index, NBYTES, group.receive(index)) for index in STATIC}
        group.end()
        return found


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("gone", range(len(EDGES)))
def test_a_bank_is_not_given_back_while_one_of_its_tensors_is_in_use(pair: Pair, gone: int, released: bool) -> None:
    """Whichever of a step's tensors goes first, by itself or by ``release()``: the others stay as they are."""
    steps = Steps(pair)
    kept = steps.receive()
    if released:
        kept[gone].release()
    del kept[gone]
    for _ in range(6):
        steps.receive()
    assert [index for index, held in kept.items() if bytes(memoryview(held)) != b"\1" * NBYTES] == []


def test_a_bank_is_given_back_with_the_last_of_its_tensors(pair: Pair) -> None:
    """Where parts were released, what stands for them keeps nothing."""
    steps = Steps(pair)
    kept = steps.receive()
    banks = steps.consumer._in["producer"]._banks
    for held in kept.values():
        assert any(bank.held for bank in banks)
        held.release()
    assert not any(bank.held for bank in banks)
    steps.producer.drain(SECONDS)


def test_a_bank_whose_step_is_not_over_is_kept(pair: Pair) -> None:
    """In the middle of a step, when all that has arrived is gone: more of it is on its way."""
    steps = Steps(pair)
    group = steps.consumer
    group.begin()
    steps.send()
    first = group.receive_dynamic(0)[0]
    del first
    for _ in range(3):
        steps.producer.room(0, NBYTES).memory[:] = b"\xff" * NBYTES
    steps.producer.collect()
    assert len(steps.producer._payloads) == len(DYNAMIC)
    assert bytes(memoryview(group.receive_dynamic(1)[0])) == b"\1" * NBYTES
    group.end()
    steps.producer.drain(SECONDS)
    assert steps.producer._payloads == []
