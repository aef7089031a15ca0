"""The state that torch's optimizers keep for the pieces of one server; and tensors as items, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from tensorwire.store.kept import Held, Outline, load_held, number_item, value_of
from tensorwire.store.sharding import PARAMETER_DTYPES
from tensorwire.store.state_transfer import GROUP, MASTER, NUMBER, Entry, Item


@dataclass(eq=False)
class OptimizerPiece(Held):
    """What is updated for a piece: flat, or (``whole``) in the tensor's shape.

    ``kept``: where an optimizer keeps its state, by what it updates.
    """

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


def outline(value: object) -> Outline | None:
    """That of a tensor; None for others."""
    if not isinstance(value, torch.Tensor):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return (dtype, tuple(value.shape), tensor_bytes(value)) if dtype in PARAMETER_DTYPES else None


def whole_item(tensor: int, key: str, value: object, rows: bool) -> Item:
    """A whole value, a tensor or a number; ``rows``: it is cut with the tensor of that number in the plan."""
    found = outline(value)
    if found is None:
        return number_item(tensor, key, value)
    dtype, shape, data = found
    return Entry(tensor, key, dtype, shape, rows, 0, prod(shape)), data


def tensor_of(entry: Entry, data: memoryview) -> Any:
    """A whole value: a number, or a tensor over the same memory."""
    if entry.kind in (NUMBER, GROUP):
        return value_of(entry, data)
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return (
        torch.frombuffer(data, dtype=dtype).view(entry.shape) if data.nbytes else torch.empty(entry.shape, dtype=dtype)
    )


def entries(held: Iterable[OptimizerPiece]) -> Iterator[Item]:
    """All state, value by value."""
    for h in held:
        values = dict(h.kept.get(h.master, {}))
        if h.is_rounded and not torch.equal(h.rounded(h.master).float(), h.master):
            values[MASTER] = h.master
        yield from h.items(values, outline, rows=False if h.whole else None)


def load_entries(held: Iterable[OptimizerPiece], items: Iterable[Item]) -> None:
    """The state becomes ``items`` and nothing else, once all of them have come. Raises `ProtocolError`."""
    pieces = list(held)
    for h, found in zip(pieces, load_held(pieces, items), strict=True):
        _hold(h, {key: tensor_of(*item) for key, item in found.items()})


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
