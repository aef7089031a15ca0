"""What servers keep beside the values of keys, such as an optimizer's momentum: as arrays, to be saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorwire.errors import Unsupported
from tensorwire.store.client_state import fetch_state, send_state
from tensorwire.store.key_client import KeyClient
from tensorwire.store.request_link import RequestOperation
from tensorwire.store.state_transfer import GROUP, MASTER, NUMBER, Entry, Item

Array = np.ndarray[Any, Any]


class KeptArray(NamedTuple):
    """What is kept under ``name`` for a tensor of the plan.

    ``rows``: it has an element for each of the tensor's. ``kind``: as `Entry` has it.
    """

    tensor: int
    name: str
    kind: str
    rows: bool
    array: Array


def fetch_arrays(client: KeyClient, values: Mapping[int, Array]) -> list[KeptArray]:
    """All that is kept. ``values``: the tensors' values now.

    Raises `Unsupported` for what is no number and no array, `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    found: dict[tuple[int, str, str], KeptArray] = {}
    for entry, data in fetch_state(client):
        if entry.kind not in ("", NUMBER, GROUP):
            name = client.plan.tensors[entry.tensor].name
            raise Unsupported(f"the rule keeps {entry.key!r} of {name!r} as a {entry.kind}, which cannot be saved")
        place = entry.tensor, entry.key, entry.kind
        if place not in found:
            # Only the pieces of a master that say more than the value does are sent.
            array = (
                values[entry.tensor].astype(entry.dtype) if entry.key == MASTER else np.empty(entry.shape, entry.dtype)
            )
            found[place] = KeptArray(entry.tensor, entry.key, entry.kind, entry.rows, array)
        found[place].array.reshape(-1)[entry.start : entry.stop] = np.frombuffer(data, entry.dtype)
    return list(found.values())


def load_arrays(client: KeyClient, kept: Sequence[KeptArray], options: bytes) -> None:
    """What servers keep becomes this. Worker 0 calls it, while no other sends anything.

    Raises `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    numbers = client.announce(RequestOperation.LOAD, options)
    send_state(client, numbers, lambda server: _items(client, server, kept))


def _items(client: KeyClient, server: int, kept: Sequence[KeptArray]) -> Iterator[Item]:
    """A server's share: of arrays that are cut with their tensor its pieces, and others whole."""
    by_tensor: dict[int, list[KeptArray]] = {}
    for each in kept:
        by_tensor.setdefault(each.tensor, []).append(each)
    whole: set[tuple[int, str, str]] = set()
    for piece in (piece for bucket in client.plan.buckets[server] for piece in bucket.pieces):
        for each in by_tensor.get(piece.tensor, []):
            start, stop = (piece.start, piece.stop) if each.rows else (0, math.prod(each.array.shape))
            if not each.rows and (each.tensor, each.name, each.kind) in whole:
                continue
            whole.add((each.tensor, each.name, each.kind))
            dtype, shape = each.array.dtype.name, each.array.shape
            entry = Entry(each.tensor, each.name, dtype, shape, each.rows, start, stop, each.kind)
            yield entry, np.ascontiguousarray(each.array.reshape(-1)[start:stop]).view(np.uint8).data
