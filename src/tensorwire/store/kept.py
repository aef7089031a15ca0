"""What rules keep beside values: cut into pieces for servers, and put together again. All state goes through here.

State is items: an `Entry`, and the memory of its elements. The entry of a whole value covers its shape. Frameworks make
items of what they have, and what they need of items; how a value is cut with its tensor is known here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ProtocolError, Unsupported
from tensorwire.store.sharding import PARAMETER_DTYPES, ParameterSpec, Piece, StorePlan
from tensorwire.store.state_transfer import GROUP, NUMBER, Entry, Item

Array = np.ndarray[Any, Any]
Outline = tuple[str, tuple[int, ...], memoryview]  # of an array: dtype, shape, and the elements' bytes in their order
Place = tuple[int, str, str]  # of a value: tensor, key and kind
P = TypeVar("P")
_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}


class KeptArray(NamedTuple):
    """A whole value that is kept under ``name`` for a tensor of the plan; ``kind`` and ``rows`` as in `Entry`."""

    tensor: int
    name: str
    kind: str
    rows: bool
    array: Array

    @property
    def item(self) -> Item:
        """The same as an item."""
        dtype, shape, data = outline_of(self.array)
        return Entry(self.tensor, self.name, dtype, shape, self.rows, 0, prod(shape), self.kind), data


def outline_of(array: Array) -> Outline:
    """That of an array of numpy's; a view where the elements lie in their order."""
    return array.dtype.name, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def outline(value: object) -> Outline | None:
    """That of what numpy takes for an array; None for others."""
    array = np.asarray(value) if hasattr(value, "__array__") else None
    return None if array is None or array.dtype.name not in PARAMETER_DTYPES else outline_of(array)


def number_item(tensor: int, key: str, value: object, kind: str = NUMBER) -> Item:
    """A number of a tensor's state, or of its group; for what is none, only its type is said."""
    found: Array
    try:
        found = np.array(value, next(dtype for number, dtype in _NUMBERS.items() if isinstance(value, number)))
    except (StopIteration, OverflowError):
        found, kind = np.zeros((), np.uint8), type(value).__name__
    return KeptArray(tensor, key, kind, False, found).item


def value_of(entry: Entry, data: memoryview) -> Any:
    """A whole value: a number, or an array of numpy's over the same memory."""
    found = np.frombuffer(data, entry.dtype)
    return found[0].item() if entry.kind in (NUMBER, GROUP) else found.reshape(entry.shape)


# ---- workers: whole values


def pieces_of(items: Iterable[Item], plan: StorePlan, server: int) -> Iterator[Item]:
    """What a server gets of whole values, in the order of its pieces."""
    return cut(items, plan.tensors, (piece for bucket in plan.buckets[server] for piece in bucket.pieces))


def cut(items: Iterable[Item], tensors: Sequence[ParameterSpec], pieces: Iterable[Piece]) -> Iterator[Item]:
    """The share that ``pieces`` of tensors have of whole values. What a tensor has once comes with its first piece."""
    whole: dict[int, list[Item]] = {}
    for item in items:
        whole.setdefault(item[0].tensor, []).append(item)
    for piece in pieces:
        mine = whole.get(piece.tensor, [])
        for entry, data in mine:
            if entry.rows:
                start, stop = _share(piece, tensors[piece.tensor], entry)
                size = DTYPES[entry.dtype]
                entry, data = replace(entry, start=start, stop=stop), data[start * size : stop * size]
            yield entry, data
        whole[piece.tensor] = [item for item in mine if item[0].rows]


def join(parts: Iterable[Item], room: Callable[[Entry], memoryview | None] = lambda _: None) -> dict[Place, Item]:
    """Whole values of their parts. ``room(entry)``: memory for a value, with what no part has; None: zeros.

    Raises `ProtocolError` for parts that do not fit together.
    """
    found: dict[Place, Item] = {}
    for entry, data in parts:
        _put(found, (entry.tensor, entry.key, entry.kind), entry, data, room)
    return found


