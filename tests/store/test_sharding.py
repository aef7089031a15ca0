"""The layout: every element has one place, buckets are contiguous on both sides, cuts are where they may be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.store.row_layout import plan_rows
from tensorwire.store.sharding import ALIGNMENT, CUT, PAGE, ParameterSpec, StorePlan, joined, make_plan

BUCKET = 4 * PAGE

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 5)),
    st.tuples(st.integers(1, 90_000)),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
)
tensors = st.lists(st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "float64", "uint8"])), max_size=12)


def specs(drawn: list[tuple[tuple[int, ...], str]]) -> list[ParameterSpec]:
    return [ParameterSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(drawn)]


def check(plan: StorePlan, whole: bool) -> None:
    seen: dict[int, list[tuple[int, int]]] = {}
    spans = []
    for server, buckets in enumerate(plan.buckets):
        end = 0
        for i, b in enumerate(buckets):
            assert (b.server, b.shard_number, b.index) == (server, server, i)
            assert b.shard >= end
            end = b.shard + b.nbytes
            assert end <= plan.shard_bytes[server]
            spans.append((b.space, b.space + b.nbytes))
            for piece in b.pieces:
                t = plan.tensors[piece.tensor]
                size = DTYPES[t.dtype]
                assert piece.offset + (piece.stop - piece.start) * size <= b.nbytes
                # The piece lies in the space where its tensor says.
                assert b.space + piece.offset == plan.offsets[piece.tensor] + piece.start * size
                assert piece.start % CUT == 0
                seen.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for i, t in enumerate(plan.tensors):
        parts = sorted(seen[i])
        assert parts[0][0] == 0
        assert parts[-1][1] == t.elements
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        assert not whole or len(parts) == 1
        assert plan.offsets[i] % ALIGNMENT == 0
        assert plan.offsets[i] + t.nbytes <= plan.space_bytes
    check_runs(plan)


def check_runs(plan: StorePlan) -> None:
    """Runs map: whole pages, no overlap, and they agree with every bucket."""
    runs = plan.runs()
    for server, space, shard, nbytes in runs:
        assert space % PAGE == shard % PAGE == nbytes % PAGE == 0
        assert shard + nbytes <= plan.shard_bytes[server]
    ends = sorted((space, space + nbytes) for _, space, _, nbytes in runs)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    for bucket in plan.in_order():
        assert any(
            server == bucket.server
            and space <= bucket.space
            and bucket.space + bucket.nbytes <= space + nbytes
            and bucket.space - space == bucket.shard - shard
            for server, space, shard, nbytes in runs
        )


@settings(max_examples=300, derandomize=True, deadline=None)
@given(tensors, st.integers(1, 4), st.booleans())
def test_any_tensors_over_any_servers(drawn: list[tuple[tuple[int, ...], str]], servers: int, whole: bool) -> None:
    plan = make_plan(specs(drawn), servers, bucket_bytes=BUCKET, whole=whole)
    check(plan, whole)
    assert plan == make_plan(specs(drawn), servers, bucket_bytes=BUCKET, whole=whole)
    assert sum(len(b) for b in plan.buckets) == len(plan.in_order())


def test_big_tensors_are_split_over_all_servers_and_small_ones_share_buckets() -> None:
    plan = make_plan(specs([((1 << 20,), "float32"), *[((100,), "float32")] * 20]), 2)
    assert [sum(p.stop - p.start for b in s for p in b.pieces if p.tensor == 0) for s in plan.buckets] == [
        0,
        1 << 20,
    ] or [sum(p.stop - p.start for b in s for p in b.pieces if p.tensor == 0) for s in plan.buckets] == [1 << 20, 0]
    plan = make_plan(specs([((4 << 20,), "float32"), *[((100,), "float32")] * 20]), 2)
    assert [sum(p.stop - p.start for b in s for p in b.pieces if p.tensor == 0) for s in plan.buckets] == [2 << 20] * 2
    small = [b for s in plan.buckets for b in s if b.pieces[0].tensor != 0]
    assert len(small) == 2


def test_servers_take_shards_in_turn() -> None:
    tensors = specs([((4 << 20,), "float32"), *[((100, n), "float32") for n in range(20)]])
    plan, same = make_plan(tensors, 2, shards=4), make_plan(tensors, 4)
    assert (plan.servers, plan.shards, plan.shard_bytes, plan.offsets) == (2, 4, same.shard_bytes, same.offsets)
    assert [plan.server_of(shard) for shard in range(4)] == [0, 1, 0, 1]
    for ours, theirs in zip(plan.in_order(), same.in_order(), strict=True):
        assert ours == replace(theirs, server=theirs.shard_number % 2)
    both = [plan.registered_bytes(server, workers=3) for server in range(2)]
    assert both == [4 * (plan.shard_bytes[server] + plan.shard_bytes[server + 2]) for server in range(2)]
    assert plan.digest() != same.digest()


def test_loads_are_even() -> None:
    plan = make_plan(specs([((n, 1000), "float32") for n in range(100, 140)]), 3)
    assert max(plan.shard_bytes) < 1.1 * min(plan.shard_bytes)


def test_what_cannot_be_planned_is_refused() -> None:
    one = ParameterSpec("a", (3,), "float32")
    with pytest.raises(ArgumentError, match="at least one server"):
        make_plan([one], 0)
    with pytest.raises(ArgumentError, match="shards must be a whole number from 2, for 2 servers"):
        make_plan([one], 2, shards=1)
    with pytest.raises(ArgumentError, match="two parameters have the name 'a'"):
        make_plan([one, one], 1)
    with pytest.raises(ArgumentError, match="multiple of 4096"):
        make_plan([one], 1, bucket_bytes=5000)
    with pytest.raises(Unsupported, match="complex64"):
        make_plan([ParameterSpec("c", (3,), "complex64")], 1)


def test_digests_tell_plans_apart() -> None:
    a, b = make_plan(specs([((3,), "float32")]), 1), make_plan(specs([((4,), "float32")]), 1)
    assert a.digest() == make_plan(specs([((3,), "float32")]), 1).digest() != b.digest()
    assert a.digest(b"x") != a.digest(b"y")


def test_plans_of_keys_and_rows_are_one_plan() -> None:
    table = ParameterSpec("t", (5000, 3, 7), "float64")
    keys = [ParameterSpec("a", (100_000,), "float32"), ParameterSpec("none", (0, 2), "int64")]
    late = [ParameterSpec("b", (3,), "int8"), ParameterSpec("c", (70_000,), "float16")]
    parts = [make_plan(keys, 3, bucket_bytes=4096, apart=True), plan_rows(table, 3, 8192)]
    parts.append(make_plan(late, 3, bucket_bytes=8192, whole=True, apart=True))
    plan = joined(parts)
    assert [t.name for t in plan.tensors] == ["a", "none", "t", "b", "c"]
    every = [b for mine in plan.buckets for b in mine]
    assert sorted(b.number for b in every) == list(range(len(every)))
    assert len(every) == sum(len(mine) for part in parts for mine in part.buckets)
    for server, mine in enumerate(plan.buckets):
        assert [b.index for b in mine] == list(range(len(mine)))
        assert {(b.server, b.shard_number) for b in mine} <= {(server, server)}
        ends = [b.shard + b.nbytes for b in mine]
        assert all(b.shard >= end for b, end in zip(mine[1:], ends, strict=False))
        assert not ends or ends[-1] <= plan.shard_bytes[server]
    spans = sorted((b.space, b.space + b.nbytes) for b in every)
    assert all(start >= end for (start, _), (_, end) in zip(spans[1:], spans, strict=False))
    assert spans[-1][1] <= plan.space_bytes
    for number, tensor in enumerate(plan.tensors):
        pieces = sorted((p.start, p.stop) for b in every for p in b.pieces if p.tensor == number)
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
        assert pieces[-1][1] == tensor.elements
        first = next(b for b in every for p in b.pieces if p.tensor == number and p.start == 0)
        assert first.space + first.pieces[0].offset == plan.offsets[number]
    rows = [p for b in every for p in b.pieces if p.tensor == 2]
    assert all(p.start % 21 == p.stop % 21 == 0 and (p.stop - p.start) * 8 <= 8192 for p in rows)
