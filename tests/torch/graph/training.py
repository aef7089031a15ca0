"""What a worker of a job does in tests: it trains a model that is cut over workers, and the same one by itself."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import torch

import tensorwire as tw
from tensorwire.graph.kinds import VALUE
from tensorwire.observe import counters
from tensorwire.torch.graph.execution.job_group import group_of
from tests.torch.graph import zoo
from tests.torch.graph.cuts import same_bits


def train(
    job: tw.Job, name: str, workers: dict[str, int] | None, seed: int = 0, steps: int = 4, **options: Any
) -> dict[str, Any]:
    """Trains ``steps`` steps; ``workers``: by module, or a random cut by ``seed``.

    Returns what differs from one process (``wrong``), the names of the parameters that had gradients here (``here``),
    what the last step counted (``counted``), the copies that its plans predicted for this worker (``planned``), and the
    edges of these plans that some worker copies (``copied``).
    """
    defaults = {"replay_random": name in zoo.DROPPING}
    model = zoo.build(name)
    alone = copy.deepcopy(model)
    workers = zoo.cut(model, job.num_workers, seed) if workers is None else workers
    compiled = torch.compile(model, backend="tensorwire", options={"workers": workers, **defaults, **options})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, alone)]
    wrong: list[str] = []
    counted: dict[str, int] = {}
    planned, copied = 0, [""]
    group = group_of(job._worker)
    for step in range(steps):
        given = zoo.inputs(name, step)
        before = counters.snapshot()
        runs = {plan.name: edges.step for plan, edges in group.made}
        torch.manual_seed(step)
        loss = zoo.loss_of(compiled(**given))
        loss.backward()
        counted = asdict(counters.since(before))
        ran = [plan for plan, edges in group.made if edges.step != runs.get(plan.name, 0)]
        planned = sum(copies.count for plan in ran for copies in plan.copies if copies.worker == group.me)
        crossing = [(plan, edge) for plan in ran for edge in plan.edges if edge.kind != VALUE]
        taken = {(plan.name, name) for plan in ran for name, _ in plan.callers}  # what a user gets is a copy
        copied = [e.name for p, e in crossing if e.copied or e.if_small or (p.name, e.name) in taken]
        torch.manual_seed(step)
        right = zoo.loss_of(alone(**given))
        right.backward()
        if not torch.equal(loss, right):
            wrong.append(f"step {step}: loss {loss.item()}, not {right.item()}")
        for (path, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
            if mine.grad is not None and (its.grad is None or not torch.equal(mine.grad, its.grad)):
                wrong.append(f"step {step}: gradient of {path}")
        mine_here = [path for path, parameter in model.named_parameters() if parameter.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (path, mine), its in zip(model.named_buffers(), alone.buffers(), strict=True):
        if path.rpartition(".")[0] in _places(model, workers, job.rank) and not torch.equal(mine, its):
            wrong.append(f"buffer {path}")
    return {"wrong": wrong, "here": mine_here, "counted": counted, "planned": planned, "copied": copied}


def wrong_gradients(net: torch.nn.Module, alone: torch.nn.Module) -> list[str]:
    """The parameters whose gradients this worker has, and not with the bits of one process. Both lose theirs."""
    pairs = zip(net.named_parameters(), alone.parameters(), strict=True)
    found = [(name, p.grad, its.grad) for (name, p), its in pairs if p.grad is not None]
    net.zero_grad()
    alone.zero_grad()
    return [name for name, mine, its in found if its is None or not same_bits(mine, its)]


def _places(model: torch.nn.Module, workers: dict[str, int], rank: int) -> set[str]:
    """The modules of this worker."""
    found = set()
    for path, _ in model.named_modules():
        at = path
        while at and at not in workers:
            at = at.rpartition(".")[0]
        if workers.get(at) == rank:
            found.add(path)
    return found


def gradients_of(name: str) -> set[str]:
    """The parameters that have a gradient in one process."""
    model = zoo.build(name)
    zoo.loss_of(model(**zoo.inputs(name, 0))).backward()
    return {path for path, parameter in model.named_parameters() if parameter.grad is not None}
