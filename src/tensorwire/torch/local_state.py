"""What the servers have where workers train by themselves, as a part of ``state_dict``: the entry ``"store"``.

It holds ``parameters``, the store's values by name; ``state``, what the outer optimizer keeps for each; and how far
this worker is: its ``steps``, and its ``tokens`` by fragment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.store.client_state import fetch_state
from tensorwire.store.kept import join, pieces_of
from tensorwire.store.sharding import StorePlan
from tensorwire.store.state_transfer import MASTER, VALUE, Item
from tensorwire.store.store_client import StoreClient
from tensorwire.store.tensor_items import tensor_bytes, tensor_of, whole_item

KEY = "store"
State = dict[str, dict[str, torch.Tensor]]  # by the names of parameters, and the optimizer's own


def fetch(client: StoreClient) -> tuple[dict[str, torch.Tensor], State]:
    """The store's values and state, in whole tensors. Raises as `fetch_state`."""
    masters: list[Item] = []

    def others() -> Iterator[Item]:
        for entry, data in fetch_state(client):
            if entry.key == MASTER:
                masters.append((entry, memoryview(bytes(data))))
            else:
                yield entry, data

    values, state = _named(client, others())
    names = [t.name for t in client.plan.tensors]
    # Only the pieces that say more than the value does are sent.
    whole = join(masters, lambda entry: tensor_bytes(values[names[entry.tensor]].float()))
    for (tensor, key, _), item in whole.items():
        state.setdefault(names[tensor], {})[key] = tensor_of(*item)
    return values, state


def fetch_values(client: StoreClient) -> dict[str, torch.Tensor]:
    """The store's values, in whole tensors. Raises as `fetch_state`."""
    return _named(client, (item for item in fetch_state(client) if item[0].kind == VALUE))[0]


def _named(client: StoreClient, items: Iterable[Item]) -> tuple[dict[str, torch.Tensor], State]:
    tensors = client.plan.tensors
    values = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in tensors}
    state: State = {}
    room = lambda entry: tensor_bytes(values[tensors[entry.tensor].name]) if entry.kind == VALUE else None  # noqa: E731
    for (tensor, key, kind), item in join(items, room).items():
        if kind != VALUE:
            state.setdefault(tensors[tensor].name, {})[key] = tensor_of(*item)
    return values, state


def check(plan: StorePlan, found: Any, fragments: int) -> None:
    """Raises `ArgumentError` for an entry ``"store"`` that `fetch` did not make for such parameters."""
    keys = {"parameters", "state", "steps", "tokens"}
    if not isinstance(found, Mapping) or found.keys() != keys:
        raise ArgumentError(f"the state's entry {KEY!r} was not made by a StoreOptimizer")
    named = {t.name: t for t in plan.tensors}
    if found["parameters"].keys() != named.keys() or not found["state"].keys() <= named.keys():
        raise ArgumentError(f"the state's entry {KEY!r} is of a store with other parameters")
    if len(found["tokens"]) != fragments:
        raise ArgumentError(f"the state is of {len(found['tokens'])} fragments, and this mode has {fragments}")
    for name, spec in named.items():
        value = found["parameters"][name]
        kind = str(value.dtype).removeprefix("torch.")
        if tuple(value.shape) != spec.shape or kind != spec.dtype:
            raise ArgumentError(f"parameter {name!r} is {kind} {list(value.shape)} in the state's entry {KEY!r}")
        for key, kept in found["state"].get(name, {}).items():
            if tuple(kept.shape) != spec.shape:
                raise ArgumentError(f"{key!r} of {name!r} has the shape {list(kept.shape)} in the entry {KEY!r}")


def items(plan: StorePlan, state: State, server: int) -> Iterator[Item]:
    """What ``server`` is to keep."""
    numbers = {t.name: number for number, t in enumerate(plan.tensors)}
    whole = (whole_item(numbers[n], key, value, rows=True) for n, kept in state.items() for key, value in kept.items())
    return pieces_of(whole, plan, server)
