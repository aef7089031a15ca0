"""What the servers have where workers train by themselves, as a part of ``state_dict``: the entry ``"store"``.

It holds ``parameters``, the store's values by name; ``state``, what the outer optimizer keeps for each; and how far
this worker is: its ``steps``, and its ``tokens`` by fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.store.client_state import fetch_state
from tensorwire.store.rule_state import tensor_bytes
from tensorwire.store.sharding import StorePlan
from tensorwire.store.state_transfer import MASTER, VALUE, Entry, Item
from tensorwire.store.store_client import StoreClient

KEY = "store"
State = dict[str, dict[str, torch.Tensor]]  # by the names of parameters, and the optimizer's own


def fetch(client: StoreClient) -> tuple[dict[str, torch.Tensor], State]:
    """The store's values and state, in whole tensors. Raises as `fetch_state`."""
    tensors = client.plan.tensors
    values = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in tensors}
    state: State = {}
    masters: list[tuple[Entry, torch.Tensor]] = []
    for entry, data in fetch_state(client):
        name, dtype = tensors[entry.tensor].name, getattr(torch, entry.dtype)
        part = torch.frombuffer(bytearray(data), dtype=dtype)
        if entry.key == MASTER:
            masters.append((entry, part))
            continue
        if entry.kind == VALUE:
            whole = values[name]
        else:
            whole = state.setdefault(name, {}).setdefault(entry.key, torch.zeros(entry.shape, dtype=dtype))
        whole.view(-1)[entry.start : entry.stop] = part
    for entry, part in masters:  # only the pieces that say more than the value does are sent
        name = tensors[entry.tensor].name
        whole = state.setdefault(name, {}).setdefault(MASTER, values[name].float())
        whole.view(-1)[entry.start : entry.stop] = part
    return values, state


def fetch_values(client: StoreClient) -> dict[str, torch.Tensor]:
    """The store's values, in whole tensors. Raises as `fetch_state`."""
    tensors = client.plan.tensors
    values = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in tensors}
    for entry, data in fetch_state(client):
        if entry.kind == VALUE:
            part = torch.frombuffer(bytearray(data), dtype=getattr(torch, entry.dtype))
            values[tensors[entry.tensor].name].view(-1)[entry.start : entry.stop] = part
    return values


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
    for piece in (piece for bucket in plan.buckets[server] for piece in bucket.pieces):
        spec = plan.tensors[piece.tensor]
        for key, value in state.get(spec.name, {}).items():
            dtype = str(value.dtype).removeprefix("torch.")
            entry = Entry(piece.tensor, key, dtype, spec.shape, True, piece.start, piece.stop)
            yield entry, tensor_bytes(value.reshape(-1)[piece.start : piece.stop])
