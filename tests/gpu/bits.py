"""The store's values on the device, bit by bit those of torch.optim on the CPU.

A device's kernels give other bits than the CPU's, so only updates are compared: a model trains on the device, its
gradients are kept there, so that no wait of the host hides one that the store lacks, and at the end the same optimizer
takes them on the CPU. It takes the means of all workers' gradients, with fp32 masters of half-precision parameters.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import tensorwire as tw
from tensorwire.store.rules import with_implementation
from tensorwire.tables import print_table
from tests.gpu import devices
from tests.gpu.model import GPT, Shape, tokens
from tests.gpu.programs import answer, one_line
from tests.harness.jobs import run_job

STEPS, BUCKET = 4, 64 << 10
JOBS = ((2, "shm"), (1, "shm"), (2, "tcp"), (1, "tcp"))
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
}

Values = dict[str, Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training."""

    optimizer: str
    dtype: str
    overlap: bool


CASES = [Case(*c) for c in itertools.product(OPTIMIZERS, ("float32", "bfloat16"), (True, False))]


@dataclass
class Trained:
    """What a worker had: the values at first and at last, and each step's gradients."""

    first: Values
    gradients: list[dict[str, Tensor | None]]
    last: Values


class Mixed(nn.Module):
    """A tied weight (the GPT's), a part on the CPU, what only worker 0 uses, what nobody does, odd shapes."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gpt = GPT(shape).to(device, dtype)
        self.here = nn.Linear(33, 70).to(dtype)
        self.first_only = nn.Parameter(torch.randn(7, device=device, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(5, device=device, dtype=dtype))
        self.number = nn.Parameter(torch.tensor(0.7, device=device, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(129, 65, device=device, dtype=dtype).t())


def measure(pipe: Connection, kind: str, quick: bool) -> None:
    """The program: the rows of each job, then None."""
    devices.hide_from_servers()
    torch.set_num_threads(1)  # as servers and workers have: with more, some kernels have other bits
    shape = Shape(2, 64, 2, 300, 16) if quick else Shape(3, 192, 3, 512, 64)
    for workers, wire in JOBS:
        ended = run_job(train_all, kind, shape, workers=workers, servers=2, device=wire, fresh=True)
        common = {"workers": workers, "device": wire}
        errors = [error for error in ended.errors if error]
        if errors:
            why = min(errors, key=lambda error: "JobEnded" in error).splitlines()[0]
            answer(pipe, [{**common, "result": f"FAILED: {why}"}])
            continue
        of_cases = zip(CASES, zip(*ended.results, strict=True), strict=True)
        answer(pipe, [{**common, **asdict(case), "result": judged(case, ranks)} for case, ranks in of_cases])
    answer(pipe, None)


# ---- workers


def train_all(job: tw.Job, kind: str, shape: Shape) -> list[Trained | str]:
    """All cases; of one that fails, its error."""
    device = devices.prepare(kind)
    found: list[Trained | str] = []
    for case in CASES:
        try:
            found.append(train(job, case, device, shape))
        except (AssertionError, TypeError, tw.errors.ArgumentError) as error:  # others end the job
            found.append(one_line(error))
    return found


def train(job: tw.Job, case: Case, device: torch.device, shape: Shape) -> Trained:
    """Some steps, in which the host waits for the device only where the store lets it."""
    torch.manual_seed(job.rank)
    model = Mixed(shape, device, getattr(torch, case.dtype))
    cls, options = OPTIMIZERS[case.optimizer]
    optimizer = tw.torch.StoreOptimizer(model, cls, overlap=case.overlap, bucket_bytes=BUCKET, **options)
    batches = [tokens(shape, 2, device, 100 * job.rank + step) for step in range(STEPS)]
    first = values(model)
    kept = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        x = torch.randn(4, 33, generator=torch.Generator().manual_seed(step + job.rank)).to(model.here.weight.dtype)
        model.here(x).square().mean().backward()
        loss = model.gpt(*batch) * model.number + model.turned[::2].square().mean()
        if job.rank == 0:
            loss = loss + model.first_only.square().sum()
        loss.backward()
        kept.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    optimizer.wait()
    gradients = [{name: None if g is None else g.cpu() for name, g in step.items()} for step in kept]
    last = values(model)
    optimizer.close()
    return Trained(first, gradients, last)


def values(model: nn.Module) -> Values:
    """The parameters' values, on the CPU."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


# ---- what is right


def judged(case: Case, ranks: tuple[Trained | str, ...]) -> str:
    """``same bits``, or what differs."""
    trained = [each for each in ranks if isinstance(each, Trained)]
    if len(trained) < len(ranks):
        return next(f"FAILED: {each}" for each in ranks if isinstance(each, str))
    if any(not same_bits(value, trained[0].first[name]) for each in trained for name, value in each.first.items()):
        return "DIFFERENT: the workers began with different values"
    right = reference(case, trained)
    for rank, each in enumerate(trained):
        wrong = [name for name, value in each.last.items() if not same_bits(value, right[name])]
        if wrong:
            return f"DIFFERENT at worker {rank}: {len(wrong)} of {len(right)} parameters, such as {wrong[0]}"
    changed = sum(not same_bits(right[name], value) for name, value in trained[0].first.items())
    return f"same bits ({changed} of {len(right)} parameters changed)"


def reference(case: Case, trained: list[Trained]) -> Values:
    """The values that torch's own optimizer comes to."""
    first = trained[0].first
    masters = {name: nn.Parameter(value.float().clone()) for name, value in first.items()}
    cls, options = OPTIMIZERS[case.optimizer]
    optimizer = cls(masters.values(), **with_implementation(cls, options))
    for step in range(STEPS):
        for name, master in masters.items():
            there = [g.float() for each in trained if (g := each.gradients[step][name]) is not None]
            master.grad = sum(there[1:], there[0]) / len(trained) if there else None
        optimizer.step()
    return {name: master.detach().to(first[name].dtype) for name, master in masters.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of NaN and of zeros."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(a: Tensor) -> Tensor:
    return a.contiguous().view(-1).view(torch.uint8)


# ---- output


def show(rows: list[Row]) -> None:
    """The table: a line for each job, with and without overlap."""
    kinds = list(itertools.product(OPTIMIZERS, ("float32", "bfloat16")))
    table = []
    for (workers, wire), overlap in itertools.product(JOBS, (True, False)):
        mine = [row for row in rows if (row["workers"], row["device"]) == (workers, wire)]
        found = {(r["optimizer"], r["dtype"]): r["result"] for r in mine if r.get("overlap") is overlap}
        missing = mine[0]["result"] if mine else "not run"
        cells = [str(found.get(kind, missing)).split(" (")[0].split(":")[0] for kind in kinds]
        table.append([str(workers), wire, "on" if overlap else "off", *cells])
    title = f"Values after {STEPS} steps, beside torch.optim on the CPU with the same gradients"
    print_table(
        ("workers", "device", "overlap", *(f"{name} {dtype}" for name, dtype in kinds)),
        table,
        left=range(1, 8),
        title=title,
    )
    for line in wrong(rows):
        print(f"  {line}")


def wrong(rows: list[Row]) -> list[str]:
    """What is not right."""
    return [f"{_called(row)}: {row['result']}" for row in rows if not row["result"].startswith("same")]


def _called(row: Row) -> str:
    words = [str(row[key]) for key in ("optimizer", "dtype") if key in row]
    words += [f"overlap {'on' if row['overlap'] else 'off'}"] if "overlap" in row else []
    return ", ".join([f"{row['workers']} workers over {row['device']}", *words])
