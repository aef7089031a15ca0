"""Outputs of operators lie where they should, with the bits and strides that they have elsewhere."""

from __future__ import annotations

import resource
from collections import deque
from pathlib import Path

import pytest
import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.observe import counters
from tensorwire.torch.graph.memory.allocator import allocator, why_not
from tensorwire.torch.graph.memory.birthplace import Birthplace, alive
from tests.torch.graph.operators import CASES, Case
from tests.torch.graph.rooms import call_in_places, listed, nbytes, place

aten = torch.ops.aten
BY_NAME = {case.name: case for case in CASES}


def test_the_allocator_is_there() -> None:
    assert why_not() is None


@pytest.mark.parametrize(("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d}") for c in CASES for d in c.dtypes])
def test_every_operator_is_born_from_its_second_call_on(case: Case, dtype: torch.dtype) -> None:
    plain = listed(case.run(dtype))
    birth = Birthplace(case.op, case.outputs)
    for step in range(3):
        places, results, copies = call_in_places(birth, case, dtype, plain)
        for where, i in zip(places, case.outputs, strict=True):
            assert where.owner.tolist() == results[i].untyped_storage().tolist()
        assert copies == (len(case.outputs) if step == 0 else 0)
    assert birth.missed == len(case.outputs)


def test_the_first_call_copies_and_counts_it() -> None:
    birth, x = Birthplace(aten.add.Tensor), torch.randn(100)
    before = counters.snapshot()
    birth([place(400)], (x, x))
    assert (counters.since(before).copies, counters.since(before).copied_bytes) == (1, 400)


def test_sizes_that_change_every_call_are_born() -> None:
    birth, before = Birthplace(aten.mm.default), counters.snapshot()
    for rows in (4, 7, 1, 32, 0, 5):
        a, b = torch.randn(rows, 8), torch.randn(8, 16)
        where = place(rows * 64)
        result, astray = birth([where], (a, b))
        assert astray == ()
        assert where.holds(result)
        assert torch.equal(result, a @ b)
    assert birth.missed == 1
    assert counters.since(before).copies == 1


def test_an_output_of_another_size_stays_where_it_is() -> None:
    birth = Birthplace(aten.nonzero.default)
    x, before = torch.tensor([0.0, 1.0, 2.0]), counters.snapshot()
    for size in (16, 8, 0, 64, 8):
        where = place(size)
        result, astray = birth([where], (x,))
        assert torch.equal(result, torch.tensor([[1], [2]]))
        assert (where.holds(result), astray) == ((True, ()) if size == 16 else (False, (0,)))
    assert counters.since(before).copies == 1


def test_an_empty_output_is_in_an_empty_place() -> None:
    result, astray = Birthplace(aten.relu.default)([place(0)], (torch.empty(0, 3),))
    assert (result.shape, astray) == ((0, 3), ())


def test_some_outputs_in_their_places_and_others_not() -> None:
    birth, x = Birthplace(aten.sort.default, (1, 0)), torch.randn(16)
    for _ in range(2):
        indices, values = place(16 * 8), place(100)
        result, astray = birth([indices, values], (x,))
        assert astray == (0,)
        assert indices.holds(result[1])
        assert torch.equal(result[0], x.sort().values)
        assert torch.equal(result[1], x.sort().indices)


def test_in_place_operators_are_refused_and_their_target_stays_born() -> None:
    for op in (aten.add_.Tensor, aten.relu_.default, aten.mm.out):
        with pytest.raises(ArgumentError, match="memory of an argument"):
            Birthplace(op)
    birth, x = Birthplace(aten.relu.default), torch.randn(16)
    for _ in range(2):
        where = place(64)
        result, _ = birth([where], (x,))
        result.add_(1.0)
        assert where.holds(result)
        assert torch.equal(torch.from_numpy(where.owner).view(torch.float32), x.relu() + 1.0)


