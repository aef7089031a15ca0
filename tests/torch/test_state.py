"""The optimizer's state: saved by one worker, taken by a stock optimizer or a new job, refused if it does not fit."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store.rules import ELEMENTWISE, WHOLE, with_implementation
from tests.harness.jobs import in_turn, run_job
from tests.levels import mostly_long

BUCKET = 32 << 10
# In one piece, in several, over two servers, a scalar, and one that never has a gradient.
SHAPES: dict[str, tuple[int, ...]] = {"wide": (301, 257), "bias": (257,), "scalar": (), "unused": (12, 5)}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "RMSprop": {"lr": 1e-2, "centered": True, "momentum": 0.5},
}
Case = tuple[str, str]  # optimizer, dtype


def parameters(case: Case, seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {k: s for k, s in SHAPES.items() if case[0] != "Muon" or len(s) == 2}
    dtype = getattr(torch, case[1])
    return {k: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for k, s in shapes.items()}


def options(case: Case) -> dict[str, Any]:
    return OPTIONS.get(case[0], {"lr": 0.01})


def groups(params: dict[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two of them, the second with a rate of its own."""
    named = list(params.items())
    return [{"params": named[:1]}, {"params": named[1:], "lr": 0.02}] if len(named) > 1 else [{"params": named}]


def store(params: dict[str, torch.nn.Parameter], case: Case) -> tw.torch.StoreOptimizer:
    return tw.torch.StoreOptimizer(groups(params), getattr(torch.optim, case[0]), bucket_bytes=BUCKET, **options(case))


def stock(params: dict[str, torch.nn.Parameter], case: Case) -> torch.optim.Optimizer:
    cls = getattr(torch.optim, case[0])
    made: torch.optim.Optimizer = cls(groups(params), **with_implementation(cls, options(case)))
    return made


def gradient(name: str, p: torch.nn.Parameter, step: int) -> torch.Tensor | None:
    """The same on all workers: the mean of two is exact."""
    if name == "unused":
        return None
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * len(name) + step)).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: dict[str, torch.nn.Parameter], start: int, stop: int) -> None:
    for step in range(start, stop):
        for name, p in params.items():
            p.grad = gradient(name, p, step)
        optimizer.step()


