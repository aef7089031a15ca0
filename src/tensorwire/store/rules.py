"""A server's operation on gradients: torch's own optimizers, bucket by bucket.

Sums are taken in worker order, in float32 for half-precision parameters; a mean divides by the number of workers.
Half-precision parameters have float32 masters. The result has the bits of the same optimizer on whole tensors. A rule
works in two steps, reduce and apply, so that a norm over all servers can be taken between them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.sizes import round_up
from tensorwire.store.arithmetic_rules import Pieces, PieceValues, Rule
from tensorwire.store.find_rule import rule_of
from tensorwire.store.foreign import import_path, is_elementwise
from tensorwire.store.function_rules import FunctionOptimizer
from tensorwire.store.kept import number_item, value_of
from tensorwire.store.pushes import Push
from tensorwire.store.row_rules import ROW_OPTIMIZERS
from tensorwire.store.rule_names import ELEMENTWISE, WHOLE, is_foreign
from tensorwire.store.rule_options import set_option, tuples
from tensorwire.store.sharding import ALIGNMENT, Bucket, Piece, StorePlan
from tensorwire.store.state_transfer import GROUP, Item
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.tensor_items import outline, tensor_of

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
    """The class that a server applies. Raises as `rule_of`."""
    found = rule_of(spec)
    chosen: type[torch.optim.Optimizer] = found if isinstance(found, type) else FunctionOptimizer
    return chosen


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


def pieces_over(plan: StorePlan, memory: memoryview, pieces: Sequence[Piece], start: int = 0) -> list[torch.Tensor]:
    """Flat tensors over a bucket's ``pieces``; the bucket begins at the byte ``start`` of ``memory``."""
    return [tensor_over(memory, plan.tensors[p.tensor].dtype, start + p.offset, p.stop - p.start) for p in pieces]


class _TensorValues(PieceValues):
    """The same as tensors. An optimizer updates ``master``, by its gradient: what the pushes of a round came to."""

    outline = staticmethod(outline)
    value_of = staticmethod(tensor_of)

    def __init__(self, number: int, piece: Piece, rule: Rule, bucket: Bucket, buffers: Sequence[memoryview]) -> None:
        self.states: MutableMapping[torch.Tensor, Any] = {}  # those of its optimizer
        super().__init__(number, piece, rule, bucket, buffers)
        self.master = torch.nn.Parameter(self.master)
        self.rows = False if rule.spec.whole else None

    @property
    def kept(self) -> dict[str, Any]:
        """What the optimizer keeps."""
        return dict(self.states.get(self.master, {}))

    @kept.setter
    def kept(self, values: dict[str, Any]) -> None:
        if self.states:
            self.states.pop(self.master, None)
        if values:
            self.states[self.master] = values

    def has_master(self, spec: StoreSpec) -> bool:
        return True

    def view(self, memory: memoryview, start: int) -> torch.Tensor:
        count = self.piece.stop - self.piece.start
        return tensor_over(memory, self.spec.dtype, start + self.piece.offset, count).view(self.shape)

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.float() if self.half else values

    def put(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, self.spec.dtype)
        return values.detach().to(kind).float()

    def reduce(self, pushes: Sequence[Push], divisor: float) -> None:
        mine = [(self.slot(push), push.weight) for push in pushes if push.present[self.number]]
        weighted = any(weight != 1.0 for _, weight in mine)
        total = self.room
        self.master.grad = (
            _weighted(mine, total, divisor) if weighted else _reduced([g for g, _ in mine], total, divisor)
        )


