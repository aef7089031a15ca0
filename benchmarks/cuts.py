"""Where ``graph`` cuts a model: each worker has layers that follow each other, with a like share of the operations.

Operations are the multiplications and additions of one forward pass, as torch counts them. The cut is the same in every
process and in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tensorwire.errors import ArgumentError


@dataclass(frozen=True)
class Layers:
    """What of a model is divided, in the order in which it runs: ``order`` has the paths of one layer each, separated
    by spaces; a ``*`` at the end stands for all modules there.

    ``rest``: the worker of all else, 0 or -1 for the last. Tied weights keep the rest with the first: the embedding.
    """

    order: tuple[str, ...]
    rest: int = -1


LAYERS = {
    "alexnet": Layers(("net.*",)),
    "inception": Layers(("stem.*", "grid35.*", "grid17.*", "grid8.*")),
    "vgg16": Layers(("net.*",)),
    # All products of inputs here, which wait for nothing, and there the states, one after the other.
    "lstm": Layers(("inputs", "states out")),
    "gru": Layers(("inputs", "states out")),
    "fcn5": Layers(("net.*",)),
    "gpt2": Layers(("blocks.*",), rest=0),
}


@dataclass(frozen=True)
class Cut:
    """``workers``: by module path, as `tensorwire.torch.place` takes them; ``text``: the same for people."""

    workers: dict[str, int]
    text: str


def cut(name: str, model: nn.Module, inputs: Sequence[torch.Tensor], workers: int) -> Cut:
    """Divides ``model``, which is the workload ``name``, over so many workers.

    Raises `ArgumentError` if it has not as many layers.
    """
    said = LAYERS[name]
    layers = _expanded(model, said.order)
    operations = _operations(model, inputs)
    costs = [sum(operations.get(path, 0) for path in paths) for paths in layers]
    rest = max(0, operations[""] - sum(costs))
    where = divide(costs, workers, before=0 if said.rest else rest, behind=rest if said.rest else 0)
    last = (workers + said.rest) % workers
    if len({*where, last}) < workers:
        raise ArgumentError(f"{name} has {len(layers)} layers to divide, too few for {workers} workers")
    placed = {path: worker for paths, worker in zip(layers, where, strict=True) for path in paths}
    return Cut({"": last, **placed}, _told(layers, where, last))


def divide(costs: Sequence[int], workers: int, *, before: int = 0, behind: int = 0) -> list[int]:
    """The worker of each layer: one each if there are as many. Else workers have a like share of what the layers cost
    and of what the first has to do ``before`` them and the last ``behind``.
    """
    if len(costs) == workers:
        return list(range(workers))
    total = before + sum(costs) + behind
    ends = accumulate(costs, initial=before)
    middles = [start + cost / 2 for start, cost in zip(ends, costs, strict=False)]
    return [min(workers - 1, int(middle * workers / total)) for middle in middles]


def _expanded(model: nn.Module, order: Sequence[str]) -> list[list[str]]:
    """The paths of every layer."""
    found = []
    for paths in order:
        inner, star, _ = paths.partition(".*")
        found += [[f"{inner}.{name}"] for name, _ in model.get_submodule(inner).named_children()] if star else []
        found += [] if star else [paths.split()]
    return found


def _operations(model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Of a forward pass, by module path; ``""`` is all of it. The pass changes nothing."""
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    model.train()
    name = type(model).__name__
    counted: Mapping[str, Mapping[object, int]] = counter.get_flop_counts()
    whole = {"": counter.get_total_flops()}
    return whole | {
        path.removeprefix(f"{name}."): sum(by_operator.values())
        for path, by_operator in counted.items()
        if path.startswith(f"{name}.")
    }


def _told(layers: Sequence[Sequence[str]], where: Sequence[int], last: int) -> str:
    parts = []
    for worker in sorted({*where, last}):
        own = [", ".join(paths) for paths, its in zip(layers, where, strict=True) if its == worker]
        what = [" to ".join(dict.fromkeys((own[0], own[-1])))] if own else []
        parts.append(f"worker {worker} has " + " and ".join([*what, *(["the rest"] if worker == last else [])]))
    return "; ".join(parts)
