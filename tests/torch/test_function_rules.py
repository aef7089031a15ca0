"""Functions as rules, and rules by name: on servers they have the bits of one process."""

from __future__ import annotations

import copy
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import Async, KeyValue, LocalSGD, Sync
from tensorwire.store.fates import Fate
from tensorwire.store.modes import Mode
from tensorwire.trace.push_fates import problems, read_fates
from tests.harness.jobs import for_each, run_job

MODULE = '''
import functools
import torch

def momentum(parameter, gradient, state, options):
    """Looks at whole tensors, and keeps a tensor and a number."""
    if "mean" not in state:
        state["mean"], state["updates"] = torch.zeros_like(parameter), 0
    state["updates"] += 1
    state["mean"].lerp_(gradient / (gradient.norm() + 1), options["betas"][0])
    parameter.sub_(state["mean"], alpha=options["lr"] / state["updates"])

def cut(parameter, gradient, state, options):
    """May be given parts."""
    state["sum"] = state.get("sum", 0) + gradient.abs()
    parameter.sub_(options["lr"] * gradient / (state["sum"] + 1))

cut.elementwise = True

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = p.grad.clone()
                p.sub_(group["lr"] * p.grad.sign())

class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups."""
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr, k=0))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.sub_(group["lr"] / group["k"] * p.grad)

def short(parameter, gradient):
    parameter.sub_(gradient)

def inner():
    def local(parameter, gradient, state, options):
        parameter.sub_(gradient)
    return local

anonymous = lambda parameter, gradient, state, options: None
number = 3
'''
SHAPES = {"weight": (70, 60), "bias": (5,), "half": (9, 3), "rare": (4,)}
RULES = [("momentum", {"lr": 0.5, "betas": (0.3, 0.5)}), ("cut", {"lr": 0.5})]
STEPS = 5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / f"{name_in(str(tmp_path))}.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(tmp_path)


def name_in(folder: str) -> str:
    return "rules_" + "".join(c if c.isalnum() else "_" for c in Path(folder).name)


def rules(folder: str) -> Any:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name_in(folder))


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    values = {k: torch.randn(s, generator=generator) for k, s in SHAPES.items()}
    values["half"] = values["half"].bfloat16()
    return {k: torch.nn.Parameter(v) for k, v in values.items()}


def groups(params: dict[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
    named = list(params.items())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.25}]


def fill(params: dict[str, torch.nn.Parameter], rank: int, step: int) -> None:
    """Gradients that depend on the values."""
    for name, p in params.items():
        there = name != "rare" or (step + rank) % 2
        p.grad = (p.detach().float().sin() + rank + 0.1 * step).to(p.dtype) if there else None


def train(job: tw.Job, folder: str, mode: Mode, at: int) -> list[dict[str, torch.Tensor]]:
    """The values before each step, and after the last."""
    name, options = RULES[at]
    params = parameters()
    function = getattr(rules(folder), name)
    rule = function if at else f"{name_in(folder)}:{name}"
    store = tw.torch.StoreOptimizer(groups(params), rule, mode=mode, bucket_bytes=4096, **options)
    plan = store._parts[0].plan
    assert len({p.tensor for b in plan.in_order() for p in b.pieces if p.start}) == (1 if name == "cut" else 0)
    seen = []
    for step in range(STEPS):
        store.param_groups[0]["lr"] = 0.5 / (1 + step)
        fill(params, job.rank, step)
        seen.append({k: p.detach().clone() for k, p in params.items()})
        store.step()
    return [*seen, {k: p.detach().clone() for k, p in params.items()}]


