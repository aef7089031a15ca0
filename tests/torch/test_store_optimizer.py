"""What users do with a StoreOptimizer, and what they must not do unnoticed."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.edge import Producer
from tensorwire.observe import counters, pickles_counted
from tensorwire.torch import optimizer as optimizer_module
from tests.harness.jobs import in_turn, run_job


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def backward(net: torch.nn.Module, rank: int, step: int) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * rank + step))
    net.zero_grad()
    net(x).square().mean().backward()


def state(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def sgd(net: torch.nn.Module, **options: Any) -> tw.torch.StoreOptimizer:
    return tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.SGD, **{"lr": 0.1, **options})


# ---- values


def first_values(job: tw.Job) -> None:
    """Worker 0's values win at the start."""
    net = model(seed=job.rank)
    sgd(net)
    assert same(state(net), state(model(0)))


def watch_between_steps(job: tw.Job) -> None:
    """Parameters do not change between steps."""
    net = model()
    optimizer = sgd(net)
    for step in range(5):
        backward(net, job.rank, step)
        optimizer.step()
        before = state(net)
        if job.rank == 0:  # the other worker runs ahead as far as it can
            job.barrier()
        else:
            backward(net, job.rank, step + 1)
            job.barrier()
        assert same(before, state(net))


def saved_sizes(job: tw.Job) -> None:
    """Saving one parameter writes one."""

    def size(net: torch.nn.Module) -> int:
        file = io.BytesIO()
        torch.save(net[0].bias, file)
        return file.tell()

    net = model()
    before = size(net)
    sgd(net)
    assert size(net) < before + 512


def load(job: tw.Job, whole: bool) -> dict[str, torch.Tensor]:
    """``load_state_dict`` writes through the store."""
    net = model()
    optimizer = sgd(net, momentum=0.0)
    backward(net, job.rank, 0)
    optimizer.step()
    checkpoint = model(seed=7).state_dict()
    if whole:
        net.load_state_dict(checkpoint)
    else:
        net[0].load_state_dict({k[2:]: v for k, v in checkpoint.items() if k.startswith("0.")})
    loaded = state(net)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    backward(net, job.rank, 1)
    optimizer.step()
    other = model()
    other.load_state_dict(loaded)
    for w in range(2):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * w + 1))
        other(x).square().mean().backward()
    with torch.no_grad():
        for p in other.parameters():
            p -= 0.1 * (p.grad / 2)
    torch.testing.assert_close(state(net), state(other))
    return state(net)


def write_intended(job: tw.Job) -> None:
    """``write_parameters`` takes worker 0's values."""
    net = model()
    optimizer = sgd(net)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(float(job.rank + 1))
    optimizer.write_parameters()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(v, torch.ones_like(v)) for v in state(net).values())


# ---- what must be noticed


def in_place(net: torch.nn.Sequential) -> None:
    with torch.no_grad():
        net[2].bias.add_(1.0)


def through_data(net: torch.nn.Sequential) -> None:
    net[0].weight.data[3, 3] = 5.0


def to_half(net: torch.nn.Sequential) -> None:
    net.half()


def new_data(net: torch.nn.Sequential) -> None:
    net[0].bias.data = torch.zeros(64)


CHANGES = {in_place: "2.bias", through_data: "0.weight", to_half: "0.weight", new_data: "0.bias"}


def modify(job: tw.Job) -> None:
    """Changed parameters are noticed."""
    for change, name in CHANGES.items():
        net = model()
        optimizer = sgd(net)
        for step in range(2):
            backward(net, job.rank, step)
            optimizer.step()
        job.barrier()
        backward(net, job.rank, 2)
        change(net)
        with pytest.raises(errors.ParameterModified, match=f"parameter '{name}'"):
            optimizer.step()


def stray_write(job: tw.Job) -> None:
    """A stray write of one worker is not seen by the other, and hurts nobody's memory."""
    net = model()
    sgd(net)
    before = state(net)
    if job.rank == 0:
        net[0].weight.data.fill_(9.0)
    job.barrier()
    assert same(before, state(net)) == (job.rank != 0)


def load_alone(job: tw.Job) -> None:
    net = model()
    optimizer = sgd(net)
    if job.rank == 1:
        net.load_state_dict(model(3).state_dict())
    backward(net, job.rank, 0)
    optimizer.step()


def load_state_alone(job: tw.Job) -> None:
    net = model()
    optimizer = sgd(net)
    if job.rank == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    backward(net, job.rank, 0)
    optimizer.step()


def load_while_others_wait(job: tw.Job) -> None:
    net = model()
    optimizer = sgd(net)
    with job.uneven():
        for step in range(2 * job.rank):
            backward(net, job.rank, step)
            optimizer.step()
            optimizer.write_parameters()


def unequal_models(job: tw.Job) -> None:
    sgd(torch.nn.Linear(4, 4 + job.rank))


def unequal_compressions(job: tw.Job) -> None:
    sgd(model(), compression=f"topk(0.{1 + job.rank})")


def unequal_options(job: tw.Job) -> None:
    sgd(model(), momentum=0.5 + job.rank)


def unequal_overlap(job: tw.Job) -> None:
    sgd(model(), overlap=job.rank == 1)


