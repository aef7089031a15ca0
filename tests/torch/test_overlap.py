"""Gradients pushed while backward runs, values awaited while forward runs: the same bits, and no old or mixed ones."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters
from tensorwire.store import send_window
from tensorwire.store.rules import with_implementation
from tensorwire.store.sharding import Bucket
from tensorwire.torch import overlap as overlapping
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.torch import zoo

STEPS = 4
BUCKET = 4096  # many buckets even in small models
OPTIONS = {"lr": 0.1, "momentum": 0.9}


def poison() -> None:
    """Servers ruin what they may write, at the first moment that they may: a worker that still reads it gets NaN."""
    from tensorwire.store.lockstep import Lockstep

    arriving = Lockstep._arriving

    def ruining(self: Lockstep) -> Iterator[int]:
        buckets = self._buckets
        for index in arriving(self):
            assert self.shard.spec.buffers == 2
            self.rule._bytes[self.step % 2][index].fill(0xFF)
            for worker in self.workers:
                pull = worker.pulls[index]
                if not pull.mapped:
                    at = self.step % pull.depth
                    pull.slot(self.step)
                    pull._channel.write(pull._source[at], pull._slots[at]).wait()
            yield index
        assert len(buckets) > 0

    Lockstep._arriving = ruining  # type: ignore[method-assign]


def by_thread() -> None:
    """Even the smallest buckets are copied by the thread, and sent one at a time."""
    overlapping._LARGE = 0
    send_window.AHEAD = 1


def train(job: tw.Job, names: list[str], thread: bool = False, **options: Any) -> list[dict[str, torch.Tensor]]:
    if thread:
        by_thread()
    results = []
    for name in names:
        model = zoo.build(name, seed=job.rank)
        optimizer = tw.torch.StoreOptimizer(
            model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **{**OPTIONS, **options}
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            zoo.loss(model, job.rank, step).backward()
            optimizer.step()
        results.append({k: v.clone() for k, v in model.state_dict().items()})
    return results


def together(name: str, workers: int = 2) -> dict[str, torch.Tensor]:
    """The same in one process, a model a worker, all of them with worker 0's first values. Returns worker 0's."""
    models = [zoo.build(name) for _ in range(workers)]
    stock = torch.optim.SGD(models[0].parameters(), **with_implementation(torch.optim.SGD, OPTIONS))
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            zoo.loss(model, rank, step).backward()
        for ours, *others in zip(*(m.parameters() for m in models), strict=True):
            for other in others:
                assert ours.grad is not None
                ours.grad += other.grad
            assert ours.grad is not None
            ours.grad /= workers
        stock.step()
        _share(models)
    return dict(models[0].state_dict())


@torch.no_grad()
def _share(models: list[torch.nn.Module]) -> None:
    for ours, *others in zip(*(m.parameters() for m in models), strict=True):
        for other in others:
            other.copy_(ours)


def assert_same(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], name: str) -> None:
    assert ours.keys() == stock.keys()
    for key, value in ours.items():
        assert torch.equal(value, stock[key]), f"{name}: {key}"


def huge(job: tw.Job, names: list[str], thread: bool) -> list[dict[str, torch.Tensor]]:
    """A norm that clips nothing lets the servers update only after every gradient: what they ruined stays so long."""
    return train(job, names, thread, max_grad_norm=1e30)


@pytest.mark.parametrize(
    ("device", "servers", "thread"),
    mostly_long([("shm", 1, False), ("shm", 1, True), ("tcp", 2, True)], [("shm", 1, True)]),
)
def test_no_worker_reads_what_may_be_updated(device: str, servers: int, thread: bool) -> None:
    names = list(zoo.MODELS)
    ended = run_job(huge, names, thread, device=device, servers=servers, prepare=poison)
    first, second = ended.ok()
    for name, mine, other in zip(names, first, second, strict=True):
        assert_same(mine, together(name), name)
        parameters = {k for k, _ in zoo.build(name).named_parameters()}
        assert_same({k: mine[k] for k in parameters}, {k: other[k] for k in parameters}, name)


@pytest.mark.parametrize(
    ("device", "servers", "workers", "thread"), [("shm", 2, 3, False), ("shm", 2, 2, True), ("tcp", 1, 1, True)]
)
def test_the_bits_of_one_process(device: str, servers: int, workers: int, thread: bool) -> None:
    names = ["mlp", "tied", "functional", "convolution"]
    results = run_job(train, names, thread, device=device, servers=servers, workers=workers).ok()
    for at, name in enumerate(names):
        assert_same(results[0][at], together(name, workers), name)


def pushes(job: tw.Job) -> tuple[int, int]:
    """Messages that were sent inside of backward, and inside of step."""
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = zoo.loss(model, job.rank, step)
        begin = counters.snapshot()
        loss.backward()
        middle = counters.snapshot()
        optimizer.step()
    later = counters.since(middle)
    assert later.rpcs == later.registrations == later.pickles == 0
    return counters.since(begin).messages - later.messages, later.messages


def test_backward_pushes_everything() -> None:
    for in_backward, in_step in run_job(pushes).ok():
        assert in_backward > 1  # the head and each bucket
        assert in_step == 0


def slow(job: tw.Job) -> list[tuple[int, int]]:
    """By step: how many buckets there are, and how many of them were copied when ``step`` returned."""
    by_thread()
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )
    (part,) = optimizer._parts
    push, copied = part.push, []

    def slowly(buckets: Sequence[Bucket], values: Any) -> None:
        threading.Event().wait(0.01)
        push(buckets, values)
        copied.extend(buckets)

    part.push = slowly  # type: ignore[method-assign]
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        zoo.loss(model, job.rank, step).backward()
        optimizer.step()
        seen.append((len(part.client.order) * (step + 1), len(copied)))
    return seen


def test_gradients_are_copied_when_step_returns() -> None:
    for seen in run_job(slow).ok():
        for buckets, copied in seen:
            assert copied == buckets > 0


def accumulate(job: tw.Job, overlap: bool) -> dict[str, torch.Tensor]:
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=overlap, bucket_bytes=BUCKET, **OPTIONS
    )
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            for micro in range(2):
                zoo.loss(model, job.rank, 10 * step + micro).backward()
        zoo.loss(model, job.rank, 10 * step + 2).backward()
        optimizer.step()
    return {k: v.clone() for k, v in model.state_dict().items()}


def test_no_sync_accumulates() -> None:
    with_overlap, without = (run_job(accumulate, overlap).ok()[0] for overlap in (True, False))
    assert_same(with_overlap, without, "mlp")


def clipped(job: tw.Job, overlap: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        overlap=overlap,
        max_grad_norm=0.05,
        reduce="sum",
        bucket_bytes=BUCKET,
        **OPTIONS,
    )
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        zoo.loss(model, job.rank, step).backward()
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm)
    return {k: v.clone() for k, v in model.state_dict().items()}, norms


def clipped_together() -> tuple[dict[str, torch.Tensor], list[float]]:
    model = zoo.build("mlp")
    stock = torch.optim.SGD(model.parameters(), **with_implementation(torch.optim.SGD, OPTIONS))
    norms = []
    for step in range(3):
        stock.zero_grad()
        (zoo.loss(model, 0, step) + zoo.loss(model, 1, step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        stock.step()
    return dict(model.state_dict()), norms


def test_the_norm_is_that_of_the_reduced_gradient() -> None:
    expected, norms = clipped_together()
    found = [
        run_job(clipped, overlap, servers=servers, device=device).ok()
        for overlap, servers, device in ((True, 2, "tcp"), (False, 1, "shm"), (True, 3, "shm"))
    ]
    for (mine, my_norms), (other, other_norms) in found:
        assert my_norms == other_norms
        assert my_norms == pytest.approx(norms, rel=1e-6)
        assert_same(mine, other, "mlp")
        for key, value in mine.items():
            torch.testing.assert_close(value, expected[key])


def reading(job: tw.Job) -> list[bool]:
    """What code sees that reads parameters right after a step."""
    model = zoo.build("mlp")
    held = list(model.parameters())
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        zoo.loss(model, job.rank, number).backward()
        optimizer.step()

    def is_whole() -> bool:
        return all(bool(p.isfinite().all()) for p in held)

    seen = []
    for number, look in enumerate(
        (
            lambda: None,
            optimizer.wait,
            lambda: list(model.parameters()),
            lambda: torch.save(model.state_dict(), io.BytesIO()),
            lambda: copy.deepcopy(model),
            lambda: pickle.dumps(model),
        )
    ):
        step(2 * number)
        step(2 * number + 1)
        look()
        seen.append(is_whole())
    step(100)
    with torch.no_grad():
        seen.append(bool(zoo.loss(model, job.rank, 101).isfinite()))
    assert type(copy.deepcopy(model)[0]._parameters) is dict
    return seen


def test_who_reads_a_parameter_before_it_has_come_gets_nan_or_waits() -> None:
    for seen in run_job(reading).ok():
        assert seen == [False, True, True, True, True, True, True]


def past_the_module(job: tw.Job) -> str:
    model = zoo.build("mlp")
    weight = next(model.parameters())
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )
    zoo.loss(model, job.rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        weight.square().sum().backward()
    except errors.ArgumentError as error:
        job.barrier()
        return str(error)
    return ""


def test_learning_from_a_value_that_has_not_come_is_an_error() -> None:
    for told in run_job(past_the_module).ok():
        assert told.startswith("parameter '0.weight' was used before its new value had come")


def compiled(job: tw.Job, late: bool) -> dict[str, torch.Tensor]:
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )
    fast = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        zoo.loss(model if late and step < 2 else fast, job.rank, step).backward()
        optimizer.step()
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("late", [True, pytest.param(False, marks=pytest.mark.long)])
def test_compiled_models(late: bool) -> None:
    for mine in run_job(compiled, late).ok():
        assert_same(mine, together("mlp"), "mlp")


def straddling(job: tw.Job, overlap: bool) -> str:
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, overlap=overlap, **OPTIONS)
    loss = zoo.loss(model, job.rank, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_older_than_the_last_step_cannot_run_backward(overlap: bool) -> None:
    for told in run_job(straddling, overlap).ok():
        assert "modified by an inplace operation" in told


def unused(job: tw.Job) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    model = torch.nn.ModuleList(layers)
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=1.0, overlap=True, bucket_bytes=BUCKET
    )
    start = [layer.weight.detach().clone() for layer in layers]
    for _ in range(3):
        optimizer.zero_grad()
        used = layers[0](torch.ones(1, 8))
        if job.rank == 0:
            used = used + layers[1](torch.ones(1, 8))
        used.sum().backward()
        optimizer.step()
    optimizer.wait()
    return [layer.weight.detach() - was for layer, was in zip(layers, start, strict=True)]


def test_a_parameter_unused_on_one_worker_counts_as_zero_and_on_all_stays() -> None:
    for both, one, none in run_job(unused, device="tcp").ok():
        torch.testing.assert_close(both, torch.full((8, 8), -3.0))
        torch.testing.assert_close(one, torch.full((8, 8), -1.5))
        assert not none.any()


# ---- what is refused


def misuse(job: tw.Job, how: str, thread: bool) -> str:
    if thread:
        by_thread()
    model = zoo.build("shared")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )
    try:
        optimizer.zero_grad()
        if how == "closure":
            optimizer.step(lambda: zoo.loss(model, job.rank, 0))
        elif how == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(zoo.loss(model, job.rank, 0)).backward()
            scaler.step(optimizer)
        elif how == "twice":
            zoo.loss(model, job.rank, 0).backward()
            zoo.loss(model, job.rank, 1).backward()
        else:
            zoo.loss(model, job.rank, 0).backward()
            if how == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            elif how == "replaced":
                next(model.parameters()).grad = None
            elif how == "rate":
                optimizer.param_groups[0]["lr"] = 0.5
            elif how == "group":
                optimizer.add_param_group({"params": [("new", torch.nn.Parameter(torch.zeros(3)))]})
            optimizer.step()
    except (errors.TensorwireError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
        job.barrier()  # nobody's end is to come before the others' error
        return told
    return ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("closure", "Unsupported: with overlap=True step() takes no closure"),
        ("scaler", "Unsupported: with overlap=True a GradScaler"),
        ("twice", "GradientModified: parameter 'last.bias' got a second gradient"),
        ("clipped", "was changed after it had been pushed: clip with StoreOptimizer(max_grad_norm=)"),
        ("replaced", "GradientModified: the gradient of 'inner.weight' was changed"),
        ("rate", "ArgumentError: an option of the optimizer changed after the first gradients"),
        ("group", "ArgumentError: add parameters before backward"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(how: str, says: str) -> None:
    for told in run_job(misuse, how, how in ("twice", "clipped", "replaced")).ok():
        assert says in told


def breaks(job: tw.Job) -> tuple[str, str, list[str]]:
    """The first bucket cannot be pushed: what ``step`` and ``close`` say, and which threads are left."""
    by_thread()
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )

    def fail(*_: object) -> None:
        raise errors.WaitTimeout("the channel stayed full")

    slot, optimizer._parts[0].client.slot = optimizer._parts[0].client.slot, fail  # type: ignore[method-assign]
    told = ""
    try:
        zoo.loss(model, job.rank, 0).backward()
        optimizer.step()
    except errors.TensorwireError as error:
        told = f"{type(error).__name__}: {error}"
    optimizer._parts[0].client.slot = slot  # type: ignore[method-assign]
    with pytest.raises(errors.StepInterrupted) as left:
        job.close()
    return told, left.typename, [t.name for t in threading.enumerate() if t.name == "tensorwire-push"]


def test_an_error_of_the_thread_comes_out_of_the_step_and_the_job_can_end() -> None:
    ((told, left, threads),) = run_job(breaks, workers=1).results
    assert "WaitTimeout: the channel stayed full" in told
    assert (left, threads) == ("StepInterrupted", [])


def loaded(job: tw.Job) -> dict[str, torch.Tensor]:
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.0, overlap=True)
    for step in range(3):
        optimizer.zero_grad()
        zoo.loss(model, job.rank, step).backward()
        optimizer.step()
        if step == 1:
            model.load_state_dict(zoo.build("mlp", seed=5 + job.rank).state_dict())
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_load_state_dict_between_overlapped_steps(device: str) -> None:
    for mine in run_job(loaded, device=device).ok():
        assert_same(mine, dict(zoo.build("mlp", seed=5).state_dict()), "mlp")


def ends_after_backward(job: tw.Job) -> bool:
    by_thread()
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, max_grad_norm=1.0, bucket_bytes=BUCKET, **OPTIONS
    )
    zoo.loss(model, job.rank, 0).backward()
    return optimizer.grad_norm is None


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_script_may_end_after_backward(device: str) -> None:
    assert run_job(ends_after_backward, device=device).ok() == [True, True]


def grow(job: tw.Job, overlap: bool) -> list[torch.Tensor]:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = tw.torch.StoreOptimizer(first.named_parameters("first"), torch.optim.SGD, lr=1.0, overlap=overlap)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(second.named_parameters("second")), "lr": 0.5})
        optimizer.zero_grad()
        (first(torch.ones(1, 4)) + second(torch.ones(1, 4))).sum().backward()
        optimizer.step()
    optimizer.wait()
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["first.weight", "first.bias"],
        ["second.weight", "second.bias"],
    ]
    return [p.detach().clone() for p in (first.bias, second.bias)]


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_may_be_added_later(overlap: bool) -> None:
    results = run_job(grow, overlap).ok()
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


def grow_module(job: tw.Job) -> list[bool]:
    """Weight and bias of one module are of two groups. Whether they show numbers, got in two ways, after each step."""
    net = torch.nn.Linear(4, 4)
    optimizer = tw.torch.StoreOptimizer([("weight", net.weight)], torch.optim.SGD, lr=0.1, overlap=True)
    optimizer.add_param_group({"params": [("bias", net.bias)]})
    shown = []
    for step in range(4):
        optimizer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        got = [net.weight, net.bias] if step % 2 else list(net.parameters())
        shown.append(all(bool(p.isfinite().all()) for p in got))
    return shown


def test_a_module_waits_for_the_parameters_of_every_group() -> None:
    assert run_job(grow_module).ok() == [[True] * 4] * 2


def close(job: tw.Job, overlap: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters after the job, and after one more step with a stock optimizer."""
    model = zoo.build("mlp")
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, overlap=overlap, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        zoo.loss(model, job.rank, step).backward()
        optimizer.step()
    job.close()
    for module in model.modules():
        assert type(module._parameters) is dict
        assert not module._forward_pre_hooks
        assert not module._load_state_dict_post_hooks
        assert not any(p._post_accumulate_grad_hooks for p in module._parameters.values() if p is not None)
    after = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(after)
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    stock.zero_grad()
    zoo.loss(model, 0, STEPS).backward()
    stock.step()
    return after, dict(model.state_dict())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closed_job_leaves_an_ordinary_model_with_the_last_values(overlap: bool) -> None:
    (after, later), other = run_job(close, overlap).ok()
    assert_same(after, together("mlp"), "mlp")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after.values(), other[0].values(), strict=True))
    assert all(bool(value.isfinite().all()) for value in later.values())
    assert not torch.equal(after["0.weight"], later["0.weight"])
