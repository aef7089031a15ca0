"""``shared_state()``: the model to save, in every mode; the numbers are such that every sum is exact in any order."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import EASGD, SGD, SSP, Async, DiLoCo, LocalSGD, Sync
from tensorwire.store.modes import Local, Mode
from tests.harness.jobs import for_each, in_turn, run_job

RATE, BUCKET = 0.25, 4096
STEPS = 3  # of each worker, whose gradients are 1, or 2 on worker 1


class Net(torch.nn.Module):
    """In several buckets on two servers, in half precision, without elements, with strides; and a buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        values = {
            "wide": torch.zeros(70, 60),
            "halves": torch.zeros(33, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 3),
            "turned": torch.zeros(6, 5).t(),
        }
        self.params = torch.nn.ParameterDict({name: torch.nn.Parameter(v + rank) for name, v in values.items()})
        self.counts = torch.nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))


@dataclass(frozen=True)
class Case:
    """``shared``: what all workers are to save; ``own``: what their models have."""

    mode: Mode
    shared: float
    own: tuple[float, float]
    in_turn: bool = False  # worker 1 begins when worker 0 has taken all its steps
    overlap: bool = False


OUTER = SGD(lr=0.5, momentum=0.0, nesterov=False)
CASES = [
    Case(Sync(), -1.125, (-1.125, -1.125)),
    Case(Sync(), -1.125, (-1.125, -1.125), overlap=True),
    Case(Async(), -2.25, (-0.75, -2.25), in_turn=True),
    Case(SSP(staleness=STEPS), -2.25, (-0.75, -2.25), in_turn=True),
    Case(EASGD(every=2, alpha=0.5), -0.625, (-0.5, -1.125), in_turn=True),  # the centre: -0.25, then half the way to -1
    Case(LocalSGD(every=2), -0.75, (-1.0, -1.25)),  # the mean of -0.5 and -1
    Case(DiLoCo(every=2, outer=OUTER), -0.375, (-0.625, -0.875)),  # half the way to it
    Case(DiLoCo(every=2, outer=OUTER, delay=1), -0.375, (-0.375, -0.375)),  # it comes after step 3
]


def drift(job: tw.Job, case: Case) -> Any:
    """What the model has; what worker 1 gets alone, and what all get, as shared; and a file of a stock model."""
    net = Net(job.rank)
    chosen: dict[str, Any] = {"mode": case.mode, "bucket_bytes": BUCKET, "overlap": case.overlap}
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=RATE, **chosen)
    if case.in_turn and job.rank:
        job.barrier()
    for _ in range(STEPS):
        for p in net.params.values():
            p.grad = torch.full_like(p, 1.0 + job.rank)
        optimizer.step()
    if case.in_turn and not job.rank:
        job.barrier()
    job.barrier()
    with torch.no_grad():
        net.seen += 1 + job.rank
    alone = optimizer.shared_state() if job.rank else None
    job.barrier()
    shared = optimizer.shared_state()
    optimizer.wait()
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    file = io.BytesIO()
    torch.save({**net.state_dict(), **shared}, file)  # as docs/modes.md has it
    for value in shared.values():
        value.fill_(9)  # copies
    again = optimizer.shared_state()
    job.barrier()
    return own, alone, again, file.getvalue()


def check(values: dict[str, torch.Tensor], expected: float, *, integers: bool) -> None:
    like = dict(Net(0).named_parameters())
    names = [n for n, p in like.items() if integers or p.is_floating_point()]
    assert list(values) == names
    for name in names:
        right = torch.full_like(like[name], expected) if like[name].is_floating_point() else like[name]
        assert values[name].dtype == right.dtype
        assert torch.equal(values[name], right.detach()), (name, values[name].reshape(-1)[:3], expected)


def test_all_workers_save_the_same_model() -> None:
    results = run_job(for_each, drift, [(case,) for case in CASES], servers=2).ok()
    for rank, found in enumerate(results):
        for case, (own, alone, shared, file) in zip(CASES, found, strict=True):
            integers = not isinstance(case.mode, Local)
            check(own, case.own[rank], integers=True)
            check(shared, case.shared, integers=integers)
            if rank:
                check(alone, case.shared, integers=integers)
            saved = Net(0)
            saved.load_state_dict(torch.load(io.BytesIO(file)))
            check({n: p.detach() for n, p in saved.named_parameters()}, case.shared, integers=True)
            assert saved.seen == 1 + rank  # a buffer is the worker's own


def sparse(job: tw.Job, mode: Any) -> list[list[float]]:
    """Row 0 has gradients on both workers, row 1 on worker 1 alone, which begins when worker 0 has ended."""
    net = torch.nn.ModuleDict({"words": torch.nn.Embedding(4, 1, sparse=True), "top": torch.nn.Linear(1, 1)})
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=RATE, mode=mode)
    if job.rank and not isinstance(mode, Sync):
        job.barrier()
    for _ in range(2):
        optimizer.zero_grad()
        net["words"](torch.arange(1 + job.rank)).sum().backward()
        optimizer.step()
    if not job.rank and not isinstance(mode, Sync):
        job.barrier()
    job.barrier()
    shared = optimizer.shared_state()["words.weight"].flatten().tolist()
    own = net["words"].weight.flatten().tolist()
    job.barrier()
    return [own, shared]


def test_rows_of_sparse_gradients_are_the_servers() -> None:
    first, second = run_job(for_each, sparse, [(Sync(),), (Async(),), (SSP(staleness=2),)]).ok()
    assert first[0] == second[0] == [[-0.5, -0.25, 0.0, 0.0]] * 2
    assert first[1:] == [[[-0.5, 0.0, 0.0, 0.0], [-1.0, -0.5, 0.0, 0.0]]] * 2
    assert second[1:] == [[[-1.0, -0.5, 0.0, 0.0]] * 2] * 2


def loaded(job: tw.Job) -> None:
    """A state that was loaded is what servers are given with the next step."""
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, mode=LocalSGD(every=5))
    p.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    state["store"]["parameters"]["p"].fill_(7.0)
    optimizer.load_state_dict(state)
    before = optimizer.shared_state()["p"].fill_(1.0) + optimizer.shared_state()["p"]
    optimizer.step()
    assert before.tolist() == [8.0] * 3
    assert optimizer.shared_state()["p"].tolist() == [7.0] * 3


def refused(job: tw.Job) -> None:
    """Not in the middle of a step, nor from servers that have gone."""
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    overlapped = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, overlap=True)
    other = tw.torch.StoreOptimizer([("q", q)], torch.optim.SGD, lr=1.0, mode=Async())
    (p.sum() + 0 * q.sum()).backward()
    with pytest.raises(errors.ArgumentError, match=r"^save and load state between two steps: gradients are in flight$"):
        overlapped.shared_state()
    overlapped.step()
    other.step()
    job.barrier()
    job.close()
    assert overlapped.shared_state()["p"].tolist() == [-1.0, -1.0, -1.0]
    with pytest.raises(errors.JobEnded, match=r"save before job.close\(\)"):
        other.shared_state()


def test_a_state_that_waits_for_the_next_step_and_the_end() -> None:
    run_job(in_turn, loaded, refused).ok()