def test_views_are_refused_and_those_that_pretend_to_be_none() -> None:
    x = torch.randn(4, 4)
    for op, *rest in [
        (aten.view.default, [16]),
        (aten.t.default,),
        (aten.split.Tensor, 2),
        (aten._unsafe_view.default, [16]),
        (aten.unsafe_split.Tensor, 2),
        (aten.unsafe_split_with_sizes.default, [1, 3]),
        (aten.unsafe_chunk.default, 2),
        (aten.lift.default,),
    ]:
        assert listed(op(x, *rest))[0].data_ptr() == x.data_ptr()
        with pytest.raises(ArgumentError, match="memory of an argument"):
            Birthplace(op)


def test_an_argument_that_comes_back_is_copied_each_time() -> None:
    birth, x = Birthplace(aten.conj_physical.default), torch.randn(16)
    assert aten.conj_physical(x) is x
    for n in range(1, 4):
        where = place(64)
        result, astray = birth([where], (x,))
        assert (where.holds(result), astray, birth.missed) == (True, (), n)
        assert torch.equal(result, x)


@pytest.mark.parametrize("outputs", [(), (0, 0), (-1,), tuple(range(9))])
def test_outputs_that_cannot_be(outputs: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="different numbers"):
        Birthplace(aten._foreach_add.Scalar, outputs)


def test_an_output_that_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has 1 outputs; there is no 1"):
        Birthplace(aten.mm.default, (1,))
    with pytest.raises(ArgumentError, match="need as many places"):
        Birthplace(aten.sort.default, (0, 1))([place(8)], (torch.randn(2),))
    case = BY_NAME["convolution_backward-masked"]
    with pytest.raises(ArgumentError, match=r"output 0 of .* is not a tensor"):
        Birthplace(case.op, (0,))([place(8)], case.arguments(torch.float32))
    with pytest.raises(ArgumentError, match=r"output 1 of .* is not a tensor"):
        Birthplace(lambda: torch.empty(4), (1,))([place(8)])


def test_gradients_are_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(ArgumentError, match="gradients"):
        Birthplace(aten.relu.default)([place(16)], (x,))


def test_keyword_arguments_and_kinds_of_results() -> None:
    x = torch.randn(8, 4)
    birth = Birthplace(torch.sort, (0,))
    for _ in range(2):
        where = place(128)
        result, _ = birth([where], (x,), {"dim": 0, "descending": True})
        assert isinstance(result, torch.return_types.sort)
        assert where.holds(result.values)
        assert torch.equal(result.values, x.sort(0, descending=True).values)


def test_eight_outputs_of_one_size() -> None:
    birth, xs = Birthplace(aten._foreach_mul.Scalar, tuple(range(8))), [torch.randn(16) for _ in range(8)]
    for _ in range(3):
        places = [place(64) for _ in range(8)]
        result, _ = birth(places, (xs, 2.0))
        assert isinstance(result, list)
        assert all(where.holds(y) and torch.equal(y, x * 2) for where, y, x in zip(places, result, xs, strict=True))
    assert birth.missed == 8


