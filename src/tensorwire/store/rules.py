"""What a server does with gradients: torch's own optimizers, bucket by bucket.

Sums are taken in worker order, in float32 for half-precision parameters, and divided by the number of workers. Half
precision parameters have float32 masters. The result has the bits that the same optimizer gives on whole tensors.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from tensorwire.errors import Unsupported
from tensorwire.store.plan import Bucket, Piece, Plan
from tensorwire.store.rule_state import Held, entries, load_entries
from tensorwire.store.stream import Item
from tensorwire.store.wiring import StoreSpec

# Update each element from its own history alone: a cut tensor gives the same bits (tested one by one).
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# Look at a tensor as a whole: never cut.
WHOLE = ("Adafactor", "Muon")
IMPLEMENTATION = ("foreach", "fused", "differentiable")


def versions() -> str:
    """The software that gives an update its bits; workers and servers of a job must agree on it."""
    return f"tensorwire {importlib.metadata.version('tensorwire')}, torch {torch.__version__}"


def rule_name(optimizer: type[torch.optim.Optimizer]) -> str:
    """The wire name of an optimizer class. Raises `Unsupported` with the reason."""
    name = optimizer.__name__
    if name == "LBFGS":
        raise Unsupported("LBFGS evaluates the model several times a step; a server cannot")
    if getattr(torch.optim, name, None) is not optimizer or name not in ELEMENTWISE + WHOLE:
        known = ", ".join(ELEMENTWISE + WHOLE)
        raise Unsupported(f"servers apply torch.optim's {known}; {optimizer.__module__}.{name} is none of them")
    return name


def is_whole(rule: str) -> bool:
    """Whether the rule needs whole tensors."""
    return rule in WHOLE


def with_implementation(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with torch's fused implementation chosen where it exists and the user chose none."""
    if "fused" not in inspect.signature(optimizer).parameters or any(options.get(k) for k in IMPLEMENTATION):
        return dict(options)
    if options.get("foreach") is False or options.get("fused") is False:
        return dict(options)
    chosen = {**{k: v for k, v in options.items() if k != "foreach"}, "fused": True}
    try:
        probe = torch.nn.Parameter(torch.zeros(1))
        probe.grad = torch.zeros(1)
        optimizer([probe], **chosen).step()
    except (RuntimeError, ValueError, TypeError):
        return dict(options)
    return chosen


def tensor_over(memory: memoryview, dtype: str, start: int, count: int) -> torch.Tensor:
    """``count`` elements at byte ``start``, sharing memory, with a storage of their own size."""
    kind: torch.dtype = getattr(torch, dtype)
    if count == 0:
        return torch.empty(0, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=start)


