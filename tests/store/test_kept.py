"""State that is cut for servers, kept there, and put together again is the same, on any number of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain

import numpy as np
import pytest
import torch

from tensorwire.errors import ProtocolError, Unsupported
from tensorwire.store.kept import Held, KeptArray, join, load_held, number_item, pieces_of, value_of
from tensorwire.store.sharding import ParameterSpec, Piece, make_plan
from tensorwire.store.state_transfer import NUMBER, Entry, Item
from tensorwire.store.tensor_items import outline, tensor_of

SPECS = [
    ParameterSpec("wide", (70, 60), "float32"),
    ParameterSpec("half", (2000, 2), "bfloat16"),
    ParameterSpec("one", (), "float64"),
    ParameterSpec("none", (0, 3), "float32"),
]


def item(tensor: int, key: str, dtype: str, shape: tuple[int, ...], elements: int, nbytes: int, *, rows: bool) -> Item:
    return Entry(tensor, key, dtype, shape, rows, 0, elements), memoryview(random.Random(key).randbytes(nbytes))


STATE = [
    item(0, "mean", "float32", (70, 60), 4200, 16800, rows=True),
    item(0, "columns", "float64", (60,), 60, 480, rows=False),
    item(1, "mean", "bfloat16", (2000, 2), 4000, 8000, rows=True),
    item(2, "mean", "int32", (), 1, 4, rows=True),
    number_item(1, "steps", 3),
    number_item(0, "ready", True),
    number_item(2, "scale", 0.5),
]


def on_servers(items: Iterable[Item], servers: int) -> list[Item]:
    """What workers get back."""
    plan, given, found = make_plan(SPECS, servers, bucket_bytes=4096), list(items), list[Iterable[Item]]()
    for server in range(servers):
        pieces = [p for bucket in plan.buckets[server] for p in bucket.pieces]
        held = [Held(piece, SPECS[piece.tensor], (piece.stop - piece.start,)) for piece in pieces]
        sent = list(pieces_of(given, plan, server))
        check_once(sent)
        kept = load_held(held, sent)
        for each, mine in zip(held, kept, strict=True):
            found.append(each.items({key: tensor_of(*value) for key, value in mine.items()}, outline))
    parts = list(chain.from_iterable(found))
    check_once(parts)
    return list(join(parts).values())


def check_once(items: Iterable[Item]) -> None:
    """What is not cut with its tensor travels once."""
    whole = [(entry.tensor, entry.key) for entry, _ in items if not entry.rows]
    assert len(whole) == len(set(whole))


@pytest.mark.parametrize("servers", [(1,), (3,), (3, 2), (1, 4)])
def test_it_comes_back_as_it_was(servers: tuple[int, ...]) -> None:
    items: list[Item] = STATE
    for count in servers:
        items = on_servers(items, count)
    by_place = {(entry.tensor, entry.key): (entry, bytes(data)) for entry, data in items}
    assert by_place == {(entry.tensor, entry.key): (entry, bytes(data)) for entry, data in STATE}
    numbers = [value_of(*each) for each in items if each[0].kind == NUMBER]
    assert sorted((type(n).__name__, n) for n in numbers) == [("bool", True), ("float", 0.5), ("int", 3)]
    assert value_of(*KeptArray(0, "steps", NUMBER, False, np.array([3.0])).item) == 3  # as files had it before


def test_rows_of_a_table_may_have_other_lengths() -> None:
    spec = ParameterSpec("table", (6, 4), "float32")
    last = Held(Piece(0, 8, 24, 0), spec, (4, 4))  # from row 2 on
    ((entry, data),) = last.items({"sum": torch.arange(8.0).view(4, 2)}, outline, rows=True)
    assert entry == Entry(0, "sum", "float32", (6, 2), True, 4, 12)
    (found,) = load_held([last], [(entry, data)])
    assert tensor_of(*found["sum"]).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert last.here(Entry(0, "sum", "float32", (6, 2), True, 2, 6)) is None


def test_what_is_not_here_is_refused() -> None:
    held = [Held(make_plan(SPECS, 1, bucket_bytes=4096).buckets[0][0].pieces[0], SPECS[0], (1024,))]
    strange = [
        Entry(3, "mean", "float32", (0, 3), True, 0, 0),
        Entry(0, "mean", "float32", (70, 60), True, 1000, 1100),
        Entry(0, "mean", "float32", (70, 60), False, 0, 4200, "list"),
    ]
    for entry in strange:
        with pytest.raises(ProtocolError, match="not here"):
            load_held(held, [(entry, memoryview(bytes(entry.nbytes)))])
    first, other = (Entry(0, "mean", "float32", shape, False, 0, 2) for shape in ((2,), (3,)))
    with pytest.raises(ProtocolError, match="does not fit what came before"):
        join([(first, memoryview(bytes(8))), (other, memoryview(bytes(8)))])
    with pytest.raises(Unsupported, match="names in its state are strings"):
        list(held[0].items({3: 1.0}, outline))  # type: ignore[dict-item]
    ((entry, _),) = held[0].items({"name": "x"}, outline)
    assert entry.kind == "str"