def test_an_operator_that_raises_leaves_the_places_free() -> None:
    birth, x, y = Birthplace(aten.mm.default), torch.randn(4, 4), torch.randn(5, 4)
    birth([place(64)], (x, x))
    where = place(64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            birth([where], (x, y))
    assert not where.holds(torch.empty(4, 4))  # nothing is armed any more
    result, _ = birth([where], (x, x))
    assert where.holds(result)
    assert birth.missed == 1


class Fickle:
    """An operator in Python that allocates as it is told."""

    def __init__(self, keeps: int = 1) -> None:
        self.order, self.scratch, self.kept = (0, 1), 0, deque[torch.Tensor](maxlen=keeps)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        for _ in range(self.scratch):
            self.kept.append(torch.full((16,), 9.0))
        made = {i: torch.full((16,), float(i)) for i in self.order}
        return made[0], made[1]


def test_outputs_that_change_their_order_are_distinguished() -> None:
    fickle = Fickle()
    birth = Birthplace(fickle, (0, 1))
    for order, missed in [((0, 1), 2), ((0, 1), 2), ((1, 0), 4), ((1, 0), 4), ((0, 1), 6), ((0, 1), 6)]:
        fickle.order = order
        places = [place(64), place(64)]
        result, astray = birth(places)
        assert [y.tolist() for y in result] == [[0.0] * 16, [1.0] * 16]
        assert all(where.holds(y) for where, y in zip(places, result, strict=True))
        assert (astray, birth.missed) == ((), missed)


def test_an_output_that_nobody_asked_for_leaves_the_place() -> None:
    fickle = Fickle()
    birth = Birthplace(fickle)
    birth([place(64)])
    fickle.order = (1, 0)
    where = place(64)
    result, _ = birth([where])
    assert where.holds(result[0])
    assert not where.holds(result[1])
    assert [y.tolist() for y in result] == [[0.0] * 16, [1.0] * 16]


def test_scratch_memory_in_a_place_is_no_harm() -> None:
    fickle = Fickle(keeps=0)
    birth = Birthplace(fickle, (0, 1))
    for scratch, missed in [(0, 2), (0, 2), (1, 4), (1, 4), (0, 6)]:
        fickle.scratch = scratch
        where = place(64), place(64)
        result, _ = birth(where)
        assert birth.missed == missed
        assert [y.tolist() for y in result] == [[0.0] * 16, [1.0] * 16]


def test_a_foreign_tensor_in_a_place_is_reported_and_not_overwritten() -> None:
    fickle = Fickle()
    birth = Birthplace(fickle)
    birth([place(64)])
    fickle.scratch = 1
    where = place(64)
    with pytest.raises(Unsupported, match="TENSORWIRE_BIRTH=off"):
        birth([where])
    assert where.holds(fickle.kept[0])
    assert fickle.kept[0].tolist() == [9.0] * 16
    fickle.kept.clear()
    result, _ = birth([where])
    assert where.holds(result[0])


def test_a_place_is_refused_while_a_tensor_lives_there() -> None:
    birth, x = Birthplace(aten.relu.default), torch.randn(16)
    for _ in range(2):  # a copy is as much alive as one that was born
        where = place(64)
        first, _ = birth([where], (x,))
        with pytest.raises(ArgumentError, match="is still alive"):
            birth([where], (x + 1,))
        assert torch.equal(first, x.relu())
        del first
        again, _ = birth([where], (x + 1,))
        assert torch.equal(again, (x + 1).relu())
        del again
    where = place(64)
    with pytest.raises(ArgumentError, match="two outputs"):
        Birthplace(Fickle(), (0, 1))([where, where])


def test_a_birth_within_a_birth() -> None:
    """The outer operator is Python that calls a birthplace."""
    inner, x = Birthplace(aten.neg.default), torch.randn(16)
    inner([place(64)], (x,))
    within = place(64)

    def op() -> torch.Tensor:
        y, _ = inner([within], (x,))
        assert within.holds(y)
        return y.clone()

    outer = Birthplace(op)
    for _ in range(3):
        where = place(64)
        result, _ = outer([where])
        assert where.holds(result)
        assert torch.equal(result, -x)
    assert (outer.missed, inner.missed) == (1, 1)


def test_raw_memory_of_mkldnn_may_be_a_place() -> None:
    """mkldnn takes and frees memory without a storage: it must come to no harm, and the owner must be free again."""
    native = allocator()
    assert native is not None
    x = torch.randn(64, 64)
    plain = x.to_mkldnn().to_dense()
    where = place(nbytes(x))
    native.begin(1, where.packed, b"\0\0\0\0")
    opaque = x.to_mkldnn()
    assert native.end() == 0
    assert alive(where)
    assert torch.equal(opaque.to_dense(), plain)
    del opaque
    assert not alive(where)


def test_raw_memory_of_mkldnn_that_is_not_ours_is_freed() -> None:
    x = torch.ones(1 << 22)
    x.to_mkldnn()
    before = resident()
    for _ in range(64):
        x.to_mkldnn()
    assert resident() - before < 8 * nbytes(x)


def resident() -> int:
    """Bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