def _put(
    found: dict[P, Item], place: P, entry: Entry, data: memoryview, room: Callable[[Entry], memoryview | None]
) -> None:
    if place not in found:
        whole = replace(entry, start=0, stop=prod(entry.shape))
        memory = room(entry)
        found[place] = whole, np.zeros(whole.nbytes, np.uint8).data if memory is None else memory
    whole, memory = found[place]
    size = DTYPES[whole.dtype]
    part = memory[entry.start * size : entry.stop * size]
    if (whole.dtype, whole.shape, part.nbytes) != (entry.dtype, entry.shape, data.nbytes):
        raise ProtocolError(f"state does not fit what came before: {entry}")
    part[:] = data


def _share(piece: Piece, tensor: ParameterSpec, entry: Entry) -> tuple[int, int]:
    """Where a piece begins and ends in a value that is cut with its tensor, of which rows may have other lengths."""
    elements, there = max(1, tensor.elements), prod(entry.shape)
    return piece.start * there // elements, piece.stop * there // elements


# ---- servers: what a rule keeps for its pieces


@dataclass(eq=False)
class Held:
    """A piece of a tensor as a rule has it: its ``shape`` is flat, the tensor's, or that of some of the rows."""

    piece: Piece
    spec: ParameterSpec
    shape: tuple[int, ...]

    @property
    def _flat(self) -> bool:
        return len(self.shape) != len(self.spec.shape)

    def items(
        self, kept: Mapping[str, object], outline: Callable[[object], Outline | None], *, rows: bool | None = None
    ) -> Iterator[Item]:
        """What is kept for it, by key: numbers and arrays. What a tensor has once comes with its first piece.

        ``rows``: whether arrays are cut with the tensor; None: those of the piece's shape are. Raises `Unsupported`.
        """
        first = self.piece.start == 0
        for key, value in kept.items():
            if not isinstance(key, str):
                raise Unsupported(f"a rule keeps something under {key!r:.100}: names in its state are strings")
            found = None if isinstance(value, (bool, int, float)) else outline(value)
            if found is None:
                if first and value is not None:
                    yield number_item(self.piece.tensor, key, value)
                continue
            dtype, shape, data = found
            cut = shape == self.shape if rows is None else rows
            if not cut and not first:
                continue
            whole = shape if not cut else self.spec.shape if self._flat else (*self.spec.shape[:1], *shape[1:])
            entry = Entry(self.piece.tensor, key, dtype, whole, cut, 0, prod(shape))
            start = _share(self.piece, self.spec, entry)[0] if cut else 0
            yield replace(entry, start=start, stop=start + entry.stop), data

    def here(self, entry: Entry) -> Entry | None:
        """The same elements, numbered within the piece; None where they are not of it."""
        if not entry.rows:
            return entry
        start, stop = _share(self.piece, self.spec, entry)
        if not start <= entry.start <= entry.stop <= stop:
            return None
        shape = (stop - start,) if self._flat else (*self.shape[:1], *entry.shape[1:])
        return replace(entry, shape=shape, start=entry.start - start, stop=entry.stop - start)


def load_held(held: Sequence[Held], items: Iterable[Item]) -> list[dict[str, Item]]:
    """For each piece what ``items`` say that is kept for it, by key. Raises `ProtocolError`."""
    by_tensor: dict[int, list[int]] = {}
    for number, each in enumerate(held):
        by_tensor.setdefault(each.piece.tensor, []).append(number)
    found: list[dict[str, Item]] = [{} for _ in held]
    for entry, data in items:
        numbered = ((number, held[number].here(entry)) for number in by_tensor.get(entry.tensor, ()))
        mine = [(number, here) for number, here in numbered if here is not None]
        if not mine or entry.kind not in ("", NUMBER):
            raise ProtocolError(f"worker 0 loads state for what is not here: {entry}")
        for number, here in mine:
            _put(found[number], entry.key, here, data, lambda _: None)
    return found
