"""The state that torch's optimizers keep for the pieces of one server, to entries and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tensorwire.errors import ProtocolError
from tensorwire.store.sharding import PARAMETER_DTYPES, ParameterSpec, Piece
from tensorwire.store.state_transfer import MASTER, NUMBER, Entry, Item


@dataclass(frozen=True)
class OptimizerPiece:
    """One piece of a tensor, and what is updated for it: flat, or (``whole``) in the tensor's shape.

    ``kept``: where an optimizer keeps its state, by what it updates.
    """

    piece: Piece
    spec: ParameterSpec
    master: torch.nn.Parameter
    kept: MutableMapping[torch.Tensor, Any]
    whole: bool

    @property
    def is_rounded(self) -> bool:
        """Whether the parameter is rounded from the master, and not the master itself."""
        return self.spec.dtype in ("bfloat16", "float16")

    def rounded(self, master: torch.Tensor) -> torch.Tensor:
        """The values of the parameter that come from such a master."""
        kind: torch.dtype = getattr(torch, self.spec.dtype)
        return master.detach().to(kind)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements' bytes in the order of their indices; a view where they lie so."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
    return array.data


def entries(held: Iterable[OptimizerPiece]) -> Iterator[Item]:
    """All state, value by value. What a tensor has once comes with its first piece."""
    for h in held:
        values = dict(h.kept.get(h.master, {}))
        if h.is_rounded and not torch.equal(h.rounded(h.master).float(), h.master):
            values[MASTER] = h.master
        for key, value in values.items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or str(value.dtype).removeprefix("torch.") not in PARAMETER_DTYPES:
                if h.piece.start == 0:
                    yield number_item(h.piece.tensor, key, value)
                continue
            rows = not h.whole and value.shape == h.master.shape
            if not rows and h.piece.start > 0:
                continue
            start = h.piece.start if rows else 0
            shape = h.spec.shape if rows else tuple(value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            entry = Entry(h.piece.tensor, key, dtype, shape, rows, start, start + value.numel())
            yield entry, tensor_bytes(value)


def number_item(tensor: int, key: str, value: object, kind: str = NUMBER) -> Item:
    """A number of a tensor's state, or of its group; for what is none, only its type is said."""
    try:
        if not isinstance(value, (bool, int, float)):
            raise TypeError
        found = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    except (TypeError, OverflowError, RuntimeError):
        found, kind = torch.zeros((), dtype=torch.uint8), type(value).__name__
    return Entry(tensor, key, str(found.dtype).removeprefix("torch."), (), False, 0, 1, kind), tensor_bytes(found)


def number_of(entry: Entry, data: memoryview) -> bool | int | float:
    """What `number_item` was given."""
    found: bool | int | float = torch.frombuffer(bytearray(data), dtype=getattr(torch, entry.dtype))[0].item()
    return found


@dataclass
class _New:
    held: OptimizerPiece
    values: dict[str, Any] = field(default_factory=dict)

    def put(self, entry: Entry, data: memoryview) -> None:
        """Keeps the elements that belong to this piece."""
        if entry.kind == NUMBER:
            self.values[entry.key] = number_of(entry, data)
            return
        begin = self.held.piece.start if entry.rows else 0
        if entry.key not in self.values:
            shape = self.held.master.shape if entry.rows else entry.shape
            self.values[entry.key] = torch.zeros(shape, dtype=getattr(torch, entry.dtype))
        target = self.values[entry.key]
        start, stop = entry.start - begin, entry.stop - begin
        if start < 0 or stop > target.numel():
            raise ProtocolError(f"worker 0 loads state that does not fit: {entry}")
        target.view(-1)[start:stop].view(torch.uint8).numpy()[:] = data


def load_entries(held: Iterable[OptimizerPiece], items: Iterable[Item]) -> None:
    """The state becomes ``items`` and nothing else, once all of them have come. Raises `ProtocolError`."""
    new: dict[int, list[_New]] = {}
    for h in held:
        new.setdefault(h.piece.tensor, []).append(_New(h))
    for entry, data in items:
        found = [n for n in new.get(entry.tensor, []) if not entry.rows or _within(n.held.piece, entry)]
        if not found:
            raise ProtocolError(f"worker 0 loads state for what is not here: {entry}")
        for n in found:
            n.put(entry, data)
    for pieces in new.values():
        for n in pieces:
            _hold(n.held, n.values)


def _within(piece: Piece, entry: Entry) -> bool:
    return piece.start <= entry.start and entry.stop <= piece.stop


@torch.no_grad()
def _hold(held: OptimizerPiece, values: dict[str, Any]) -> None:
    master = values.pop(MASTER, None)
    if master is not None:
        # Loading an optimizer changes no parameter: a master counts where the parameter is what it rounds to.
        master = master.view(held.master.shape)
        same = held.rounded(master) == held.rounded(held.master)
        held.master.copy_(torch.where(same, master, held.master))
    held.kept.pop(held.master, None)
    if values:
        held.kept[held.master] = values
