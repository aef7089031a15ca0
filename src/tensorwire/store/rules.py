"""A server's operation on gradients: torch's own optimizers, bucket by bucket.

Sums are taken in worker order, in float32 for half-precision parameters; a mean divides by the number of workers.
Half-precision parameters have float32 masters. The result has the bits of the same optimizer on whole tensors. A rule
works in two steps, reduce and apply, so that a norm over all servers can be taken between them.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.sizes import round_up
from tensorwire.store.arithmetic_rules import Rule
from tensorwire.store.array_functions import like
from tensorwire.store.foreign import import_path, is_elementwise, load_rule
from tensorwire.store.function_rules import FunctionOptimizer
from tensorwire.store.pushes import Push
from tensorwire.store.row_rules import ROW_OPTIMIZERS
from tensorwire.store.rule_names import ELEMENTWISE, WHOLE, is_foreign
from tensorwire.store.rule_state import OptimizerPiece, entries, load_entries, number_item, number_of
from tensorwire.store.sharding import ALIGNMENT, Bucket, Piece, StorePlan
from tensorwire.store.state_transfer import GROUP, Item
from tensorwire.store.store_layout import StoreSpec

IMPLEMENTATION = ("foreach", "fused", "differentiable")


def rule_name(optimizer: type[torch.optim.Optimizer]) -> str:
    """The wire name of an optimizer class: one of the lists above, or its import path.

    Raises `ArgumentError` or `Unsupported` with the reason.
    """
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"the optimizer is a class such as torch.optim.AdamW, not {optimizer!r:.100}")
    name = optimizer.__name__
    if issubclass(optimizer, torch.optim.LBFGS):
        raise Unsupported(f"{name} evaluates the model several times a step; a server cannot")
    if getattr(torch.optim, name, None) is optimizer and name in (*ELEMENTWISE, *WHOLE, *ROW_OPTIMIZERS):
        return name
    return import_path(optimizer)


def is_whole(rule: str) -> bool:
    """Whether the rule needs whole tensors."""
    return rule in WHOLE or looks_at_all(rule)


def looks_at_all(rule: str) -> bool:
    """Whether one optimizer has to have all tensors: nothing is known of how it goes about them."""
    return is_foreign(rule) and not is_elementwise(rule)


def optimizer_class(spec: StoreSpec) -> type[torch.optim.Optimizer]:
    """The class that a server applies. Raises `Unsupported` or `PlanMismatch`."""
    if is_foreign(spec.rule):
        loaded = load_rule(spec.rule, spec.folders, spec.sources)
        return loaded if isinstance(loaded, type) else FunctionOptimizer
    found: type[torch.optim.Optimizer] = getattr(torch.optim, spec.rule)
    return found


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
    except (RuntimeError, ValueError, TypeError, OverflowError):
        return dict(options)
    return chosen


def tensor_over(memory: memoryview, dtype: str, start: int, count: int) -> torch.Tensor:
    """``count`` elements at byte ``start``, sharing memory, with a storage of their own size."""
    kind: torch.dtype = getattr(torch, dtype)
    if count == 0:
        return torch.empty(0, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=start)


class OptimizerRule(Rule):
    """The parameters under one of torch's optimizers."""

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview) -> None:
        super().__init__(spec, plan, server, parameters)
        self._buckets = [_BucketRule(self, bucket, self._buffers) for bucket in plan.buckets[server]]
        self._optimizers = self._build_all() if self._buckets else []
        self._options: list[tuple[float, ...]] = [()] * len(self._optimizers)  # in force
        # One for all buckets: sums that are used at once stay in the processor's cache.
        sums = torch.empty(max((b.sum_bytes for b in self._buckets), default=0), dtype=torch.uint8)
        for each in self._buckets:
            each.share(sums)

    def _build_all(self) -> list[tuple[list[int], torch.optim.Optimizer]]:
        """One optimizer a bucket, or one for all, each with the groups that it has."""
        sharing = [self._buckets] if self.together else [[bucket] for bucket in self._buckets]
        built: list[tuple[list[int], torch.optim.Optimizer]] = []
        for buckets in sharing:
            by_group: dict[int, list[torch.nn.Parameter]] = {}
            for bucket in buckets:
                bucket.number = len(built)
                for group, masters in bucket.by_group.items():
                    by_group.setdefault(group, []).extend(masters)
            if not by_group:
                continue
            optimizer = self._build(by_group)
            built.append((sorted(by_group), optimizer))
            for bucket in buckets:
                bucket.optimizer = optimizer
        return built

    def _build(self, by_group: dict[int, list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
        cls = optimizer_class(self.spec)
        groups = [{**self.spec.groups[g], "params": params} for g, params in sorted(by_group.items())]
        if is_foreign(self.spec.rule):
            arguments = {"function": self.spec.rule} if cls is FunctionOptimizer else {}
            return cls(groups, **{**arguments, **{k: _tuples(v) for k, v in self.spec.arguments.items()}})
        # A group may carry entries that the constructor derives itself (AdamW's decoupled_weight_decay).
        known = inspect.signature(cls).parameters
        return cls(groups, **{k: v for k, v in self.spec.groups[min(by_group)].items() if k in known})

    def set_options(self, values: tuple[float, ...], bucket: int | None = None) -> None:
        for number in range(len(self._optimizers)) if bucket is None else self._buckets[bucket].numbers:
            if values != self._options[number]:
                self._set(number, values)

    def _set(self, number: int, values: tuple[float, ...]) -> None:
        """Only what has changed: some optimizers count and adapt in their groups themselves."""
        before = self._options[number] or [None] * len(values)
        self._options[number] = values
        numbers, optimizer = self._optimizers[number]
        groups = dict(zip(numbers, optimizer.param_groups, strict=False))
        for (group, option, index), value, old in zip(self.spec.numeric, values, before, strict=False):
            if value != old and group in groups:
                _set_option(groups[group], self.spec.groups[group][option], option, index, value)

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        super().assign(bucket, slot, step)
        self._buckets[bucket].assigned(step)

    def reduce(self, bucket: int, pushes: Sequence[Push], divisor: float, *, keep: bool) -> None:
        self._buckets[bucket].reduce(pushes, divisor, keep)

    def norm2(self, bucket: int) -> float:
        return self._buckets[bucket].norm2()

    def apply(self, bucket: int, step: int, scale: float = 1.0) -> None:
        self.carry(bucket, step)
        self._buckets[bucket].apply(step, scale)

    @torch.no_grad()
    def apply_all(self, step: int, scale: float = 1.0) -> None:
        for index, bucket in enumerate(self._buckets):
            self.carry(index, step)
            bucket.prepare(step, scale)
        for _, optimizer in self._optimizers:
            optimizer.step()
        for bucket in self._buckets:
            bucket.round(step)

    def state(self) -> Iterator[Iterable[Item]]:
        for buckets in [self._buckets] if self.together else ([bucket] for bucket in self._buckets):
            yield itertools.chain(entries(h for b in buckets for h in b.held()), self._numbers(buckets))

    def _numbers(self, buckets: Sequence[_BucketRule]) -> Iterator[Item]:
        """What a foreign optimizer keeps in its groups: some count their steps there."""
        if not (self.together or (self.spec.keys and is_foreign(self.spec.rule))):
            return
        for numbers, optimizer in (self._optimizers[n] for n in sorted({n for b in buckets for n in b.numbers})):
            mine = [i for bucket in self._buckets if bucket.optimizer is optimizer for i in bucket.tensors]
            for number, group in zip(numbers, optimizer.param_groups, strict=False):
                first = min(i for i in mine if self.plan.tensors[i].group == number)
                for key, value in group.items():
                    if isinstance(value, (bool, int, float)):
                        yield number_item(first, key, value, GROUP)

    def load_state(self, items: Iterable[Item]) -> None:
        found: list[tuple[int, str, bool | int | float]] = []
        load_entries([h for bucket in self._buckets for h in bucket.held()], self._apart(items, found))
        for tensor, key, value in found:
            for bucket in (b for b in self._buckets if tensor in b.tensors and b.optimizer is not None):
                numbers, optimizer = self._optimizers[bucket.number]
                optimizer.param_groups[numbers.index(self.plan.tensors[tensor].group)][key] = value
        self._options = [()] * len(self._optimizers)  # all that the workers say counts anew

    def _apart(self, items: Iterable[Item], found: list[tuple[int, str, bool | int | float]]) -> Iterator[Item]:
        """Takes the numbers of groups out of ``items``."""
        for entry, data in items:
            if entry.kind == GROUP:
                found.append((entry.tensor, entry.key, number_of(entry, data)))
            else:
                yield entry, data


class _BucketRule:
    def __init__(self, rule: Rule, bucket: Bucket, buffers: Sequence[memoryview]) -> None:
        self._bucket = bucket
        plan, spec = rule.plan, rule.spec
        self._tensors = plan.tensors
        self._whole = spec.whole
        self._own = [[self._piece(buffer, bucket.shard, piece) for piece in bucket.pieces] for buffer in buffers]
        self._masters = [self._master(own) for own in self._own[0]]
        self._shared: list[torch.Tensor | None] = []
        self._kept: list[torch.Tensor | None] = []
        self._views: dict[int, list[torch.Tensor]] = {}
        self.by_group: dict[int, list[torch.nn.Parameter]] = {}
        for piece, master in zip(bucket.pieces, self._masters, strict=True):
            if master is not None:
                self.by_group.setdefault(plan.tensors[piece.tensor].group, []).append(master)
        self.optimizer: torch.optim.Optimizer | None = None  # of its pieces; None where none is updated
        self.number = 0  # of that optimizer among the rule's

    @property
    def tensors(self) -> set[int]:
        """Those that it has pieces of."""
        return {piece.tensor for piece in self._bucket.pieces}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The optimizer's number, if it has one."""
        return () if self.optimizer is None else (self.number,)

    def _piece(self, memory: memoryview, start: int, piece: Piece) -> torch.Tensor:
        """A piece where the bucket begins at ``start``: flat, or for a rule that needs whole tensors in its shape."""
        spec = self._tensors[piece.tensor]
        flat = tensor_over(memory, spec.dtype, start + piece.offset, piece.stop - piece.start)
        return flat.view(spec.shape) if self._whole else flat

    def _master(self, own: torch.Tensor) -> torch.nn.Parameter | None:
        """What the optimizer updates: the parameter itself, or a float32 copy of a half-precision one."""
        if not own.is_floating_point() or own.numel() == 0:
            return None
        return torch.nn.Parameter(own.float() if _is_half(own) else own)

    @property
    def sum_bytes(self) -> int:
        """What the sums of its gradients take."""
        return sum(round_up(m.nbytes, ALIGNMENT) for m in self._masters if m is not None)

    def share(self, memory: torch.Tensor) -> None:
        """Where sums go that are not kept."""
        self._shared = self._sums(memory)

    def _sums(self, memory: torch.Tensor) -> list[torch.Tensor | None]:
        """Room for the sum of each piece, one after the other."""
        sums: list[torch.Tensor | None] = []
        for master in self._masters:
            if master is None:
                sums.append(None)
                continue
            sums.append(memory[: master.nbytes].view(master.dtype).view(master.shape))
            memory = memory[round_up(master.nbytes, ALIGNMENT) :]
        return sums

    def _slot(self, worker: int, memory: memoryview) -> list[torch.Tensor]:
        """The pieces of a worker's slot; a slot never moves, so its views are made once."""
        if worker not in self._views:
            self._views[worker] = [self._piece(memory, 0, piece) for piece in self._bucket.pieces]
        return self._views[worker]

    @torch.no_grad()
    def assigned(self, step: int) -> None:
        """The parameters of the buffer of ``step`` have new values."""
        for own, master in zip(self._own[step % len(self._own)], self._masters, strict=True):
            if master is not None and _is_half(own):
                # What rounds to the value that was loaded says more than it does.
                master.copy_(torch.where(master.to(own.dtype) == own, master, own.float()))
            elif master is not None:
                master.data = own

    @torch.no_grad()
    def reduce(self, pushes: Sequence[Push], divisor: float, keep: bool) -> None:
        if keep and not self._kept:
            self._kept = self._sums(torch.empty(self.sum_bytes, dtype=torch.uint8))
        views = [self._slot(push.worker, push.slot) for push in pushes]
        for i, (master, total) in enumerate(zip(self._masters, self._kept if keep else self._shared, strict=True)):
            if master is None or total is None:
                continue
            mine = [(view[i], push.weight) for view, push in zip(views, pushes, strict=True) if push.present[i]]
            weighted = any(weight != 1.0 for _, weight in mine)
            master.grad = (
                _weighted(mine, total, divisor) if weighted else _reduced([g for g, _ in mine], total, divisor)
            )

    def norm2(self) -> float:
        found = [m.grad for m in self._masters if m is not None and m.grad is not None]
        return sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in found)

    @torch.no_grad()
    def apply(self, step: int, scale: float) -> None:
        if self.optimizer is None:
            return
        self.prepare(step, scale)
        self._step(self.optimizer)
        self.round(step)

    def prepare(self, step: int, scale: float) -> None:
        """What the optimizer updates is the buffer of ``step``, by gradients times ``scale``."""
        new = self._own[step % len(self._own)]
        for own, master in zip(new, self._masters, strict=True):
            if master is None:
                continue
            if not _is_half(own):
                master.data = own
            if master.grad is not None and scale != 1.0:
                master.grad.mul_(scale)

    def round(self, step: int) -> None:
        """Half-precision parameters become their masters, rounded."""
        for own, master in zip(self._own[step % len(self._own)], self._masters, strict=True):
            if master is not None and _is_half(own):
                own.copy_(master)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step for the pieces that keep the same values: fused SGD cannot take some with momentum and some without.

        An update of one piece does not depend on the others, so that this changes no bits.
        """
        gradients = {m: m.grad for m in self._masters if m is not None and m.grad is not None}
        alike: dict[frozenset[str], list[torch.nn.Parameter]] = {}
        for master in gradients:
            alike.setdefault(frozenset(optimizer.state.get(master, ())), []).append(master)
        if len(alike) < 2:
            optimizer.step()
            return
        for some in alike.values():
            for master in gradients:
                master.grad = None
            for master in some:
                master.grad = gradients[master]
            optimizer.step()

    def held(self) -> Iterator[OptimizerPiece]:
        """The pieces that are updated here."""
        kept = {} if self.optimizer is None else self.optimizer.state
        for piece, master in zip(self._bucket.pieces, self._masters, strict=True):
            if master is not None:
                yield OptimizerPiece(piece, self._tensors[piece.tensor], master, kept, self._whole)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _weighted(gradients: list[tuple[torch.Tensor, float]], total: torch.Tensor, divisor: float) -> torch.Tensor:
    """The sum in worker order, each times its weight, over ``divisor``."""
    total.zero_()
    for gradient, weight in gradients:
        total.add_(gradient, alpha=weight)
    return total.div_(divisor)


def _reduced(gradients: list[torch.Tensor], total: torch.Tensor, divisor: float) -> torch.Tensor | None:
    """The sum in worker order over ``divisor``; None where nobody has a gradient."""
    if not gradients:
        return None
    first = gradients[0]
    if len(gradients) == 1 and divisor == 1 and first.dtype == total.dtype:
        return first
    if len(gradients) > 1 and first.dtype == total.dtype:
        torch.add(first, gradients[1], out=total)
        rest = gradients[2:]
    else:
        total.copy_(first)
        rest = gradients[1:]
    for gradient in rest:
        total.add_(gradient)
    if math.frexp(divisor)[0] == 0.5:  # a power of two
        return total if divisor == 1 else total.mul_(1 / divisor)  # the same bits, and faster
    return total.div_(divisor)


def _set_option(group: dict[str, Any], template: Any, option: str, index: int, value: float) -> None:
    if index < 0:
        group[option] = like(template, value)
        return
    parts = list(group[option])
    parts[index] = like(template[index], value)
    group[option] = tuple(parts)


def _tuples(value: Any) -> Any:
    """A list that was a tuple before it travelled."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
