"""Random graphs over random workers give the bits of one process, whichever way their tensors cross."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx

from tensorwire.device import Device, LoopbackDevice, ShmDevice
from tests.levels import long
from tests.torch.graph.graphs import analyzed, captured, fits, run
from tests.torch.graph.together import Together
from tests.torch.graph.watched import WatchedTransfers

ROWS = (4, 6, 4, 8)  # run after run, where they change


def program(seed: int, length: int) -> tuple[list[list[torch.Tensor]], object]:
    """A function of a few operators over earlier values, drawn by ``seed``, and its arguments in each run."""
    draw = random.Random(seed)
    steps = [(draw.randrange(15), draw.random(), draw.random()) for _ in range(length)]
    generator = torch.Generator().manual_seed(seed)
    examples = [[torch.randn((rows, 6), generator=generator) for _ in range(2)] for rows in ROWS]

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for kind, one, other in steps:
            a, b = values[int(one * len(values))], values[int(other * len(values))]
            values.append(_apply(kind, a, b))
        return tuple(values[-3:])

    return examples, function


def _apply(kind: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = a.shape[0]
    if kind == 0:
        return a @ b.t() @ b / 8
    if kind == 1:
        return torch.relu(a + b)
    if kind == 2:
        return a.t().contiguous().t()
    if kind == 3:
        return a.reshape(rows // 2, 12).transpose(0, 1).reshape(rows, 6)
    if kind == 4:
        return torch.native_layer_norm(a, [6], None, None, 1e-5)[0] + b
    if kind == 5:
        return torch.cat([part * 2 for part in a.split(2, 1)], 1)
    if kind == 6:
        return a.sum(0, keepdim=True).expand(rows, 6)
    if kind == 7:
        return torch.cat([a[:1], b[1:]])
    if kind == 8:
        return a.clone().mul_(b).add_(1)  # in place, on what it made itself
    if kind == 9:
        return torch.sort(a, 1)[0].t().reshape(rows, 6)
    if kind == 10:
        return torch.native_layer_norm(a.t().contiguous().t(), [6], None, None, 1e-5)[0]  # it has strides of its own
    if kind == 11:
        return (a.t() + b.t()).t()
    if kind == 12:
        return torch.cat([a, b], 1)[:, ::2] * 2  # with gaps
    if kind == 13:
        return (a.t() @ b.mean(1, keepdim=True).expand(rows, 6)).repeat(rows, 1)[:rows] / 8
    return torch.softmax(a * 0.5, 1) - b.mean()


@pytest.mark.parametrize("copies", [False, long(True)])
@settings(max_examples=12, deadline=None)
@example(seed=77822, workers=3, length=7, device=LoopbackDevice, varies=False)  # a source two runs ahead of its target
@given(
    seed=st.integers(0, 10**6),
    workers=st.integers(2, 3),
    length=st.integers(1, 30),
    device=st.sampled_from([ShmDevice, LoopbackDevice]),
    varies=st.sampled_from([True, True, False]),
)
def test_the_same_bits(
    copies: bool, seed: int, workers: int, length: int, device: Callable[[], Device], varies: bool
) -> None:
    """In most graphs the number of rows changes from run to run, so that most of what crosses has any size."""
    given, function = program(seed, length)
    module = captured(function, given[0], symbolic=varies)  # type: ignore[arg-type]
    *before, examples = [each for each in given if varies and fits(module, each)] or given[:1]
    names = tuple(f"worker {i}" for i in range(workers))
    draw = random.Random(seed + 1)
    chosen: dict[str, str | None] = {}

    def worker_of(node: fx.Node) -> str | None:
        return chosen.setdefault(node.name, draw.choice((*names, None)))

    analysis = analyzed(module, names, worker_of, copies=copies)
    expected: Sequence[torch.Tensor] = module(*examples)
    with Together(workers, device) as together:
        results = run(together, module, analysis, examples, max(1, 3 - len(before)), WatchedTransfers, before)
    for worker in results:
        for value, right in zip(worker, expected, strict=True):
            assert torch.equal(value, right)
            assert value.shape == right.shape
