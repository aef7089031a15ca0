"""Optimizers that are not torch's own: subclasses and those of other modules, on whole tensors, with the same bits."""

from __future__ import annotations

import copy
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import in_turn, run_job
from tests.harness.sandbox import Sandbox
from tests.torch.refusals import Refusal, not_refused

MODULE = '''
import torch
from torch.optim import AdamW, Optimizer

class Trivial(AdamW):
    """A subclass that changes nothing."""

class Doubled(torch.optim.SGD):
    """Passes its options on, and has one that its groups do not tell."""
    def __init__(self, params, factor=2.0, **options):
        super().__init__(params, **options)
        self.factor = factor
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.factor)
        return super().step(closure)

class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].mul(first).add(p.grad, alpha=1 - first).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(second).add_(p.grad, alpha=1 - second)

class Coupled(Optimizer):
    """Looks at all tensors together, counts its steps in its groups, and keeps numbers for each tensor."""
    def __init__(self, params, lr=0.1, warm=3):
        super().__init__(params, dict(lr=lr, warm=warm, k=0, largest=0.0))
    @torch.no_grad()
    def step(self, closure=None):
        there = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = float(sum(p.grad.double().square().sum() for p in there)) ** 0.5
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = group["k"] * 2
            group["largest"] = max(group["largest"], norm)
            rate = group["lr"] * min(1.0, group["k"] / group["warm"]) / group["largest"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["updates"] = state.get("updates", 0) + 1
                state["mean"] = state.get("mean", 0.0) + float(p.grad.mean())
                p.add_(p.grad + state["mean"], alpha=-rate / state["updates"])

class Listing(Lion):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["past"] = [1, 2]

class Closure(Lion):
    def step(self, closure):
        closure()

class Free(Lion):
    def train(self): ...
    def eval(self): ...

def inner():
    class Local(AdamW):
        pass
    return Local
'''
SHAPES = {"weight": (33, 17), "bias": (5,), "other": (64, 40), "late": (7,)}
STEPS = 5
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Trivial", {"lr": 0.01, "betas": (0.8, 0.99)}),
    ("Doubled", {"lr": 0.1, "momentum": 0.9, "factor": 3.0}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    ("Coupled", {"lr": 0.3, "warm": 4}),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with the module, whose name no other test has."""
    (tmp_path / f"{name_in(str(tmp_path))}.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(tmp_path)


def name_in(folder: str) -> str:
    return "optims_" + "".join(c if c.isalnum() else "_" for c in Path(folder).name)


def optims(folder: str) -> Any:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name_in(folder))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {k: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for k, s in SHAPES.items()}


def groups(params: dict[str, torch.nn.Parameter], lr: float) -> list[dict[str, Any]]:
    named = list(params.items())
    return [{"params": named[:2]}, {"params": named[2:], "lr": lr / 2}]


def gradient(name: str, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor | None:
    if name == "late" and step < 2:
        return None
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """A schedule: options change while the optimizer keeps numbers of its own in its groups."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9 if step % 2 else 1.0


def store_steps(
    optimizer: torch.optim.Optimizer, params: dict[str, torch.nn.Parameter], rank: int, first: int, stop: int
) -> None:
    for step in range(first, stop):
        rate(optimizer, step)
        for name, p in params.items():
            p.grad = gradient(name, rank, step, p.dtype)
        optimizer.step()


def trained(job: tw.Job, folder: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    found = []
    for name, options in CASES:
        params = parameters(dtype)
        optimizer = tw.torch.StoreOptimizer(groups(params, options["lr"]), getattr(optims(folder), name), **options)
        store_steps(optimizer, params, job.rank, 0, STEPS)
        found.append({k: p.detach().clone() for k, p in params.items()})
    return found


def stock(module: Any, name: str, options: dict[str, Any], dtype: torch.dtype, workers: int) -> dict[str, torch.Tensor]:
    params = parameters(dtype)
    masters = {k: torch.nn.Parameter(p.detach().float()) for k, p in params.items()}
    optimizer = getattr(module, name)(groups(masters, options["lr"]), **options)
    for step in range(STEPS):
        rate(optimizer, step)
        for key, p in masters.items():
            parts = [gradient(key, rank, step, dtype) for rank in range(workers)]
            there = [g.float() for g in parts if g is not None]
            p.grad = sum(there) / workers if there else None  # type: ignore[assignment]
        optimizer.step()
    return {k: p.detach().to(dtype) for k, p in masters.items()}


@pytest.mark.parametrize(
    ("device", "dtype"), [("tcp", torch.float32), pytest.param("shm", torch.bfloat16, marks=pytest.mark.long)]
)
def test_they_have_the_bits_of_one_process(folder: str, device: str, dtype: torch.dtype) -> None:
    results = run_job(trained, folder, dtype, servers=2, device=device).ok()
    for at, (name, options) in enumerate(CASES):
        expected = stock(optims(folder), name, options, dtype, 2)
        for mine in results:
            for key in SHAPES:
                assert torch.equal(mine[at][key], expected[key]), (name, key)


def overlapped(job: tw.Job, folder: str) -> list[bool]:
    """Overlap, clipping, and an instance in the place of the class."""
    module = optims(folder)
    found = []
    for make in (module.Lion, lambda params, lr: module.Lion(params, lr=lr)):
        nets = [torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 2)) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        if make is module.Lion:
            ours = tw.torch.StoreOptimizer(
                nets[0].named_parameters(), module.Lion, lr=0.01, overlap=True, max_grad_norm=1e9
            )
        else:
            ours = tw.torch.StoreOptimizer(nets[0].named_parameters(), make(nets[0].parameters(), lr=0.01))
        nets[1].load_state_dict(nets[0].state_dict())
        alone = module.Lion(nets[1].parameters(), lr=0.01)
        for _ in range(4):
            for net, optimizer in zip(nets, (ours, alone), strict=True):
                optimizer.zero_grad()
                net(torch.ones(3, 6)).square().sum().backward()
                optimizer.step()
        ours.wait()
        found.append(all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)))
    return found