class Alone:
    """The same function in one process, on whole float32 tensors."""

    def __init__(self, folder: str, at: int) -> None:
        name, self.options = RULES[at]
        self.function = getattr(rules(folder), name)
        self.shown = {k: p.detach() for k, p in parameters().items()}
        self.values = {k: v.float() for k, v in self.shown.items()}
        self.state: dict[str, dict[str, Any]] = {k: {} for k in self.values}

    def update(self, gradients: dict[str, list[torch.Tensor]], step: int, divisor: int) -> None:
        for name, found in gradients.items():
            lr = 0.25 if name in ("half", "rare") else 0.5 / (1 + step)
            total = sum(g.float() for g in found) / divisor
            self.function(self.values[name], total, self.state[name], {**self.options, "lr": lr})
            self.shown[name] = self.values[name].to(self.shown[name].dtype)


@pytest.mark.parametrize(("device", "servers"), [("shm", 2), pytest.param("tcp", 1, marks=pytest.mark.long)])
def test_in_rounds_of_all_workers(folder: str, device: str, servers: int) -> None:
    cases = [(folder, Sync(), at) for at in range(len(RULES))]
    results = run_job(for_each, train, cases, servers=servers, device=device).ok()
    for at, found in enumerate(zip(*results, strict=True)):
        alone = Alone(folder, at)
        for step in range(STEPS + 1):
            for seen in found:
                for name, value in alone.shown.items():
                    assert torch.equal(seen[step][name], value), (at, step, name)
            pushed: dict[str, list[torch.Tensor]] = {}
            for rank in range(2):
                params = {k: torch.nn.Parameter(v) for k, v in alone.shown.items()}
                fill(params, rank, step)
                for name, p in params.items():
                    if p.grad is not None:
                        pushed.setdefault(name, []).append(p.grad)
            alone.update(pushed, step, 2)


def test_each_push_by_itself(folder: str, tmp_path: Path) -> None:
    found = run_job(train, folder, Async(), 0, fates=tmp_path / "fates").ok()
    lines = read_fates([tmp_path / "fates"])
    assert problems(lines) == []
    alone = Alone(folder, 0)
    fates = sorted((f for f in lines if isinstance(f, Fate) and f.bucket == 0), key=lambda f: f.version)
    assert len(fates) == 2 * STEPS
    for fate in fates:
        step = fate.round - 2  # round 1 brought the first values
        params = {k: torch.nn.Parameter(v) for k, v in found[fate.worker][step].items()}
        fill(params, fate.worker, step)
        alone.update({k: [p.grad] for k, p in params.items() if p.grad is not None}, step, 1)
    for name, value in alone.shown.items():  # whoever pushed last has all of it
        assert torch.equal(found[fates[-1].worker][-1][name], value), name


# ---- state


def steps(store: Any, params: dict[str, torch.nn.Parameter], first: int, stop: int) -> None:
    for step in range(first, stop):
        fill(params, 0, step)
        store.step()


def save(job: tw.Job, folder: str) -> list[Any]:
    found = []
    for name, options in RULES:
        params = parameters()
        store = tw.torch.StoreOptimizer(groups(params), getattr(rules(folder), name), bucket_bytes=4096, **options)
        steps(store, params, 0, 3)
        state = copy.deepcopy(store.state_dict())
        values = {k: p.detach().clone() for k, p in params.items()}
        copied, alone = copy.deepcopy((params, store))
        steps(store, params, 3, STEPS)
        steps(alone, copied, 3, STEPS)
        assert all(torch.equal(copied[k], params[k]) for k in ("weight", "bias", "rare"))
        buffer = io.BytesIO()
        torch.save((state, values, {k: p.detach() for k, p in params.items()}), buffer)
        found.append(buffer.getvalue())
    return found


def go_on(job: tw.Job, folder: str, saved: list[bytes]) -> list[bool]:
    found = []
    for (name, options), data in zip(RULES, saved, strict=True):
        state, values, end = torch.load(io.BytesIO(data))
        params = {k: torch.nn.Parameter(v) for k, v in values.items()}
        store = tw.torch.StoreOptimizer(groups(params), getattr(rules(folder), name), bucket_bytes=4096, **options)
        store.load_state_dict(state)
        steps(store, params, 3, STEPS)
        found.append(all(torch.equal(params[k], end[k]) for k in end))
    return found


