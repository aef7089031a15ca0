"""What is posted on a queue pair: in which order, how it is signalled, and how much may be on its way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.harness.cable import NBYTES, WORD, cable, until
from tests.harness.fake_nic import Fabric

from tensorwire.device.verbs import queue_pair as module
from tensorwire.device.verbs.queue_pair import SENDS
from tensorwire.errors import RemoteAccessError, WaitTimeout
from tensorwire.testing.patterns import SECONDS, array, pattern

WRITE, SIGNAL, READ = "RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "RDMA_READ"


def test_operations_complete_in_the_order_in_which_they_were_posted(fabric: Fabric) -> None:
    with cable(fabric) as c:
        back = c.device.allocate(64)
        with fabric.held():
            posted = [c.write(0, 64), c.write(64, 64, signal=5), c.channel.read(back.view(), c.remote.view(64, 64))]
            assert [each.request.wr_id for each in c.pair.waiting] == [1, 2, 2, 3]
            for executed, done in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 3)):
                assert len(c.opcodes) == executed
                assert [completion.done for completion in posted] == [True] * done + [False] * (3 - done)
                assert c.arrived(64, 64) == (executed >= 2)
                assert c.word == (5 if executed >= 3 else 0), "the signal is not where its payload is"
                c.pair.step()
        assert c.opcodes == [WRITE, WRITE, SIGNAL, READ]
        assert array(back).tobytes() == array(c.source)[64:128].tobytes()


def test_the_source_is_read_when_the_nic_gets_to_it_and_a_signal_at_once(fabric: Fabric) -> None:
    with cable(fabric) as c:
        with fabric.held():
            posted = c.write(0, 64, signal=3)
            array(c.source)[:64] = 9  # too early: what arrives is this
        posted.wait(SECONDS)
        assert array(c.target)[:64].tolist() == [9] * 64
        assert c.word == 3


@pytest.mark.parametrize(
    ("signals", "behind", "apart"),
    [
        ("immediate", [WRITE, SIGNAL], [WRITE, SIGNAL]),
        ("write", [WRITE, WRITE], [WRITE, WRITE]),
        ("tail", [WRITE], [WRITE, WRITE]),
    ],
)
def test_how_a_signal_is_sent(fabric: Fabric, signals: str, behind: list[str], apart: list[str]) -> None:
    with cable(fabric, signals=signals) as c:
        c.write(WORD - 64, 64, signal=1).wait(SECONDS)  # the word lies right behind the payload
        assert (c.opcodes, c.word) == (behind, 1)
        assert c.arrived(WORD - 64, 64)
        c.write(0, 64, signal=2).wait(SECONDS)
        assert (c.opcodes[len(behind) :], c.word) == (apart, 2)
        assert c.arrived(0, 64)
        c.channel.signal(c.remote.view(WORD, 8), 3).wait(SECONDS)
        assert (c.opcodes[len(behind) + len(apart) :], c.word) == (apart[-1:], 3)


@pytest.mark.parametrize("signals", ["immediate", "write"])
def test_every_signal_wakes_who_waits_for_it(fabric: Fabric, in_thread: Callable[..., Any], signals: str) -> None:
    with cable(fabric, signals=signals) as c:
        for value in range(1, 31):
            waiter = in_thread(c.target.wait, WORD, value, SECONDS)
            c.channel.signal(c.remote.view(WORD, 8), value).wait(SECONDS)
            waiter.join(SECONDS)
            assert not waiter.is_alive()


def test_only_the_last_request_of_an_operation_asks_for_a_completion(fabric: Fabric) -> None:
    with cable(fabric) as c, fabric.held():
        c.channel._pair._largest = 16  # type: ignore[attr-defined]  # bytes of the port's largest message
        c.write(0, 64, signal=1)
        c.write(0, 16)
        flags = [bool(each.request.send_flags & fabric.ib.SendFlags.SIGNALED) for each in c.pair.waiting]
        assert flags == [False, False, False, False, True, True]


def test_a_fence_is_on_the_first_request(fabric: Fabric) -> None:
    with cable(fabric) as c, fabric.held():
        fence = fabric.ib.SendFlags.FENCE
        c.write(0, 64, signal=1, fence=True)
        c.channel.signal(c.remote.view(WORD, 8), 2, fence=True)
        c.write(0, 64)
        flags = [bool(each.request.send_flags & fence) for each in c.pair.waiting]
        assert flags == [True, False, True, False]


# ---- how much may be on its way


def test_a_full_queue_makes_the_next_operation_wait(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, in_thread: Callable[..., Any]
) -> None:
    with cable(fabric) as c:
        with fabric.held():
            for _ in range(SENDS - 1):
                c.write(0, 8)
            with monkeypatch.context() as patched:
                patched.setattr(module, "POST_SECONDS", 0.01)
                with pytest.raises(WaitTimeout, match="the operation was not started"):
                    c.write(64, 64, signal=1)  # two requests, and there is room for one
            assert len(c.pair.waiting) == SENDS - 1
            late = in_thread(lambda: c.write(64, 64, signal=2).wait(SECONDS))
            until(lambda: c.channel._pair._waiters == 1)  # type: ignore[attr-defined]
            assert len(c.pair.waiting) == SENDS - 1
        late.join(SECONDS)
        assert c.word == 2
        assert c.arrived(64, 64)
        assert c.pair.sends_taken == 0, "room was not given back"


def test_nobody_signals_without_a_receive_at_the_target(fabric: Fabric, in_thread: Callable[..., Any]) -> None:
    with cable(fabric) as c:
        there = c.pair.peer
        assert there is not None
        ready = len(there.receives)
        with c.other._nic._lock:  # the target looks at no completion, so it posts no receive again
            for value in range(1, ready + 1):
                c.channel.signal(c.remote.view(WORD, 8), value).wait(SECONDS)
            late = in_thread(lambda: c.channel.signal(c.remote.view(WORD, 8), ready + 1).wait(SECONDS))
            until(lambda: c.channel._pair._waiters == 1)  # type: ignore[attr-defined]
            assert (c.word, len(there.receives)) == (ready, 0)
            c.write(0, 64).wait(SECONDS)  # what takes no receive goes on
            assert c.arrived(0, 64)
        late.join(SECONDS)
        c.target.wait(WORD, ready + 1, SECONDS)


def test_credits_come_back_by_the_number_of_receives(fabric: Fabric) -> None:
    with cable(fabric) as c:
        there = c.pair.peer
        assert there is not None
        for value in range(1, 2001):
            c.channel.signal(c.remote.view(WORD, 8), value).wait(SECONDS)
        returned = fabric.executed(there)
        assert set(returned) == {SIGNAL}
        assert 2000 // there.most_receives <= len(returned) <= 2000 // (there.most_receives // 4)
    assert fabric.not_ready == 0


@pytest.mark.parametrize("requests", [4, 16384])
def test_any_mixture_keeps_within_the_nics_room(fabric: Fabric, requests: int) -> None:
    """The fake NIC refuses a request too many, and takes room back only with completions."""
    fabric.most_requests = requests
    chance = random.Random(requests)
    with cable(fabric) as c:
        back, posted = c.device.allocate(64), []
        kinds = [
            lambda i: c.write(8 * (i % 64), 8),
            lambda i: c.write(8 * (i % 64), 8, signal=i),
            lambda i: c.channel.signal(c.remote.view(WORD, 8), i),
            lambda i: c.channel.read(back.view(), c.remote.view(0, 64)),
        ]
        for i in range(1, 1500):
            posted.append(chance.choice(kinds)(i))
            if chance.random() < 0.05:
                chance.choice(posted).wait(SECONDS)
        for completion in posted:
            completion.wait(SECONDS)
        assert c.pair.sends_taken == 0
        c.works()


# ---- large and many


def test_a_message_above_the_ports_largest_is_cut(fabric: Fabric) -> None:
    nbytes = 1_000_003  # more pieces than one operation may have
    with cable(fabric) as c:
        c.channel._pair._largest = 8192  # type: ignore[attr-defined]
        target, source, back = c.other.allocate(nbytes + 13), c.device.allocate(nbytes), c.device.allocate(nbytes)
        array(source)[:] = pattern(5, nbytes)
        remote = target.remote()
        c.channel.write(source.view(), remote.view(8, nbytes), (remote.view(0, 8), 4)).wait(SECONDS)
        assert c.opcodes == [WRITE] * 123 + [SIGNAL]
        assert target.load(0) == 4
        assert np.array_equal(array(target)[8 : 8 + nbytes], array(source))
        assert not array(target)[8 + nbytes :].any()
        c.channel.read(back.view(), remote.view(8, nbytes)).wait(SECONDS)
        assert np.array_equal(array(back), array(source))


def test_a_refused_part_keeps_the_later_ones_and_the_signal_back(fabric: Fabric) -> None:
    nbytes = 1_000_000
    with cable(fabric) as c:
        c.channel._pair._largest = 4096  # type: ignore[attr-defined]
        target, source = c.other.allocate(nbytes // 2), c.device.allocate(nbytes)
        longer = replace(target.remote(), length=nbytes)
        refused = c.channel.write(source.view(), longer.view(), (c.remote.view(WORD, 8), 1))
        after = c.channel.signal(c.remote.view(WORD + 8, 8), 2)
        with pytest.raises(RemoteAccessError, match="the target refused"):
            refused.wait(SECONDS)
        after.wait(SECONDS)
        assert (c.word, c.target.load(WORD + 8)) == (0, 2)


def test_a_batch_goes_to_the_nic_together(fabric: Fabric) -> None:
    with cable(fabric) as c, fabric.held():
        with c.channel.batch():
            for i in range(10):
                c.write(64 * i, 64)
            assert not c.pair.waiting
        assert [each.request.wr_id for each in c.pair.waiting] == list(range(1, 11))
        signaled = fabric.ib.SendFlags.SIGNALED
        assert [bool(each.request.send_flags & signaled) for each in c.pair.waiting] == [False] * 9 + [True]


def test_a_wait_inside_a_batch_does_not_wait_for_its_end(fabric: Fabric) -> None:
    with cable(fabric) as c, c.channel.batch():
        posted = [c.write(64 * i, 64) for i in range(10)]
        posted[3].wait(SECONDS)
        assert c.arrived(0, 640)


def test_a_batch_may_be_longer_than_the_queue(fabric: Fabric) -> None:
    with cable(fabric) as c:
        count = SENDS + 100
        with c.channel.batch():
            posted = [c.write(8 * (i % (NBYTES // 8 - 8)), 8) for i in range(count)]
            last = c.channel.signal(c.remote.view(WORD, 8), 7)
        last.wait(SECONDS)
        assert all(completion.done for completion in posted)
        assert c.pair.sends_taken == 0