def resumed(job: tw.Job, folder: str) -> list[bool]:
    """A state that was saved, copied, or taken from an instance goes on with the bits of one that never stopped."""
    module, found = optims(folder), []
    for name, options in CASES:
        cls = getattr(module, name)

        def made(params: dict[str, torch.nn.Parameter], cls: Any = cls, options: Any = options) -> Any:
            return tw.torch.StoreOptimizer(groups(params, options["lr"]), cls, **options)

        straight, halted = parameters(), parameters()
        store_steps(made(straight), straight, 0, 0, STEPS)
        optimizer = made(halted)
        store_steps(optimizer, halted, 0, 0, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        again = {k: torch.nn.Parameter(p.detach().clone()) for k, p in halted.items()}
        other = made(again)
        other.load_state_dict(saved)
        store_steps(other, again, 0, 3, STEPS)
        copied, alone = copy.deepcopy((halted, optimizer))
        store_steps(alone, copied, 0, 3, STEPS)
        instance = cls(groups(fresh := parameters(), options["lr"]), **options)
        store_steps(instance, fresh, 0, 0, 3)
        results = [again, copied]
        if name != "Doubled":  # whose instance does not expose its factor
            store_steps(tw.torch.StoreOptimizer(fresh.items(), instance), fresh, 0, 3, STEPS)
            results.append(fresh)
        found.append(all(torch.equal(r[k].detach(), straight[k].detach()) for r in results for k in SHAPES))
        found.append(type(alone) is cls)
    return found


class OfTheScript(torch.optim.AdamW):
    """As if the script itself defined it."""


OfTheScript.__module__ = "__main__"


def refused(job: tw.Job, folder: str) -> list[str]:
    module = optims(folder)
    net = torch.nn.Linear(3, 3)
    listing = tw.torch.StoreOptimizer(net.named_parameters(), module.Listing)
    net(torch.ones(1, 3)).sum().backward()
    listing.step()
    p = [("p", torch.nn.Parameter(torch.zeros(3)))]
    store = tw.torch.StoreOptimizer
    attempts: list[Refusal] = [
        (errors.Unsupported, "put it into a module beside the script", lambda: store(p, OfTheScript, lr=0.1)),
        (errors.Unsupported, "which a function defines", lambda: store(p, module.inner(), lr=0.1)),
        (errors.Unsupported, "needs a closure", lambda: store(p, module.Closure)),
        (errors.Unsupported, "in methods train and eval", lambda: store(p, module.Free)),
        (errors.Unsupported, "does not expose its 'factor'", lambda: store(p, module.Doubled([p[0][1]], lr=0.1))),
        (errors.Unsupported, "option 'lr' is a Tensor", lambda: store(p, module.Lion, lr=torch.tensor(0.1))),
        (errors.ArgumentError, "unexpected keyword argument 'nonsense'", lambda: store(p, module.Lion, nonsense=1)),
        (errors.Unsupported, "SparseAdam is for sparse gradients", lambda: store(p, torch.optim.SparseAdam)),
        (errors.Unsupported, "keeps 'past' of 'weight' as a list", listing.state_dict),
    ]
    wrong = not_refused(attempts)
    listing.step()
    return wrong


def test_instances_overlap_saved_state_and_what_servers_cannot_run(folder: str) -> None:
    programs = [partial(program, folder=folder) for program in (overlapped, resumed, refused)]
    assert run_job(in_turn, *programs, workers=1).ok() == [[[True, True], [True, True] * len(CASES), []]]


def misled(job: tw.Job, folder: str, name: str, found: Any) -> None:
    import tensorwire.torch.optimizer as module

    setattr(module, name, lambda _: found)
    tw.torch.StoreOptimizer([("p", torch.nn.Parameter(torch.zeros(3)))], optims(folder).Lion)


def test_servers_that_do_not_have_the_module_or_have_another_one_say_so_before_step_1(folder: str) -> None:
    name = name_in(folder)
    absent = run_job(misled, folder, "folders_of", []).cause  # as if it were in no entry of the path that they are told
    assert absent is not None
    assert str(absent) == (
        f"server 0 stopped: cannot import the rule Lion from {name} (ModuleNotFoundError: No module named "
        f"'{name}'): install that module on the servers' machines, or put it into the script's folder there"
    )
    assert not absent.traceback
    other = run_job(misled, folder, "sources_of", {name: "0" * 64}).cause
    assert f"is not the {name} that workers have: install one everywhere" in str(other)


@pytest.mark.slow
def test_a_module_beside_the_script_is_found_from_any_folder(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    (sandbox.folder / "beside.py").write_text(MODULE)
    script = sandbox.script(
        """
        import torch, beside
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = tw.torch.StoreOptimizer([("p", p)], beside.Lion, lr=0.5)
        p.grad = torch.ones(3)
        optimizer.step()
        print("moved to", p.tolist())
        """
    )
    monkeypatch.chdir("/")  # where nothing of it is
    ended = sandbox.run(script).finish()
    assert ended.status == 0, ended.err
    assert ended.out.count("moved to [-0.5, -0.5, -0.5]") == 2