def test_a_functions_state_is_saved_and_goes_on_with_other_servers(folder: str) -> None:
    saved = run_job(save, folder, workers=1).ok()[0]
    assert run_job(go_on, folder, saved, workers=1, servers=2).ok() == [[True, True]]


# ---- rules by name


def by_name(job: tw.Job) -> list[list[float]]:
    found = []
    cases: list[tuple[str, dict[str, Any]]] = [
        ("sum", {}),
        ("sum", {"reduce": "sum"}),
        ("assign", {}),
        ("assign", {"reduce": "sum"}),
        ("mean", {}),
        ("SGD", {"lr": 1.0}),
        ("sum", {"mode": LocalSGD(every=1)}),
    ]
    for rule, options in cases:
        p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        store = tw.torch.StoreOptimizer([("p", p)], rule, **options)
        for _ in range(2):
            p.grad = torch.tensor([1.0, 3.0]) * (1 + 2 * job.rank)
            store.step()
        store.load_state_dict(store.state_dict())
        store.step()
        found.append(p.tolist())
    return found


def test_rules_by_name() -> None:
    expected = [[7.0, 20.0], [13.0, 38.0], [2.0, 6.0], [4.0, 12.0], [2.0, 6.0], [-5.0, -16.0], [7.0, 20.0]]
    assert run_job(by_name).ok() == [expected] * 2


# ---- what is refused


def of_the_script(parameter: torch.Tensor, gradient: torch.Tensor, state: Any, options: Any) -> None:
    pass


of_the_script.__module__ = "__main__"


def refused(job: tw.Job, folder: str) -> list[str]:
    module, name = rules(folder), name_in(folder)
    found = []
    attempts: list[tuple[Any, dict[str, Any]]] = [
        (module.short, {}),
        (of_the_script, {}),
        (module.anonymous, {}),
        (module.inner(), {}),
        (f"{name}:nothing", {}),
        (f"{name}_no:momentum", {}),
        (f"{name}:number", {}),
        (f"{name}:short", {}),
        ("momentum", {}),
        ("a b:c", {}),
        (print, {}),
        (module.momentum, {"function": 1}),
        (module.momentum, {"lr": object()}),
        ("sum", {"lr": 1}),
        ("mean", {"reduce": "sum"}),
    ]
    for rule, options in attempts:
        try:
            tw.torch.StoreOptimizer([("p", torch.nn.Parameter(torch.zeros(3)))], rule, **options)
            found.append("nothing was refused")
        except errors.TensorwireError as error:
            found.append(f"{type(error).__name__}: {error}".replace(name, "M"))
    return found


def test_what_is_no_rule_is_refused_in_one_line_before_step_1(folder: str) -> None:
    takes = "ArgumentError: the rule M:short must take (parameter, gradient, state, options), and takes"
    expected = [
        takes,
        "Unsupported: servers cannot import of_the_script, which the script itself defines: put it into a module",
        "Unsupported: servers cannot import a lambda, which has no name: define a function in a module",
        "Unsupported: servers cannot import inner.<locals>.local, which a function defines: put it at the top of",
        "Unsupported: cannot import the rule nothing from M (AttributeError",
        "Unsupported: cannot import the rule momentum from M_no (ModuleNotFoundError",
        "Unsupported: the rule M:number is a int, no class of optimizers and no function",
        takes,
        "ArgumentError: there is no rule 'momentum'; there are sum, mean, assign, ASGD",
        "ArgumentError: an import path is 'package.module:name', not 'a b:c'",
        "ArgumentError: the optimizer is a class such as torch.optim.AdamW, not <built-in",
        "ArgumentError: the option 'function' names the rule: call yours otherwise",
        "Unsupported: option 'lr' is a object",
        "ArgumentError: the rule 'sum' has no options, and there is 'lr'",
        "ArgumentError: the rule 'mean' takes the workers' mean: use 'assign' with reduce='sum'",
    ]
    for said, begins in zip(run_job(refused, folder, workers=1).ok()[0], expected, strict=True):
        assert said.startswith(begins)
        assert "\n" not in said