class OptimizerRule:
    """One server's parameters under one optimizer."""

    def __init__(self, spec: StoreSpec, plan: Plan, server: int, parameters: memoryview, workers: int) -> None:
        self._spec, self._plan, self._workers = spec, plan, workers
        self._class: type[torch.optim.Optimizer] = getattr(torch.optim, spec.rule)
        self._options: tuple[float, ...] = ()
        self._buckets = [_BucketRule(self, bucket, parameters) for bucket in plan.buckets[server]]

    def build(self, by_group: dict[int, list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of one bucket."""
        groups = [{**self._spec.groups[g], "params": params} for g, params in sorted(by_group.items())]
        # A group may carry entries that the constructor derives itself (AdamW's decoupled_weight_decay).
        known = inspect.signature(self._class).parameters
        return self._class(groups, **{k: v for k, v in self._spec.groups[min(by_group)].items() if k in known})

    def set_options(self, values: tuple[float, ...]) -> None:
        """Puts the numbers of a round's option block into every optimizer's groups."""
        if values == self._options:
            return
        self._options = values
        for bucket in self._buckets:
            bucket.set_options(self._spec, values)

    def assign(self, bucket: int, slot: memoryview) -> None:
        """The parameters of a bucket become what ``slot`` holds."""
        self._buckets[bucket].assign(slot)

    def update(self, bucket: int, slots: Sequence[memoryview], present: Sequence[bytes]) -> None:
        """One step from the workers' gradients. ``present[w][t]``: worker ``w`` has a gradient for tensor ``t``."""
        self._buckets[bucket].update(slots, present, self._workers)

    def state(self) -> Iterator[Item]:
        """All that the optimizers here keep, to be saved."""
        return entries(h for bucket in self._buckets for h in bucket.held(self._spec.whole))

    def load_state(self, items: Iterable[Item]) -> None:
        """Replaces all that the optimizers here keep. Raises `ProtocolError`."""
        load_entries([h for bucket in self._buckets for h in bucket.held(self._spec.whole)], items)


class _BucketRule:
    def __init__(self, rule: OptimizerRule, bucket: Bucket, parameters: memoryview) -> None:
        self._bucket = bucket
        plan, spec = rule._plan, rule._spec
        self._tensors = plan.tensors
        self._own = [
            tensor_over(parameters, plan.tensors[p.tensor].dtype, bucket.shard + p.offset, p.stop - p.start)
            for p in bucket.pieces
        ]
        self._masters = [
            self._master(own, piece, spec.whole) for own, piece in zip(self._own, bucket.pieces, strict=False)
        ]
        self._sums = [None if m is None else torch.empty_like(m) for m in self._masters]
        self._views: dict[int, list[torch.Tensor]] = {}
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for piece, master in zip(bucket.pieces, self._masters, strict=False):
            if master is not None:
                by_group.setdefault(plan.tensors[piece.tensor].group, []).append(master)
        self._groups = sorted(by_group)
        self._optimizer = rule.build(by_group) if by_group else None

    def _master(self, own: torch.Tensor, piece: Piece, whole: bool) -> torch.nn.Parameter | None:
        """What the optimizer updates: the parameter itself, or a float32 copy of a half-precision one."""
        if not own.is_floating_point() or own.numel() == 0:
            return None
        value = own.float() if own.dtype in (torch.bfloat16, torch.float16) else own
        if whole:
            value = value.view(self._tensors[piece.tensor].shape)
        return torch.nn.Parameter(value)

    def _slot(self, worker: int, memory: memoryview) -> list[torch.Tensor]:
        """The pieces of a worker's slot; a slot never moves, so its views are made once."""
        if worker not in self._views:
            self._views[worker] = [
                tensor_over(memory, self._tensors[p.tensor].dtype, p.offset, p.stop - p.start)
                for p in self._bucket.pieces
            ]
        return self._views[worker]

    def set_options(self, spec: StoreSpec, values: tuple[float, ...]) -> None:
        if self._optimizer is None:
            return
        groups = dict(zip(self._groups, self._optimizer.param_groups, strict=False))
        for (group, option, index), value in zip(spec.numeric, values, strict=False):
            if group not in groups:
                continue
            template = spec.groups[group][option]
            if index < 0:
                groups[group][option] = _like(template, value)
            else:
                parts = list(groups[group][option])
                parts[index] = _like(template[index], value)
                groups[group][option] = tuple(parts)

    @torch.no_grad()
    def assign(self, slot: memoryview) -> None:
        for own, master, value in zip(self._own, self._masters, self._slot(0, slot), strict=False):
            own.copy_(value)
            if master is not None and master.data_ptr() != own.data_ptr():
                master.copy_(own.view(master.shape))

    @torch.no_grad()
    def update(self, slots: Sequence[memoryview], present: Sequence[bytes], workers: int) -> None:
        if self._optimizer is None:
            return
        views = [self._slot(w, slot) for w, slot in enumerate(slots)]
        for i, (piece, master, total) in enumerate(zip(self._bucket.pieces, self._masters, self._sums, strict=False)):
            if master is None or total is None:
                continue
            mine = [views[w][i] for w in range(workers) if present[w][piece.tensor]]
            master.grad = _mean(mine, total, workers)
        self._optimizer.step()
        for own, master in zip(self._own, self._masters, strict=False):
            if master is not None and master.data_ptr() != own.data_ptr():
                own.copy_(master.view(own.shape))

    def held(self, whole: bool) -> Iterator[Held]:
        """The pieces that are updated here."""
        for piece, master in zip(self._bucket.pieces, self._masters, strict=True):
            if master is not None and self._optimizer is not None:
                yield Held(piece, self._tensors[piece.tensor], master, self._optimizer, whole)


def _mean(gradients: list[torch.Tensor], total: torch.Tensor, workers: int) -> torch.Tensor | None:
    """The sum in worker order over the number of workers; None where nobody has a gradient."""
    if not gradients:
        return None
    first = gradients[0].view(total.shape)
    if workers == 1 and first.dtype == total.dtype:
        return first
    if len(gradients) > 1 and first.dtype == total.dtype:
        torch.add(first, gradients[1].view(total.shape), out=total)
        rest = gradients[2:]
    else:
        total.copy_(first)
        rest = gradients[1:]
    for gradient in rest:
        total.add_(gradient.view(total.shape))
    return total if workers == 1 else total.div_(workers)


def _like(template: Any, value: float) -> Any:
    """``value`` as the type that the option had."""
    if isinstance(template, bool):
        return bool(value)
    if isinstance(template, int) and float(value).is_integer():
        return int(value)
    return value
