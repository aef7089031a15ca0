"""Libraries add parameters without names: the optimizer finds these in the models that its others are in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import for_each, run_job

NAMES = {
    "names": ["body.weight", "body.bias"],
    "prefix": ["net.body.weight", "net.body.bias"],
    "model": ["body.weight", "body.bias"],
    "part": ["body.weight", "body.bias"],  # though the head's are "weight" and "bias"
    "others": ["body.weight", "body.bias"],  # names that are in no model
    "optimizer": ["body.weight", "body.bias"],
}


def given(model: Any, how: str) -> Any:
    head = [(n, p) for n, p in model.named_parameters() if n.startswith("head")]
    if how == "optimizer":
        return torch.optim.SGD(head, lr=0.5)
    alike = {"prefix": [("net." + n, p) for n, p in head], "others": [("h" + n[-4:], p) for n, p in head]}
    return model if how == "model" else model["head"] if how == "part" else alike.get(how, head)


def grow(job: tw.Job, hows: list[str], overlap: bool) -> dict[str, Any]:
    """Names, and whether the parameters are those of one process after a step of the head and one of both."""
    found: dict[str, Any] = {}
    for how in hows:
        torch.manual_seed(5)
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 4)})
        wrapped: Any = torch.nn.ModuleDict({"head": model["head"], "later": torch.nn.ReLU()})  # with the head alone
        alone = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 4)})
        alone.load_state_dict(model.state_dict())
        if how == "model":
            frozen = list(model["body"].parameters())
            del model["body"].weight, model["body"].bias
        optimizer = tw.torch.StoreOptimizer(
            given(model, how), *(() if how == "optimizer" else (torch.optim.SGD,)), overlap=overlap, **_rate(how)
        )
        if how == "model":  # as if a part had been added to it since
            model["body"].weight, model["body"].bias = frozen
        stock = torch.optim.SGD(alone["head"].parameters(), lr=0.5)
        for step in range(2):
            if step:
                for p in model["body"].parameters():
                    p.data.add_(job.rank)  # what is added begins with worker 0's values
                optimizer.add_param_group({"params": (p for p in model["body"].parameters()), "lr": 0.25})
                stock.add_param_group({"params": alone["body"].parameters(), "lr": 0.25})
            for net, each in ((model, optimizer), (alone, stock)):
                each.zero_grad()
                net["head"](net["body"](torch.ones(1, 4))).sum().backward()
                each.step()
        optimizer.wait()
        same = [torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True)]
        found[how] = optimizer.param_groups[1]["param_names"], all(same) and len(same) == 4
        del wrapped
    return found


def _rate(how: str) -> dict[str, float]:
    return {} if how == "optimizer" else {"lr": 0.5}


def test_parameters_without_names_have_those_of_the_model() -> None:
    for several in run_job(for_each, grow, [([*NAMES], False), ([*NAMES], True)]).ok():
        assert several == [{how: (names, True) for how, names in NAMES.items()}] * 2


def misfits(job: tw.Job) -> list[str]:
    model = torch.nn.Linear(4, 4)
    lone, sequence = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(3, 3))
    two = torch.nn.ModuleDict({"model": model, "lone": lone})
    optimizer = tw.torch.StoreOptimizer(model, torch.optim.SGD, lr=1.0)
    found = []
    del two
    for params in (sequence.parameters(), sequence[0].weight, 5, sequence, {model.weight}, model.parameters()):
        with pytest.raises(errors.ArgumentError) as refused:
            optimizer.add_param_group({"params": params})
        found.append(str(refused.value))
    optimizer.add_param_group({"params": lone.named_parameters("lone")})
    assert len(optimizer.param_groups) == 2
    return found


def test_what_no_name_is_found_for_is_refused() -> None:
    lone, one, number, module, mixed, twice = run_job(misfits, workers=1).ok()[0]
    advice = "of the new group has no name, and is in no model of this optimizer's: pass names, "
    assert lone.startswith(f"a parameter [3, 3] {advice}")
    assert one.startswith(f"a parameter [3, 3] {advice}")
    assert number == "StoreOptimizer got a int for its parameters: pass model.named_parameters()"
    assert module == "a parameter group got a module for its 'params': pass its named_parameters()"
    assert mixed == "the order of a set differs between processes: pass parameters in a list"
    assert twice == "parameter 'weight' is given twice: named_parameters() gives each parameter once"