# ---- keys


def keyed(job: tw.Job, folder: str, mode: Sync | Async, name: str) -> list[Any]:
    sys.path.insert(0, folder)
    options: dict[str, Any] = {"betas": (0.3, 0.5)} if name == "momentum" else {}
    kv = KeyValue(mode, f"{name_in(folder)}:{name}", reduce="mean", bucket_bytes=4096, lr=0.5, **options)
    kv.init(["a", "b"], [np.arange(2000, dtype="f4"), np.ones(3, "f4")])
    assert name_in(folder) not in sys.modules  # the servers import it, and this worker does not
    for step in range(4):
        kv.set_options(lr=0.5 / (1 + step))
        kv.push(["a", "b"], [np.arange(2000, dtype="f4") * (step + job.rank), np.ones(3, "f4")])
        if step == 1:
            kv.pull(["a", "b"]).wait()
            kv.barrier()
            if job.rank == 0:
                kv.save(f"{folder}/keys.npz")
            kv.barrier()
            kv.push("a", np.ones(2000, "f4")).wait()  # which loading undoes
            kv.barrier()
            kv.load(f"{folder}/keys.npz")
    values: list[Any] = kv.pull(["a", "b"]).wait()
    return values


@pytest.mark.parametrize(("mode", "names"), [(Sync(), ["momentum", "Signs", "Counting"]), (Async(), ["momentum"])])
def test_keys_take_the_import_path_of_a_function_or_a_class(folder: str, mode: Sync | Async, names: list[str]) -> None:
    workers = 2 if isinstance(mode, Sync) else 1
    found = run_job(for_each, keyed, [(folder, mode, name) for name in names], workers=workers, servers=2).ok()
    for mine in found:
        for name, arrays in zip(names, mine, strict=True):
            for value, array in zip(keyed_alone(getattr(rules(folder), name), workers), arrays, strict=True):
                np.testing.assert_array_equal(array, value.detach().numpy())


def keyed_alone(rule: Any, workers: int) -> list[torch.nn.Parameter]:
    values = [torch.nn.Parameter(torch.arange(2000.0)), torch.nn.Parameter(torch.ones(3))]
    states: list[dict[str, Any]] = [{}, {}]
    for step in range(4):
        lr = 0.5 / (1 + step)
        for value, state, at in zip(values, states, (0, 1), strict=True):
            pushes = [torch.arange(2000.0) * (step + rank) if at == 0 else torch.ones(3) for rank in range(workers)]
            value.grad = sum(pushes[1:], pushes[0]) / workers
            if isinstance(rule, type):
                optimizer = state.setdefault("optimizer", rule([value]))
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
            else:
                with torch.no_grad():
                    rule(value, value.grad, state, {"lr": lr, "betas": (0.3, 0.5)})
    return values


def key_refused(job: tw.Job, folder: str, rule: str, options: dict[str, Any]) -> None:
    sys.path.insert(0, folder)
    kv = KeyValue(rule=rule.format(name_in(folder)), **options)
    kv.init("a", np.zeros(3, "f4"))
    kv.pull("a").wait()


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("{0}:short", {}, "the rule {0}:short must take (parameter, gradient, state, options), and takes"),
        (
            "{0}_no:f",
            {},
            "cannot import the rule f from {0}_no (ModuleNotFoundError: No module named '{0}_no')",
        ),
        ("{0}:Signs", {"speed": 3}, "the optimizer {0}:Signs refuses its options: "),
    ],
)
def test_a_rule_that_servers_cannot_import_ends_the_job_in_one_line(
    folder: str, rule: str, options: dict[str, Any], said: str
) -> None:
    ended = run_job(key_refused, folder, rule, options, workers=1)
    assert ended.cause is not None
    assert said.format(name_in(folder)) in str(ended.cause)
    assert "\n" not in str(ended.cause)
