"""What servers keep beside the values of keys, such as an optimizer's momentum: as arrays, to be saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorwire.store.client_state import fetch_state, send_state
from tensorwire.store.kept import KeptArray, join, outline_of, pieces_of
from tensorwire.store.key_client import KeyClient
from tensorwire.store.request_link import RequestOperation
from tensorwire.store.state_transfer import MASTER, Entry

Array = np.ndarray[Any, Any]


def fetch_arrays(client: KeyClient, values: Mapping[int, Array]) -> list[KeptArray]:
    """All that is kept. ``values``: the tensors' values now. Raises as `fetch_state`."""

    def room(entry: Entry) -> memoryview | None:
        """Only the pieces of a master that say more than the value does are sent."""
        return outline_of(values[entry.tensor].astype(entry.dtype))[2] if entry.key == MASTER else None

    found = join(fetch_state(client), room).values()
    return [
        KeptArray(
            entry.tensor, entry.key, entry.kind, entry.rows, np.frombuffer(data, entry.dtype).reshape(entry.shape)
        )
        for entry, data in found
    ]


def load_arrays(client: KeyClient, kept: Sequence[KeptArray], options: bytes) -> None:
    """What servers keep becomes this. Worker 0 calls it, while no other sends anything.

    Raises `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    numbers = client.announce(RequestOperation.LOAD, options)
    send_state(client, numbers, lambda server: pieces_of((each.item for each in kept), client.plan, server))
