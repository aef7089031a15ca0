"""Workers with the same data are noticed by their gradients, and others are not."""

from __future__ import annotations

import pytest

from tensorwire.store import sameness
from tensorwire.store.sameness import Sameness
from tests.harness.sandbox import Sandbox

SIZE = 200_000  # more than the part that is looked at first


def slots(*last: int) -> list[memoryview]:
    """A slot for each worker, which end with these bytes."""
    return [memoryview(bytes([7]) * SIZE + bytes([byte])) for byte in last]


def rounds(what: Sameness, count: int, gradients: list[memoryview], present: list[bytes]) -> list[bool]:
    found = []
    for _ in range(count):
        if what.watching:
            what.compare(gradients, present)
        found.append(what.watching and what.end_round())
    return found


def test_the_same_gradients_are_told_once_after_three_rounds() -> None:
    what = Sameness(3)
    assert rounds(what, 5, slots(1, 1, 1), [b"\1"] * 3) == [False, False, True, False, False]


@pytest.mark.parametrize("last", [(1, 1, 2), (2, 1, 1)])
def test_one_byte_of_difference_ends_the_looking(last: tuple[int, ...]) -> None:
    what = Sameness(3)
    assert rounds(what, 1, slots(*last), [b"\1"] * 3) == [False]
    assert not what.watching


def test_gradients_that_some_lack_are_different() -> None:
    what = Sameness(2)
    assert rounds(what, 4, slots(1, 1), [b"\1", b"\0"]) == [False] * 4


def test_zeros_and_no_gradients_say_nothing() -> None:
    what = Sameness(2)
    assert rounds(what, 4, [memoryview(bytes(SIZE))] * 2, [b"\1"] * 2) == [False] * 4
    assert rounds(what, 4, slots(1, 1), [b"\0"] * 2) == [False] * 4
    assert rounds(what, 3, slots(1, 1), [b"\1"] * 2) == [False, False, True]


def test_one_worker_is_not_looked_at() -> None:
    assert not Sameness(1).watching


def test_it_is_told_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sameness, "_warned", False)
    Sameness(2).warn()
    Sameness(2).warn()
    assert capsys.readouterr().err.count("DistributedSampler") == 1
    assert not Sameness(2).watching


TRAINS = """
import torch
for name in "ab":
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = tw.torch.StoreOptimizer([(name, p)], torch.optim.SGD, lr=0.1, overlap=name == "b")
    for step in range(4):
        optimizer.zero_grad()
        (p.sum() * {what}).backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_a_job_whose_workers_read_the_same_says_so_once(sandbox: Sandbox) -> None:
    ended = sandbox.run(sandbox.script(TRAINS.format(what="step"))).finish()
    assert ended.status == 0
    line = ended.one_line()
    assert line.startswith("tensorwire: warning: all 2 workers pushed the same gradients in the first 3 steps")
    assert "DistributedSampler(dataset, num_replicas=job.num_workers, rank=job.rank)" in line


@pytest.mark.slow
def test_a_job_whose_workers_differ_says_nothing(sandbox: Sandbox) -> None:
    ended = sandbox.run(sandbox.script(TRAINS.format(what="(step + job.rank)"))).finish()
    assert (ended.status, ended.err) == (0, "")