def values(params: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {k: p.detach().clone() for k, p in params.items()}


def same(a: Any, b: Any) -> bool:
    """All of two nested states, bit for bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else bool(a == b)


def saved(*parts: Any) -> bytes:
    file = io.BytesIO()
    torch.save(parts, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


# ---- saving, and going on


def save_alone(job: tw.Job, cases: list[Case]) -> list[tuple[bytes, bytes]]:
    """Worker 0 saves after two steps while worker 1 already waits in the third; then four in all."""
    found = []
    for case in cases:
        params = parameters(case)
        optimizer = store(params, case)
        train(optimizer, params, 0, 2)
        data = saved(values(params), optimizer.state_dict()) if job.rank == 0 else b""
        train(optimizer, params, 2, 4)
        found.append((data, saved(values(params), optimizer.state_dict())))
    return found


def resume(job: tw.Job, cases: list[Case], checkpoints: list[bytes]) -> list[bytes]:
    """Every other case loads the values after the state."""
    found = []
    for late, (case, data) in enumerate(zip(cases, checkpoints, strict=True)):
        model, state = loaded(data)
        params = parameters(case, seed=7)
        module = torch.nn.Module()
        for name, p in params.items():
            module.register_parameter(name, p)
        if not late % 2:
            module.load_state_dict(model)
        optimizer = store(params, case)
        optimizer.load_state_dict(state)
        if late % 2:
            module.load_state_dict(model)
        assert same(optimizer.state_dict(), state), case
        train(optimizer, params, 2, 4)
        found.append(saved(values(params), optimizer.state_dict()))
    return found


def like_stock(case: Case, checkpoint: bytes, end: bytes) -> None:
    """What was saved, and what came of it, is what the stock optimizer has; which goes on with it in the same way."""
    params = parameters(case)
    optimizer = stock(params, case)
    train(optimizer, params, 0, 2)
    assert same(loaded(checkpoint), (values(params), optimizer.state_dict())), case
    train(optimizer, params, 2, 4)
    assert same(loaded(end), (values(params), optimizer.state_dict())), case
    params = parameters(case, seed=9)
    optimizer = stock(params, case)
    before, saved_state = loaded(checkpoint)
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(before[name])
    optimizer.load_state_dict(saved_state)
    train(optimizer, params, 2, 4)
    # Stock's own loading turns NAdam's product of float32 into the parameter's type.
    assert same(loaded(end)[0], values(params)) or case[1] == "float64", case


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_a_job_that_goes_on_with_a_saved_state_has_the_bits_of_one_that_never_stopped(device: str) -> None:
    """Of every optimizer, and with another number of servers. The state is that of the stock optimizer."""
    cases = [(name, "float32") for name in (*ELEMENTWISE, *WHOLE)] + [("NAdam", "float64"), ("AdamW", "bfloat16")]
    first = run_job(save_alone, cases, servers=1, device=device).ok()
    again = run_job(resume, cases, [data for data, _ in first[0]], servers=2, device=device).ok()
    for ends in (*again, [end for _, end in first[1]]):
        for case, found, (_, end) in zip(cases, ends, first[0], strict=True):
            assert same(loaded(found), loaded(end)), case
    for case, (checkpoint, end) in zip(cases, first[0], strict=True):
        if case[1] != "bfloat16":  # for which the store keeps a float32 copy
            like_stock(case, checkpoint, end)


# ---- copies


class Net(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(40, 30, dtype=dtype)
        self.second = torch.nn.Linear(30, 5, dtype=dtype)

    def backward(self, step: int) -> None:
        self.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(self.first.weight.dtype)
        self.second(self.first(x).relu()).square().mean().backward()


def adamw(net: Net) -> tw.torch.StoreOptimizer:
    return tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.AdamW, lr=0.01)


def copies(job: tw.Job) -> None:
    """A copy or a pickle is a stock optimizer that goes on alone."""
    net = Net()
    optimizer = adamw(net)
    for step in range(2):
        net.backward(step)
        optimizer.step()
    pair = copy.deepcopy((net, optimizer))
    pickled = pickle.loads(pickle.dumps((net, optimizer)))
    job.barrier()  # no worker goes on before the other has copied: a copy needs nobody
    for each in (pair, pickled, (net, optimizer)):
        each[0].backward(2)
        each[1].step()
    for model, other in (pair, pickled):
        model.load_state_dict(model.state_dict())  # its own: the store's parameters are not loaded
        assert type(other) is torch.optim.AdamW
        assert other.param_groups[0]["params"][0] is model.first.weight
        assert same(model.state_dict(), net.state_dict())
        assert same(other.state_dict(), optimizer.state_dict())
    net.backward(3)
    optimizer.step()


def copies_in_half(job: tw.Job) -> None:
    net = Net(torch.bfloat16)
    optimizer = adamw(net)
    for step in range(2):
        net.backward(step)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    master = state[0]["master"]
    assert torch.equal(master.bfloat16(), net.first.weight)
    assert not torch.equal(master, net.first.weight.float())
    assert state[0]["exp_avg"].dtype == torch.float32
    made = copy.deepcopy(optimizer)
    made.param_groups[0]["params"][0].grad = torch.ones(30, 40, dtype=torch.bfloat16)
    made.step()
    values = made.state[made.param_groups[0]["params"][0]]
    assert sorted(values) == ["exp_avg", "exp_avg_sq", "step"]
    assert values["exp_avg"].dtype == torch.bfloat16


# ---- loading


def pending(job: tw.Job) -> None:
    """What was loaded counts with the next step; worker 0's, whatever the others loaded."""
    net, calls = Net(), []
    optimizer = adamw(net)
    net.backward(0)
    optimizer.step()
    early = optimizer.state_dict()
    net.backward(1)
    optimizer.step()
    before = copy.deepcopy(net.state_dict())
    mine = copy.deepcopy(early)
    mine["param_groups"][0].update(lr=0.5 + job.rank, betas=(0.7, 0.8), fused=None, initial_lr=0.5)
    mine["state"][0]["exp_avg"] += job.rank
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after load"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before save"))
    optimizer.register_state_dict_post_hook(lambda o, d: calls.append("after save"))
    optimizer.load_state_dict(mine)
    assert same(optimizer.state_dict()["state"], mine["state"])
    assert same(net.state_dict(), before)
    assert calls == ["before load", "after load", "before save", "after save"]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["fused"]) == (0.5 + job.rank, 0.5, True)
    net.backward(2)
    twin = Net()
    twin.load_state_dict(net.state_dict())
    other = torch.optim.AdamW(twin.named_parameters(), lr=0.01, fused=True)
    early["param_groups"][0].update(lr=0.5, betas=(0.7, 0.8), initial_lr=0.5)
    other.load_state_dict(copy.deepcopy(early))
    twin.backward(2)
    other.step()
    optimizer.step()
    assert same(net.state_dict(), twin.state_dict())
    assert same(optimizer.state_dict()["state"], other.state_dict()["state"])
    empty = {**early, "state": {}}
    optimizer.load_state_dict(empty)
    net.backward(3)
    optimizer.step()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1.0


