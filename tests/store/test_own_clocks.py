"""When rounds of workers with own clocks close: membership is a set, of which some may have left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tensorwire.store import DiLoCo, LocalSGD
from tensorwire.store.modes import Mode
from tensorwire.store.own_clocks import OwnClocks
from tensorwire.store.sharding import ParameterSpec, make_plan


class Rounds:
    """The rounds of one bucket, with three workers. ``closed``: who contributed to each."""

    def __init__(self, mode: Mode) -> None:
        plan = make_plan([ParameterSpec("p", (1024,), "float32")], 1, bucket_bytes=4096, whole=False)
        shard: Any = SimpleNamespace(
            index=0,
            name="store/0",
            workers=dict.fromkeys(range(3)),
            spec=SimpleNamespace(mode=mode, numeric=[]),
            plan=plan,
            parameters=bytearray(4096),
            rule=None,
            member=SimpleNamespace(membership=SimpleNamespace(least=0)),
            keep_snapshots=lambda moments: None,
        )
        self.clocks = OwnClocks(shard)
        self.closed: list[list[int]] = []
        merged: Any = lambda bucket, here: self.closed.append(sorted(each.worker for each in here))  # noqa: E731
        self.clocks._merge_and_answer = merged  # type: ignore[method-assign]

    def push(self, worker: int) -> None:
        contribution: Any = SimpleNamespace(worker=worker)
        self.clocks.contribute(0, contribution)


@pytest.mark.parametrize(
    ("mode", "others"), [(LocalSGD(every=1), [1, 2]), (DiLoCo(every=1, quorum=3), [1, 2]), (DiLoCo(quorum=2), [1])]
)
def test_a_worker_that_pushes_and_leaves_counts_once(mode: Mode, others: list[int]) -> None:
    rounds = Rounds(mode)
    rounds.push(0)
    rounds.clocks.leave(0)
    for worker in others:
        assert rounds.closed == []
        rounds.push(worker)
    assert rounds.closed == [[0, *others]]
