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
from tests.harness.jobs import for_each, in_turn, run_job
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
            for worker in self.workers.values():
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


def made(name: str = "mlp", seed: int = 0, **options: Any) -> tuple[torch.nn.Module, tw.torch.StoreOptimizer]:
    model = zoo.build(name, seed)
    options = {"overlap": True, "bucket_bytes": BUCKET, **OPTIONS, **options}
    return model, tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, **options)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def train(job: tw.Job, names: list[str], thread: bool = False, **options: Any) -> list[dict[str, torch.Tensor]]:
    if thread:
        by_thread()
    results = []
    for name in names:
        model, optimizer = made(name, job.rank, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            zoo.loss(model, job.rank, step).backward()
            optimizer.step()
        results.append(values(model))
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


@pytest.mark.parametrize(("device", "servers", "workers", "thread"), [("shm", 2, 3, False), ("tcp", 1, 2, True)])
def test_the_bits_of_one_process(device: str, servers: int, workers: int, thread: bool) -> None:
    names = ["mlp", "tied", "functional", "convolution"]
    results = run_job(train, names, thread, device=device, servers=servers, workers=workers).ok()
    for at, name in enumerate(names):
        assert_same(results[0][at], together(name, workers), name)


# ---- what users do


def pushes(job: tw.Job) -> None:
    """Backward sends everything, and step nothing."""
    model, optimizer = made()
    for step in range(3):
        optimizer.zero_grad()
        loss = zoo.loss(model, job.rank, step)
        begin = counters.snapshot()
        loss.backward()
        middle = counters.snapshot()
        optimizer.step()
    later = counters.since(middle)
    assert later.rpcs == later.registrations == later.pickles == later.messages == 0
    assert counters.since(begin).messages > 1  # the head and each bucket


def accumulate(job: tw.Job) -> None:
    """Between ``no_sync()`` and overlap all gradients are added up first."""
    found = []
    for overlap in (True, False):
        model, optimizer = made(overlap=overlap)
        for step in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for micro in range(2):
                    zoo.loss(model, job.rank, 10 * step + micro).backward()
            zoo.loss(model, job.rank, 10 * step + 2).backward()
            optimizer.step()
        found.append(values(model))
    assert_same(*found, "mlp")


def reading(job: tw.Job) -> None:
    """Code that reads parameters right after a step gets NaN or waits."""
    model, optimizer = made()
    held = list(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        zoo.loss(model, job.rank, number).backward()
        optimizer.step()

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
        seen.append(all(bool(p.isfinite().all()) for p in held))
    assert seen == [False, True, True, True, True, True]
    step(100)
    with torch.no_grad():
        assert zoo.loss(model, job.rank, 101).isfinite()
    assert type(copy.deepcopy(model)[0]._parameters) is dict  # type: ignore[index]


def past_the_module(job: tw.Job) -> None:
    """A value that has not come is not learned from."""
    model, optimizer = made()
    weight = next(model.parameters())
    zoo.loss(model, job.rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(errors.ArgumentError, match=r"^parameter '0.weight' was used before its new value had come"):
        weight.square().sum().backward()
    job.barrier()


def straddling(job: tw.Job) -> None:
    """A graph older than the last step cannot run backward."""
    for overlap in (False, True):
        model, optimizer = made(overlap=overlap)
        loss = zoo.loss(model, job.rank, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def loaded(job: tw.Job) -> None:
    """``load_state_dict`` between steps."""
    model, optimizer = made(lr=0.0, momentum=0.0)
    for step in range(3):
        optimizer.zero_grad()
        zoo.loss(model, job.rank, step).backward()
        optimizer.step()
        if step == 1:
            model.load_state_dict(zoo.build("mlp", seed=5 + job.rank).state_dict())
    assert_same(values(model), dict(zoo.build("mlp", seed=5).state_dict()), "mlp")


def grow_module(job: tw.Job) -> None:
    """A module, whose weight and bias are of two groups, waits for both, however they are got."""
    net = torch.nn.Linear(4, 4)
    optimizer = tw.torch.StoreOptimizer([("weight", net.weight)], torch.optim.SGD, lr=0.1, overlap=True)
    optimizer.add_param_group({"params": [("bias", net.bias)]})
    for step in range(4):
        optimizer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        got = [net.weight, net.bias] if step % 2 else list(net.parameters())
        assert all(bool(p.isfinite().all()) for p in got)


def slow(job: tw.Job) -> None:
    """All buckets have been copied when ``step`` returns."""
    by_thread()
    model, optimizer = made()
    (part,) = optimizer._parts
    push, copied = part.push, []

    def slowly(buckets: Sequence[Bucket], values: Any) -> None:
        threading.Event().wait(0.01)
        push(buckets, values)
        copied.extend(buckets)

    part.push = slowly  # type: ignore[method-assign]
    for step in range(2):
        optimizer.zero_grad()
        zoo.loss(model, job.rank, step).backward()
        optimizer.step()
        assert len(copied) == len(part.client.order) * (step + 1) > 0


def ends_after_backward(job: tw.Job) -> None:
    """So may a script."""
    by_thread()
    model, optimizer = made(max_grad_norm=1.0)
    zoo.loss(model, job.rank, 0).backward()
    assert optimizer.grad_norm is None


PROGRAMS = [pushes, accumulate, reading, past_the_module, straddling, loaded, grow_module, slow, ends_after_backward]


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_what_users_do(device: str) -> None:
    run_job(in_turn, *PROGRAMS, device=device).ok()


def clipped(job: tw.Job) -> None:
    """The norm is that of the reduced gradient."""
    expected, norms = clipped_together()
    for overlap in (True, False):
        model, optimizer = made(overlap=overlap, max_grad_norm=0.05, reduce="sum")
        found = []
        for step in range(3):
            optimizer.zero_grad()
            zoo.loss(model, job.rank, step).backward()
            optimizer.step()
            found.append(optimizer.grad_norm)
        assert found == pytest.approx(norms, rel=1e-6)
        torch.testing.assert_close(values(model), expected)


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


def unused(job: tw.Job) -> None:
    """A parameter unused on one worker counts as zero, and one that is used on none stays."""
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
    for layer, was, moved in zip(layers, start, (-3.0, -1.5, 0.0), strict=True):
        torch.testing.assert_close(layer.weight.detach() - was, torch.full((8, 8), moved))


def test_gradients_are_those_of_all_workers() -> None:
    run_job(in_turn, clipped, unused, servers=3, device="tcp").ok()


def compiled(job: tw.Job) -> dict[str, torch.Tensor]:
    """From the third step on."""
    model, optimizer = made()
    fast = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        zoo.loss(model if step < 2 else fast, job.rank, step).backward()
        optimizer.step()
    return values(model)


def compiled_blocks(job: tw.Job) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Blocks that were compiled before; whether parameters are awaited when these run, and not in ``step()``."""
    model = zoo.build("mlp")
    for i, block in enumerate(model):
        model[i] = torch.compile(block, backend="aot_eager")
    optimizer = tw.torch.StoreOptimizer(
        model.named_parameters(), torch.optim.SGD, overlap=True, bucket_bytes=BUCKET, **OPTIONS
    )
    later = []
    for step in range(STEPS):
        optimizer.zero_grad()
        zoo.loss(model, job.rank, step).backward()
        optimizer.step()
        (part,) = optimizer._parts
        later.append(all(map(part.behind, range(len(part.params)))))
    return {k.replace("_orig_mod.", ""): v for k, v in values(model).items()}, later


def test_blocks_that_are_compiled_are_awaited_when_they_run() -> None:
    for mine, later in run_job(compiled_blocks).ok():
        assert_same(mine, together("mlp"), "compiled blocks")
        assert later == [True] * STEPS


def test_a_model_that_is_compiled_late() -> None:
    for mine in run_job(compiled).ok():
        assert_same(mine, together("mlp"), "mlp")


# ---- what is refused


def misuse(job: tw.Job, how: str) -> str:
    if how in ("twice", "clipped", "replaced"):
        by_thread()
    model, optimizer = made("shared")
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


REFUSED = {
    "closure": "Unsupported: with overlap=True step() takes no closure",
    "scaler": "Unsupported: with overlap=True a GradScaler",
    "rate": "ArgumentError: an option of the optimizer changed after the first gradients",
    "group": "ArgumentError: add parameters before backward",
    "twice": "GradientModified: parameter 'last.bias' got a second gradient",
    "clipped": "was changed after it had been pushed: clip with StoreOptimizer(max_grad_norm=)",
    "replaced": "GradientModified: the gradient of 'inner.weight' was changed",
}


def test_what_does_not_go_together_is_refused_with_the_reason() -> None:
    for told in run_job(for_each, misuse, [(how,) for how in REFUSED]).ok():
        for found, (how, says) in zip(told, REFUSED.items(), strict=True):
            assert says in found, how


def breaks(job: tw.Job) -> tuple[str, str, list[str]]:
    """The first bucket cannot be pushed: what ``step`` and ``close`` say, and which threads are left."""
    by_thread()
    model, optimizer = made()

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


def close(job: tw.Job) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters after the job, and after one more step with a stock optimizer."""
    model, optimizer = made()
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


def test_a_closed_job_leaves_an_ordinary_model_with_the_last_values() -> None:
    (after, later), other = run_job(close).ok()
    assert_same(after, together("mlp"), "mlp")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after.values(), other[0].values(), strict=True))
    assert all(bool(value.isfinite().all()) for value in later.values())
    assert not torch.equal(after["0.weight"], later["0.weight"])