def other_software(job: tw.Job) -> None:
    import tensorwire.torch.part as module

    if job.rank == 1:
        module.versions = lambda: "tensorwire 9.9, torch 1.0"  # type: ignore[attr-defined]
    sgd(model())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (load_alone, ["worker 1 loaded parameters before step 1 and worker 0 did not: call load_state_dict on every"]),
        (load_state_alone, ["worker 1 loaded state before step 1 and worker 0 did not: call load_state_dict on every"]),
        (load_while_others_wait, ["worker 1 loaded parameters before step 2 and worker 0 did not"]),
        (unequal_compressions, ["compression topk(0.1)", "compression topk(0.2)"]),
        (unequal_models, ["weight [4, 4] float32", "weight [5, 4] float32"]),
        (unequal_options, ["'momentum': 1.5"]),
        (unequal_overlap, ["overlap True, 2 buffers", "overlap False, 1 buffer"]),
        (other_software, ["tensorwire 9.9, torch 1.0"]),
    ],
)
def test_workers_that_differ_end_the_job_and_learn_in_what(program: Callable[[tw.Job], None], says: list[str]) -> None:
    ended = run_job(program)
    assert all(part in str(ended.cause) for part in says)
    assert all(e.startswith(("JobEnded", "PlanMismatch")) for e in ended.errors)


# ---- models and groups


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.frozen = torch.nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.frozen(self.embed(x))))
        return out


def tied_groups(net: Tied) -> list[dict[str, Any]]:
    named = dict(net.named_parameters())
    decay = [(n, p) for n, p in named.items() if p.dim() > 1]
    rest = [(n, p) for n, p in named.items() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.05}]


def train_tied(net: Tied, optimizer: torch.optim.Optimizer, batches: list[int]) -> dict[str, torch.Tensor]:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for step in range(4):
        optimizer.zero_grad()
        for b in batches:
            x = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(100 * b + step))
            loss = torch.nn.functional.cross_entropy(net(x), x)
            (loss / len(batches)).backward()
        optimizer.step()
        schedule.step()
    return state(net)


def tied_worker(job: tw.Job) -> dict[str, torch.Tensor]:
    torch.manual_seed(job.rank)
    net = Tied()
    optimizer = tw.torch.StoreOptimizer(tied_groups(net), torch.optim.AdamW, lr=0.01)
    result = train_tied(net, optimizer, [job.rank])
    assert net.head.weight is net.embed.weight
    return result


def test_tied_and_frozen_parameters_groups_and_a_scheduler() -> None:
    results = run_job(tied_worker, servers=2).ok()
    torch.manual_seed(0)
    net = Tied()
    stock = train_tied(net, torch.optim.AdamW(tied_groups(net), lr=0.01, fused=True), [0, 1])
    for mine in results:
        for key, value in mine.items():
            torch.testing.assert_close(value, stock[key])
    assert same(results[0], results[1])


def closure_step(job: tw.Job) -> float:
    """A step takes a closure, and returns the workers' mean of its losses."""
    net = model()
    optimizer = sgd(net)

    def closure() -> torch.Tensor:
        backward(net, job.rank, 0)
        return net(torch.ones(1, 32)).sum()

    return float(optimizer.step(closure))


# ---- counters


def steady_state(job: tw.Job) -> None:
    net = model()
    optimizer = sgd(net, momentum=0.9)
    for step in range(2):
        backward(net, job.rank, step)
        optimizer.step()
    with pickles_counted():
        before = counters.snapshot()
        for step in range(10):
            backward(net, job.rank, step)
            optimizer.step()
        counted = counters.since(before)
    assert counted.rpcs == counted.registrations == counted.pickles == 0
    assert counted.messages == 10 * (len(optimizer._parts[0].client.order) + 1)  # one a bucket, and the round's head
    assert counted.copied_bytes == 10 * sum(p.nbytes for p in net.parameters())  # from gradients to the slots, once
    with pickles_counted():
        before = counters.snapshot()
        pickle.loads(pickle.dumps(1))
        assert counters.since(before).pickles == 2


def reload(job: tw.Job) -> None:
    """Loading the values that are there changes nothing."""
    found = []
    for again in (True, False):
        net = model().bfloat16()
        optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.AdamW, lr=1e-4)
        for step in range(6):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            net.zero_grad()
            net(x).square().mean().backward()
            if again and step == 3:
                net.load_state_dict(net.state_dict())
            optimizer.step()
        found.append(state(net))
    assert same(*found)


OPTIMIZER = optimizer_module.__file__


def call_paths(job: tw.Job) -> None:
    """The signal of a bucket is at most five calls below ``step()``, both included, which end in ``Producer.send``."""
    net = model()
    optimizer = sgd(net)
    paths: list[list[str]] = []
    path: list[str] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and (path or (name == "step" and frame.f_code.co_filename == OPTIMIZER)):
            path.append(name)
            if frame.f_code is Producer.send.__code__:
                paths.append(path.copy())
        elif event == "return" and path:
            path.pop()

    for step in range(2):
        backward(net, job.rank, step)
        sys.setprofile(watch)
        optimizer.step()
        sys.setprofile(None)
    buckets = [path for path in paths if "push" in path]
    assert 0 < max(len(path) for path in buckets) <= 5, buckets  # the last of them calls the channel's signal()


PROGRAMS = [
    *(steady_state, call_paths, first_values, watch_between_steps, saved_sizes, write_intended, reload),
    *(modify, stray_write),
]
COMPARED = [partial(load, whole=True), partial(load, whole=False), closure_step]


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_what_users_do(device: str) -> None:
    first, second = run_job(in_turn, *COMPARED, *PROGRAMS, device=device).ok()
    assert all(map(same, first[:2], second[:2]))
    assert first[2] == second[2] != 0.0
