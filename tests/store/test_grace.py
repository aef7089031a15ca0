"""How long a round stays open beyond its quorum: by a clock that the test sets."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from tensorwire.store import Async, DiLoCo
from tensorwire.store.deadlines import Deadlines
from tensorwire.store.grace import AdaptiveGrace, Grace, grace_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_fixed_grace_begins_with_the_quorum() -> None:
    clock = Clock()
    grace = Grace(0.5, clock)
    clock.now = 3.0
    grace.contributed(0, 0)
    assert grace.deadline(0, [0]) == 3.5


def test_an_adaptive_grace_ends_when_the_first_worker_needs_its_answer() -> None:
    clock = Clock()
    grace = AdaptiveGrace(delay=2, every=4, now=clock)
    grace.contributed(0, 0)
    assert grace.deadline(0, [0]) == 0.0  # of its pace nothing is known yet
    clock.now = 2.0
    grace.contributed(0, 1)
    clock.now = 8.0
    grace.contributed(0, 0)  # 4 steps in 8 seconds
    assert grace.deadline(0, [0]) == 8.0 + 2 * 2.0
    grace.updated(0, 0.5)
    assert grace.deadline(0, [0]) == 11.5
    clock.now = 9.0
    assert grace.deadline(0, [0]) == 11.5  # also when it is asked later
    clock.now = 10.0
    grace.contributed(0, 1)  # 4 steps in 8 seconds, too, but later
    assert grace.deadline(0, [0, 1]) == 11.5
    assert grace.deadline(0, [1]) == 13.5
    clock.now = 10.4
    grace.contributed(1, 2)
    clock.now = 10.8
    grace.contributed(1, 2)  # a fast one, in another bucket
    assert grace.deadline(1, [2]) == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (Async(), type(None)),
        (DiLoCo(quorum=1), type(None)),
        (DiLoCo(quorum=1, grace=0.1), Grace),
        (DiLoCo(quorum=1, delay=2, grace="auto"), AdaptiveGrace),
        (DiLoCo(quorum=1, grace="auto"), type(None)),  # whoever has sent waits at once
    ],
    ids=repr,
)
def test_modes_have_the_grace_that_they_say(mode: Any, kind: type) -> None:
    assert type(grace_of(mode)) is kind


def test_rounds_close_in_the_order_of_their_deadlines() -> None:
    closed: SimpleQueue[tuple[int, int]] = SimpleQueue()
    ends: SimpleQueue[BaseException | None] = SimpleQueue()
    deadlines = Deadlines(lambda bucket, version: closed.put((bucket, version)))
    for at, bucket in ((0.03, 3), (0.01, 1), (0.02, 2)):  # long ago
        deadlines.set(at, bucket, 7)
    deadlines.start("deadlines", ends)
    assert [closed.get() for _ in range(3)] == [(1, 7), (2, 7), (3, 7)]
    deadlines.stop()
    for thread in threading.enumerate():
        if thread.name == "deadlines":
            thread.join()
    assert ends.empty()