def changed(state: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(state)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


REFUSED: list[tuple[list[Any], Any, str]] = [
    (["param_groups"], [], "has 0 parameter groups, this optimizer 1"),
    (["param_groups"], None, "not the state_dict of an optimizer"),
    (["param_groups", 0, "params"], [0, 1, 2], "has 3 parameters, here it has 4"),
    (["param_groups", 0, "param_names", 1], "other", "'first.bias' is that of 'other'"),
    (["param_groups", 0, "lr"], None, "has no option 'lr'"),
    (["param_groups", 0, "lr"], torch.tensor(0.1), "option 'lr' is tensor(0.1"),
    (["param_groups", 0, "betas"], (0.5,), "option 'betas' is (0.5,)"),
    (["param_groups", 0, "lr"], -1.0, "Invalid learning rate"),
    (["state", 7], {}, "an entry for parameter 7, which is in none"),
    (["state", 1, "sum"], torch.zeros(30), "has 'sum', which AdamW does not keep"),
    (["state", 1, "master"], torch.zeros(30), "has 'master', which"),
    (["state", 1, "exp_avg"], None, "has no 'exp_avg'"),
    (["state", 1, "exp_avg"], torch.zeros(31), "has the shape [31] in the state, here [30]"),
    (["state", 1, "exp_avg"], torch.zeros(30, dtype=torch.int64), "is of torch.int64"),
    (["state", 1, "exp_avg"], torch.zeros(30, dtype=torch.float64), "would lose some of it"),
    (["state", 1, "step"], "2", "is of str"),
]


def refusals(job: tw.Job) -> None:
    """A state that does not fit is refused, and nothing changes."""
    net = Net()
    optimizer = adamw(net)
    net.backward(0)
    optimizer.step()
    before = optimizer.state_dict()
    for path, value, part in REFUSED:
        with pytest.raises(errors.ArgumentError) as caught:
            optimizer.load_state_dict(changed(before, path, value))
        assert "\n" not in str(caught.value)
        assert part in str(caught.value), (path, value)
        assert same(optimizer.state_dict(), before)
    adagrad = tw.torch.StoreOptimizer(Net().named_parameters(), torch.optim.Adagrad, lr=0.1)
    with pytest.raises(errors.ArgumentError, match="no 'step', which Adagrad needs"):
        adagrad.load_state_dict(changed(adagrad.state_dict(), ["state", 2], {}))
    net.backward(1)
    optimizer.step()


def masters(job: tw.Job) -> None:
    """A master that is not what the parameter was rounded from does not move the parameter."""
    net = Net(torch.bfloat16)
    optimizer = adamw(net)
    net.backward(0)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["master"] = state["state"][0]["master"] + torch.tensor([[100.0]] + [[0.0]] * 29)
    optimizer.load_state_dict(state)
    before = net.first.weight.detach().clone()
    net.zero_grad()
    optimizer.step()
    assert torch.equal(net.first.weight, before)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (net.first.weight - before).abs().max() < 1.0


# ---- overlap, and parameters added later


def several_stores(net: Net) -> tw.torch.StoreOptimizer:
    """With overlap; the second layer came later, to a store of its own."""
    first, second = net.first.named_parameters("first"), net.second.named_parameters("second")
    optimizer = tw.torch.StoreOptimizer(first, torch.optim.AdamW, lr=0.01, overlap=True)
    optimizer.add_param_group({"params": list(second), "lr": 0.02})
    return optimizer


def steps(net: Net, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        net.backward(step)
        optimizer.step()


def overlapping(job: tw.Job, dtype: torch.dtype) -> None:
    net = Net(dtype)
    optimizer = several_stores(net)
    steps(net, optimizer, 0, 3)
    state = optimizer.state_dict()
    model = {k: v.clone() for k, v in net.state_dict().items()}
    net.backward(3)
    for refused in (optimizer.state_dict, lambda: optimizer.load_state_dict(state)):
        with pytest.raises(errors.ArgumentError, match="between two steps"):
            refused()
    optimizer.step()
    steps(net, optimizer, 4, 5)
    optimizer.wait()
    end = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net.load_state_dict(model)
    optimizer.load_state_dict(state)
    steps(net, optimizer, 3, 5)
    optimizer.wait()
    twin = Net(dtype)
    other = several_stores(twin)
    twin.load_state_dict(model)
    other.load_state_dict(state)
    steps(twin, other, 3, 5)
    other.wait()
    again = [(n.state_dict(), o.state_dict()) for n, o in ((net, optimizer), (twin, other))]
    assert len(end[1]["state"]) == 4
    assert end[1]["param_groups"][1]["params"] == [2, 3]
    assert all(same(a, end) for a in again)


# ---- who asks, and when


def descriptors() -> set[tuple[str, str]]:
    """Numbers of open files, and what they are. The one that lists them is gone when it is asked about."""
    found = set()
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, str(path.readlink())))
    return found


def ask_at_once(job: tw.Job) -> None:
    """Both workers ask, several times, of two stores."""
    nets = [Net(), Net()]
    optimizers = [adamw(net) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        net.backward(0)
        optimizer.step()
    gc.disable()
    states = [[optimizer.state_dict() for optimizer in optimizers] for _ in range(2)]
    job.barrier()  # nobody asks while anybody counts
    files = descriptors()
    job.barrier()
    states += [[optimizer.state_dict() for optimizer in optimizers] for _ in range(6)]
    job.barrier()
    after = descriptors()
    assert len(after) == len(files), after ^ files  # what an ask opened is gone with it
    gc.enable()
    assert all(same(state, states[0][0]) for both in states for state in both)


def after_the_end(job: tw.Job) -> None:
    optimizer = adamw(Net())
    job.close()
    with pytest.raises(errors.TensorwireError, match=r"save before job.close\(\)"):
        optimizer.state_dict()


PROGRAMS = [ask_at_once, copies, copies_in_half, pending, refusals, masters]
OVERLAPPING = [partial(overlapping, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_what_users_do_with_state(device: str) -> None:
    run_job(in_turn, *PROGRAMS, *OVERLAPPING, after_the_end, servers=2, device=device).ok()