class OptimizerRule(Pieces):
    """The parameters under one of torch's optimizers."""

    kind = _TensorValues
    _values: list[list[_TensorValues]]  # type: ignore[assignment]

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview) -> None:
        super().__init__(spec, plan, server, parameters)
        self._tensors = [{piece.tensor for piece in bucket.pieces} for bucket in plan.buckets[server]]
        everything = list(range(len(self._values)))
        self._sharing = [everything] if self.together else [[bucket] for bucket in everything]  # one optimizer each
        self._number: dict[int, int] = {}  # of a bucket's optimizer, if anything is updated there
        self._optimizers: list[tuple[list[int], torch.optim.Optimizer]] = []  # with the numbers of its groups
        for buckets in self._sharing:
            if parts := [part for bucket in buckets for part in self._values[bucket]]:
                self._number.update((bucket, len(self._optimizers)) for bucket in buckets)
                self._optimizers.append(self._build(parts))
        self._in_groups: list[tuple[float, ...]] = [()] * len(self._optimizers)  # options in force
        # One for all buckets: sums that are used at once stay in the processor's cache.
        shared = torch.empty(max(map(_sum_bytes, self._values), default=0), dtype=torch.uint8)
        self._sums = [_rooms(parts, shared) for parts in self._values]
        self._kept_sums: dict[int, list[torch.Tensor]] = {}  # by bucket, until those of others are there

    def _build(self, parts: Sequence[_TensorValues]) -> tuple[list[int], torch.optim.Optimizer]:
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for part in parts:
            by_group.setdefault(part.spec.group, []).append(part.master)
        cls = optimizer_class(self.spec)
        groups = [{**self.spec.groups[g], "params": params} for g, params in sorted(by_group.items())]
        if is_foreign(self.spec.rule):
            arguments = {"function": self.spec.rule} if cls is FunctionOptimizer else {}
            optimizer = cls(groups, **{**arguments, **{k: tuples(v) for k, v in self.spec.arguments.items()}})
        else:
            # A group may carry entries that the constructor derives itself (AdamW's decoupled_weight_decay).
            known = inspect.signature(cls).parameters
            optimizer = cls(groups, **{k: v for k, v in self.spec.groups[min(by_group)].items() if k in known})
        for part in parts:
            part.states = optimizer.state
        return sorted(by_group), optimizer

    def set_options(self, values: tuple[float, ...], bucket: int | None = None) -> None:
        for number in range(len(self._optimizers)) if bucket is None else self._numbers_of([bucket]):
            if values != self._in_groups[number]:
                self._set(number, values)

    def _numbers_of(self, buckets: Sequence[int]) -> list[int]:
        """Those of their optimizers."""
        return sorted({self._number[bucket] for bucket in buckets if bucket in self._number})

    def _set(self, number: int, values: tuple[float, ...]) -> None:
        """Only what has changed: some optimizers count and adapt in their groups themselves."""
        before = self._in_groups[number] or [None] * len(values)
        self._in_groups[number] = values
        numbers, optimizer = self._optimizers[number]
        groups = dict(zip(numbers, optimizer.param_groups, strict=False))
        for (group, option, index), value, old in zip(self.spec.numeric, values, before, strict=False):
            if value != old and group in groups:
                set_option(groups[group], self.spec.groups[group][option], option, index, value)

    @torch.no_grad()
    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        super().assign(bucket, slot, step)

    @torch.no_grad()
    def reduce(self, bucket: int, pushes: Sequence[Push], divisor: float, *, keep: bool) -> None:
        parts = self._values[bucket]
        if keep and bucket not in self._kept_sums:
            self._kept_sums[bucket] = _rooms(parts, torch.empty(_sum_bytes(parts), dtype=torch.uint8))
        for part, room in zip(parts, self._kept_sums[bucket] if keep else self._sums[bucket], strict=True):
            part.room = room
            part.reduce(pushes, divisor)

    def norm2(self, bucket: int) -> float:
        found = [part.master.grad for part in self._values[bucket] if part.master.grad is not None]
        return sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in found)

    @torch.no_grad()
    def apply(self, bucket: int, step: int, scale: float = 1.0) -> None:
        self.carry(bucket, step)
        self._prepare(bucket, step, scale)
        for number in self._numbers_of([bucket]):
            self._step(self._optimizers[number][1], self._values[bucket])
        self._round(bucket, step)

    @torch.no_grad()
    def apply_all(self, step: int, scale: float = 1.0) -> None:
        for bucket in range(len(self._values)):
            self.carry(bucket, step)
            self._prepare(bucket, step, scale)
        for _, optimizer in self._optimizers:
            optimizer.step()
        for bucket in range(len(self._values)):
            self._round(bucket, step)

    def _prepare(self, bucket: int, step: int, scale: float) -> None:
        """What the optimizer updates is the buffer of ``step``, by gradients times ``scale``."""
        for part in self._values[bucket]:
            if not part.half:
                part.master.data = part.own[step % len(part.own)]
            if part.master.grad is not None and scale != 1.0:
                part.master.grad.mul_(scale)

    def _round(self, bucket: int, step: int) -> None:
        """Half-precision parameters become their masters, rounded."""
        for part in self._values[bucket]:
            if part.half:
                part.put(part.master, part.own[step % len(part.own)])

    def _step(self, optimizer: torch.optim.Optimizer, parts: Sequence[_TensorValues]) -> None:
        """One step for the pieces that keep the same values: fused SGD cannot take some with momentum and some without.

        An update of one piece does not depend on the others, so that this changes no bits.
        """
        gradients = {part.master: part.master.grad for part in parts if part.master.grad is not None}
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

    def state(self) -> Iterator[Iterable[Item]]:
        for buckets in self._sharing:
            parts = (part for bucket in buckets for part in self._values[bucket])
            yield chain(chain.from_iterable(part.saved() for part in parts), self._counted(buckets))

    def _counted(self, buckets: Sequence[int]) -> Iterator[Item]:
        """What a foreign optimizer keeps in its groups: some count their steps there."""
        if not (self.together or (self.spec.keys and is_foreign(self.spec.rule))):
            return
        for numbers, optimizer in (self._optimizers[n] for n in self._numbers_of(buckets)):
            for number, group in zip(numbers, optimizer.param_groups, strict=False):
                first = min(p.piece.tensor for b in buckets for p in self._values[b] if p.spec.group == number)
                for key, value in group.items():
                    if isinstance(value, (bool, int, float)):
                        yield number_item(first, key, value, GROUP)

    @torch.no_grad()
    def load_state(self, items: Iterable[Item]) -> None:
        counted: list[Item] = []
        super().load_state(_apart(items, counted))
        for entry, data in counted:
            for bucket, number in self._number.items():
                if entry.tensor in self._tensors[bucket]:
                    numbers, optimizer = self._optimizers[number]
                    group = optimizer.param_groups[numbers.index(self.plan.tensors[entry.tensor].group)]
                    group[entry.key] = value_of(entry, data)
        self._in_groups = [()] * len(self._optimizers)  # all that the workers say counts anew

    def forget(self, part: PieceValues) -> None:
        """Masters that are not loaded stay."""


def _sum_bytes(parts: Iterable[PieceValues]) -> int:
    """What the sums of their gradients take."""
    return sum(round_up(part.master.nbytes, ALIGNMENT) for part in parts)


def _rooms(parts: Iterable[PieceValues], memory: torch.Tensor) -> list[torch.Tensor]:
    """Where the sum of each goes, one after the other."""
    rooms = []
    for part in parts:
        rooms.append(memory[: part.master.nbytes].view(part.master.dtype).view(part.shape))
        memory = memory[round_up(part.master.nbytes, ALIGNMENT) :]
    return rooms


def _apart(items: Iterable[Item], counted: list[Item]) -> Iterator[Item]:
    """Takes the numbers of groups out of ``items``."""
    for entry, data in items:
        if entry.kind == GROUP:
            counted.append((entry, memoryview(bytes(data))))
        else:
            yield entry, data


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
