"""What users do with a StoreOptimizer, and what they must not do unnoticed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.edge import Producer
from tensorwire.observe import counters, pickles_counted
from tensorwire.torch import optimizer as optimizer_module
from tests.harness.jobs import Ended, run_job


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


def first_values(job: tw.Job) -> dict[str, torch.Tensor]:
    net = model(seed=job.rank)
    sgd(net)
    return state(net)


def test_worker_0s_values_win_at_the_start() -> None:
    for mine in run_job(first_values).ok():
        assert same(mine, state(model(0)))


def watch_between_steps(job: tw.Job) -> bool:
    net = model()
    optimizer = sgd(net)
    steady = True
    for step in range(5):
        backward(net, job.rank, step)
        optimizer.step()
        before = state(net)
        if job.rank == 0:  # the other worker runs ahead as far as it can
            job.barrier()
        else:
            backward(net, job.rank, step + 1)
            job.barrier()
        steady = steady and same(before, state(net))
    return steady


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_parameters_do_not_change_between_steps(device: str) -> None:
    assert run_job(watch_between_steps, device=device).ok() == [True, True]


def saved_sizes(job: tw.Job) -> tuple[int, int]:
    def size(net: torch.nn.Module) -> int:
        file = io.BytesIO()
        torch.save(net[0].bias, file)
        return file.tell()

    net = model()
    before = size(net)
    sgd(net)
    return before, size(net)


def test_saving_one_parameter_writes_one() -> None:
    for before, after in run_job(saved_sizes).ok():
        assert after < before + 512


def load(job: tw.Job, whole: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
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
    return state(net), state(other)


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("whole", [True, False])
def test_load_state_dict_writes_through_the_store(device: str, whole: bool) -> None:
    results = run_job(load, whole, device=device).ok()
    for ours, expected in results:
        for key in ours:
            torch.testing.assert_close(ours[key], expected[key])
    assert same(results[0][0], results[1][0])


def load_alone(job: tw.Job) -> None:
    net = model()
    optimizer = sgd(net)
    if job.rank == 1:
        net.load_state_dict(model(3).state_dict())
    backward(net, job.rank, 0)
    optimizer.step()


def test_loading_on_one_worker_only_ends_the_job() -> None:
    ended = run_job(load_alone)
    assert ended.cause is not None
    assert str(ended.cause) == (
        "worker 1 loaded parameters before step 1 and worker 0 did not: call load_state_dict on every worker"
    )
    assert all("JobEnded" in e for e in ended.errors)


def write_intended(job: tw.Job) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = sgd(net)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(float(job.rank + 1))
    optimizer.write_parameters()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return state(net)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_write_parameters_takes_worker_0s_values(device: str) -> None:
    for mine in run_job(write_intended, device=device).ok():
        assert all(torch.equal(v, torch.ones_like(v)) for v in mine.values())


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


def modify(job: tw.Job, change: Callable[[torch.nn.Sequential], None]) -> str:
    net = model()
    optimizer = sgd(net)
    for step in range(2):
        backward(net, job.rank, step)
        optimizer.step()
    job.barrier()
    backward(net, job.rank, 2)
    change(net)
    try:
        optimizer.step()
    except errors.ParameterModified as error:
        return str(error)
    return ""


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("change", "name"),
    [(in_place, "2.bias"), (through_data, "0.weight"), (to_half, "0.weight"), (new_data, "0.bias")],
)
def test_changed_parameters_are_noticed(change: Callable[[torch.nn.Sequential], None], name: str, device: str) -> None:
    for message in run_job(modify, change, device=device).ok():
        assert f"parameter '{name}'" in message


def stray_write(job: tw.Job) -> bool:
    """A stray write of one worker is not seen by the other, and hurts nobody's memory."""
    net = model()
    sgd(net)
    before = state(net)
    if job.rank == 0:
        net[0].weight.data.fill_(9.0)
    job.barrier()
    return same(before, state(net))


def test_a_stray_write_stays_with_its_worker() -> None:
    assert run_job(stray_write).ok() == [False, True]


