"""Without the allocator: the same results in the same places, by ``out=`` where that is as good, else by one copy."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.errors import ArgumentError
from tensorwire.torch.graph.memory.birthplace import Birthplace, alive, why_not
from tensorwire.torch.graph.memory.out_variants import OutVariant
from tests.harness.jobs import run_job
from tests.torch.graph import cuts
from tests.torch.graph.operators import CASES, Case
from tests.torch.graph.rooms import call_in_places, listed, liveness, nbytes, place

aten = torch.ops.aten
# Those of CASES that have a real out= variant with one output.
DIRECT = {
    *("mm", "mm-transposed", "addmm", "addmm-square", "bmm", "add", "add-transposed", "add-alpha", "mul", "div"),
    *("gelu", "gelu_backward", "silu", "tanh", "pow", "rsqrt", "where", "softmax", "softmax_backward", "log_softmax"),
    *("argmax", "cat", "index", "index_select", "gather", "scatter", "scatter_add", "sum", "mean", "cumsum"),
    *("max_pool_backward", "avg_pool", "threshold_backward", "nll_loss_backward"),
}


def switched_off(job: tw.Job, program: Callable[[tw.Job], Any]) -> Any:
    os.environ["TENSORWIRE_BIRTH"] = "off"
    assert why_not() == "TENSORWIRE_BIRTH=off"
    return program(job)


def without_allocator(program: Callable[[tw.Job], Any]) -> list[Any]:
    return run_job(switched_off, program, workers=1, servers=0).ok()


def every_operator(job: tw.Job) -> dict[str, list[int]]:
    """The copies of each but the first call."""
    copies: dict[str, list[int]] = {}
    for case in CASES:
        for dtype in case.dtypes:
            plain = listed(case.run(dtype))
            birth = Birthplace(case.op, case.outputs)
            for step in range(3):
                places, results, made = call_in_places(birth, case, dtype, plain)
                if step > 0:
                    copies.setdefault(case.name, []).append(made)
            alive = [liveness(p) for p in places]
            places.clear()
            assert all(owner() is not None for owner in alive)
            del results
            assert not any(owner() is not None for owner in alive), case.name
    return copies


@pytest.mark.slow
def test_every_operator_has_the_same_bits_in_its_place() -> None:
    (copies,) = without_allocator(every_operator)
    assert {name for name, made in copies.items() if not any(made)} == DIRECT
    for case in CASES:
        if case.name not in DIRECT:
            assert set(copies[case.name]) == {len(case.outputs)}, case.name


def every_layout(job: tw.Job) -> None:
    """An ``out=`` variant that was believed for one layout is asked for others, too."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(500, generator=generator), torch.randn(700, generator=generator)]

    def arguments(case: Case, layout: str) -> tuple[Any, ...]:
        draw = random.Random(1)

        def operand(*shape: int) -> torch.Tensor:
            made = cuts.laid(values[draw.randrange(2)], shape, layout, draw, int(case.name.startswith("flash")))
            return made.clone() if "batch_norm" in case.name else made  # it changes some of them

        return case.make(operand)

    for case in (case for case in cuts.USABLE if not case.name.startswith("empty")):
        birth = Birthplace(case.op, case.outputs)
        for layout in cuts.LAYOUTS * 2:
            plain = listed(case.op(*arguments(case, layout)))
            places = [place(nbytes(plain[i])) for i in case.outputs]
            result, _ = birth(places, arguments(case, layout))
            for mine, right in zip(listed(result), plain, strict=True):
                if isinstance(right, torch.Tensor):
                    assert cuts.same_bits(mine, right), (case.name, layout)
                    assert mine.stride() == right.stride(), (case.name, layout)


@pytest.mark.long
def test_operands_of_every_layout_give_the_bits_and_strides_of_the_operator() -> None:
    without_allocator(every_layout)


def wrong_calls(job: tw.Job) -> None:
    birth, x = Birthplace(aten.mm.default), torch.randn(8, 8)
    for rows, size in [(8, 256), (4, 128), (4, 256), (8, 64), (0, 0), (0, 64)]:
        astray = () if rows * 32 == size else (0,)
        where = place(size)
        result, elsewhere = birth([where], (x[:rows], x))
        assert torch.equal(result, x[:rows] @ x)
        assert elsewhere == astray, (rows, size)
        assert where.holds(result) != bool(astray)
        assert alive(where) == (size > 0 and not astray)
        if alive(where):
            with pytest.raises(ArgumentError, match="is still alive"):
                birth([where], (x[:rows], x))
        del result
        assert not alive(where)

    where = place(512)
    double = x.double()
    result, _ = birth([where], (double, double))  # another dtype is proved by itself
    assert where.holds(result)
    assert torch.equal(result, double @ double)

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        birth([place(256)], (x, x[:3]))

    where = place(64)
    with pytest.raises(ArgumentError, match="two outputs have this place"):
        Birthplace(aten._foreach_neg.default, (0, 1))([where, where], ([x[0, :4]] * 2,))


def test_errors_are_those_with_the_allocator() -> None:
    without_allocator(wrong_calls)


@pytest.mark.parametrize(
    "op",
    [
        aten.embedding_dense_backward.default,  # has an out= that computes elsewhere and copies
        aten.native_layer_norm.default,  # several outputs
        aten.bernoulli.p,  # another run draws other numbers
        aten.sort.default,
        torch.mm,  # no operator of a graph
    ],
)
def test_variants_that_are_not_worth_it(op: object) -> None:
    assert OutVariant.of(op) is None
