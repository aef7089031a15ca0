"""Births: the output of an operator is allocated in memory of our choice, so that sending it copies nothing."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.torch.graph.allocator import MOST_OUTPUTS, ONLY_RECORD, SWITCH, allocator, why_not
from tensorwire.torch.graph.outs import OutVariant
from tensorwire.torch.graph.place import Place, copied, over

__all__ = ["Birthplace", "Place", "over", "why_not"]

Outcome = tuple[Any, tuple[int, ...]]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Birthplace:
    """Calls ``op`` so that those of its results that ``outputs`` names, by their numbers from 0, lie in given places.

    Nothing is known of ``op`` but what it allocates. Its first call is watched: an output was the k-th allocation of
    its size, and is copied to its place. In later calls the k-th allocation of that size is the place. Where that
    misses, the output is copied, and k learned anew. Bits and strides are those of ``op`` alone.

    ``op`` is a node of a graph: an operator that makes new tensors on the CPU, called without gradients. Without the
    allocator (see `why_not`) its ``out=`` variant is taken if there is a real one, else each output is copied. Any
    thread may call, several at once too. ``missed`` counts outputs that did not land in their place; the first is one.

    Raises `ArgumentError` for an output that aliases an argument, and for more than 8 of them.
    """

    __slots__ = ("_allocator", "_op", "_out", "_skips", "missed", "outputs")

    def __init__(self, op: Callable[..., Any], outputs: Sequence[int] = (0,)) -> None:
        _check_outputs(op, outputs)
        self.outputs = tuple(outputs)
        self.missed = 0
        self._op = op
        self._skips = _pack([ONLY_RECORD] * len(outputs))
        self._allocator = allocator()
        self._out = OutVariant.of(op) if self._allocator is None and self.outputs == (0,) else None

    def __call__(
        self, places: Sequence[Place], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> Outcome:
        """What ``op(*args, **kwargs)`` returns, with each output in its place; and the numbers of those that are not.

        An output is elsewhere only if it has another size in bytes than its place. Else its storage keeps the owner.

        Raises what ``op`` raises; the places are free then. `ArgumentError` if a storage that was born in a place
        still lives (``op`` was not called), or if an output is no tensor or requires a gradient. `Unsupported` if a
        place went to something else than an output.
        """
        if len(places) != len(self.outputs):
            raise ArgumentError(f"{self._op}: {len(self.outputs)} outputs need as many places, not {len(places)}")
        if self._allocator is None:
            return self._without_allocator(places, args, kwargs)
        began, result = self._watched(places, args, kwargs)
        if type(result) is torch.Tensor and result.data_ptr() == places[0].address:
            return result, ()
        tensors = [result] if isinstance(result, torch.Tensor) else list(result)
        if all(place.holds(tensor) for place, tensor in zip(places, self._picked(tensors), strict=True)):
            return result, ()
        kind = _kind(result)
        del result  # a storage that leaves its place is to die at once
        if began == 0:
            self._learn(places, tensors)
        return self._settled(places, tensors, kind)

    def _watched(self, places: Sequence[Place], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Any]:
        assert self._allocator is not None
        packed = places[0].packed if len(places) == 1 else b"".join([place.packed for place in places])
        began = 0
        try:
            began = self._allocator.begin(len(places), packed, self._skips)
            if began > 0:
                raise ArgumentError(
                    f"{self._op}: a tensor that was born at {places[began - 1].address:#x} still lives there,"
                    " or two outputs have this place: an output needs memory of its own"
                )
            # Below 0: this thread is amid another birth, whose operator is written in Python. Then there is no watch.
            return began, self._op(*args, **kwargs)
        finally:
            if began == 0:
                self._allocator.end()

    def _without_allocator(self, places: Sequence[Place], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
        if self._out is not None and (made := self._out(places[0], args, kwargs)) is not None:
            return made, ()
        result = self._op(*args, **kwargs)
        if self._out is not None and (made := self._out.prove(result, places[0], args, kwargs)) is not None:
            return made, ()
        tensors = [result] if isinstance(result, torch.Tensor) else list(result)
        return self._settled(places, tensors, _kind(result))

    def _picked(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        for i in self.outputs:
            if i >= len(tensors) or not isinstance(tensors[i], torch.Tensor):
                raise ArgumentError(f"output {i} of {self._op} is no tensor in this call")
        return [tensors[i] for i in self.outputs]

    def _learn(self, places: Sequence[Place], tensors: Sequence[Any]) -> None:
        """Finds, for each output that is not in its place, which allocation of its size it was."""
        assert self._allocator is not None
        skips = list(_unpack(self._skips))
        for n, (place, tensor) in enumerate(zip(places, self._picked(tensors), strict=True)):
            if not place.holds(tensor):
                storage = tensor.untyped_storage()
                found = self._allocator.which(storage.data_ptr(), storage.nbytes())
                skips[n] = found if 0 <= found < ONLY_RECORD else ONLY_RECORD
        self._skips = _pack(skips)

    def _settled(self, places: Sequence[Place], tensors: list[Any], kind: Callable[..., Any]) -> Outcome:
        """Copies outputs to their places. ``tensors`` has the only references to them."""
        self._clear(places, tensors)
        astray = []
        for i, place in zip(self.outputs, places, strict=True):
            if place.holds(tensors[i]):
                continue
            self.missed += 1
            if tensors[i].untyped_storage().nbytes() != place.nbytes:
                astray.append(i)
            elif tensors[i].requires_grad:
                raise ArgumentError(f"{self._op} was called with gradients: births need torch.no_grad()")
            else:
                tensors[i] = copied(tensors[i], self._memory(place))
        return kind(tensors), tuple(astray)

    def _clear(self, places: Sequence[Place], tensors: list[Any]) -> None:
        """Moves outputs out of places that are another's."""
        self._picked(tensors)
        own = dict(zip(self.outputs, places, strict=True))
        for i in range(len(tensors)):
            strange = [place for place in places if place.nbytes and place is not own.get(i)]
            if isinstance(tensors[i], torch.Tensor) and any(place.holds(tensors[i]) for place in strange):
                nbytes = tensors[i].untyped_storage().nbytes()
                tensors[i] = copied(tensors[i], torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        for i, place in own.items():
            if self._allocator and self._allocator.taken(place.address) and not place.holds(tensors[i]):
                # What the operator keeps for itself, or what a finalizer or a signal's handler made meanwhile.
                raise Unsupported(f"{self._op}: the place of output {i} went to a tensor of others: set {SWITCH}=off")

    def _memory(self, place: Place) -> torch.Tensor:
        """The bytes of a place, as if they were born there."""
        if self._allocator is None:
            return place.bytes()
        began = 0
        try:
            began = self._allocator.begin(1, place.packed, _FIRST)
            made = torch.empty(place.nbytes, dtype=torch.uint8, device="cpu") if began == 0 else place.bytes()
        finally:
            if began == 0:
                self._allocator.end()
        return made if place.holds(made) else place.bytes()


def _check_outputs(op: Any, outputs: Sequence[int]) -> None:
    if not 0 < len(set(outputs)) == len(outputs) <= MOST_OUTPUTS or min(outputs) < 0:
        raise ArgumentError(f"outputs are 1 to {MOST_OUTPUTS} different numbers from 0 on, not {tuple(outputs)}")
    if isinstance(op, torch._ops.OpOverload):
        returns = op._schema.returns
        listed = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
        for i in outputs:
            if not listed and i >= len(returns):
                raise ArgumentError(f"{op} has {len(returns)} outputs; there is no {i}")
            if returns[0 if listed else i].alias_info is not None:
                raise ArgumentError(
                    f"output {i} of {op} is memory of an argument: its birthplace is where that is made"
                )


def _kind(result: Any) -> Callable[[list[Any]], Any]:
    """What makes one like ``result`` of its tensors."""
    if isinstance(result, torch.Tensor):
        return operator.itemgetter(0)
    kind: type[list[Any]] = type(result)
    return kind


def _pack(skips: Sequence[int]) -> bytes:
    return struct.pack(f"@{len(skips)}I", *skips)


def _unpack(skips: bytes) -> tuple[int, ...]:
    return struct.unpack(f"@{len(skips) // 4}I", skips)


_FIRST = _pack([0])