def refused(job: tw.Job) -> list[str]:
    net = model()
    found = []

    def attempt(kind: type[Exception], call: Callable[[], Any]) -> None:
        try:
            call()
        except kind as error:
            found.append(str(error))

    opt = tw.torch.StoreOptimizer
    attempt(errors.Unsupported, lambda: opt(net.named_parameters(), torch.optim.LBFGS))
    attempt(errors.ArgumentError, lambda: opt(net.parameters(), torch.optim.SGD, lr=0.1))
    attempt(errors.ArgumentError, lambda: opt(net.named_parameters(), torch.optim.SGD, lr=-1.0))
    attempt(errors.ArgumentError, lambda: opt(net.named_parameters(), torch.optim.SGD, lr=0.1, momentun=0.9))
    attempt(errors.Unsupported, lambda: opt(net.named_parameters(), torch.optim.SGD, lr=torch.tensor(0.1)))
    attempt(errors.ArgumentError, lambda: opt([], torch.optim.SGD, lr=0.1))
    attempt(errors.ArgumentError, lambda: opt([("a", net[0].bias), ("a", net[2].bias)], torch.optim.SGD, lr=0.1))
    embedding = torch.nn.Embedding(10, 4)
    optimizer = opt(embedding.named_parameters(), torch.optim.SGD, lr=0.1)
    embedding.sparse = True
    embedding(torch.tensor([1, 2])).sum().backward()
    attempt(errors.Unsupported, optimizer.step)
    optimizer.zero_grad()
    attempt(errors.ArgumentError, lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]}))
    attempt(errors.Unsupported, lambda: embedding.load_state_dict(embedding.state_dict(), assign=True))
    return found


def test_what_cannot_work_is_refused_with_the_reason() -> None:
    expected = [
        "LBFGS",
        "named_parameters",
        "Invalid learning rate",
        "momentun",
        "'lr' is a Tensor",
        "no parameters",
        "two parameters have the name 'a'",
        "sparse gradient",
        "has no name",
        "assign",
    ]
    for messages in run_job(refused).ok():
        assert len(messages) == len(expected)
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def unequal_models(job: tw.Job) -> None:
    net = torch.nn.Linear(4, 4 + job.rank)
    sgd(net)


def test_unequal_models_end_the_job_with_a_diff() -> None:
    ended: Ended = run_job(unequal_models)
    assert ended.cause is not None
    text = str(ended.cause)
    assert "weight [4, 4] float32" in text
    assert "weight [5, 4] float32" in text
    assert all(e.startswith(("JobEnded", "PlanMismatch")) for e in ended.errors)


def unequal_options(job: tw.Job) -> None:
    sgd(model(), momentum=0.5 + job.rank)


def test_unequal_options_end_the_job() -> None:
    ended = run_job(unequal_options)
    assert ended.cause is not None
    assert "'momentum': 1.5" in str(ended.cause)


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
    net = model()
    optimizer = sgd(net)

    def closure() -> torch.Tensor:
        backward(net, job.rank, 0)
        return net(torch.ones(1, 32)).sum()

    return float(optimizer.step(closure))


def test_step_takes_a_closure() -> None:
    first, second = run_job(closure_step).ok()
    assert first == second != 0.0


# ---- counters


def steady_state(job: tw.Job) -> tuple[Any, int, int]:
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
        after = counters.since(before)
    return after, len(optimizer._parts[0].client.order), sum(p.nbytes for p in net.parameters())


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_the_training_loop_in_steady_state(device: str) -> None:
    for counted, buckets, nbytes in run_job(steady_state, device=device).ok():
        assert counted.rpcs == 0
        assert counted.registrations == 0
        assert counted.pickles == 0
        assert counted.messages == 10 * (buckets + 1)  # one a bucket, and the round's head
        assert counted.copied_bytes == 10 * nbytes  # from private gradients to the slots, once


def pickling(job: tw.Job) -> int:
    import pickle

    with pickles_counted():
        before = counters.pickles
        pickle.loads(pickle.dumps(1))
        return counters.pickles - before


def test_pickles_are_counted() -> None:
    assert run_job(pickling, workers=1).ok() == [2]


def other_software(job: tw.Job) -> None:
    import tensorwire.torch.part as module

    if job.rank == 1:
        module.versions = lambda: "tensorwire 9.9, torch 1.0"  # type: ignore[attr-defined]
    sgd(model())


def test_workers_with_other_software_end_the_job() -> None:
    ended = run_job(other_software)
    assert ended.cause is not None
    assert "tensorwire 9.9, torch 1.0" in str(ended.cause)


def reload(job: tw.Job, again: bool) -> dict[str, torch.Tensor]:
    net = model().bfloat16()
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.AdamW, lr=1e-4)
    for step in range(6):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        net.zero_grad()
        net(x).square().mean().backward()
        if again and step == 3:
            net.load_state_dict(net.state_dict())
        optimizer.step()
    return state(net)


def test_loading_the_values_that_are_there_changes_nothing() -> None:
    with_loading, without = (run_job(reload, again).ok()[0] for again in (True, False))
    assert same(with_loading, without)


OPTIMIZER = optimizer_module.__file__


def call_paths(job: tw.Job) -> list[list[str]]:
    """The calls from ``step()`` to each ``Producer.send``, which signals; both included."""
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
    return paths


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_the_signal_of_a_bucket_is_at_most_five_calls_below_step(device: str) -> None:
    for paths in run_job(call_paths, device=device).ok():
        buckets = [path for path in paths if "push" in path]
        assert buckets
        assert max(len(path) for path in buckets) <= 5, buckets  # the last of them calls the channel's signal()
