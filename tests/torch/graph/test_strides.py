"""What a tensor is decides how it is sent: operators here make other strides than tracing said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tensorwire.device import Device, LoopbackDevice, TcpDevice
from tensorwire.errors import Unsupported
from tensorwire.graph import Analysis, Graph, Unknown, analyze
from tensorwire.graph.kinds import BOUNDED, DYNAMIC, STATIC, VALUE
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.observe import counters
from tensorwire.torch.graph.capture.importer import InputOrigin
from tensorwire.torch.graph.memory.strided import fill
from tests.torch.graph.graphs import WORKERS, Runs, captured, moved
from tests.torch.graph.lying import lie, mislead
from tests.torch.graph.together import Together

Function = Callable[..., tuple[torch.Tensor, ...]]
aten = torch.ops.aten


def cut(module: fx.GraphModule, most: int | None = None, always: bool = False, saved: bool = False) -> Analysis:
    """The operators whose results are returned are on worker 1, all others on worker 0. ``most``: of every length that
    is not known. ``always``: all is copied. ``saved``: what is given lies on worker 0."""
    graph = moved(module, InputOrigin("saved", WORKERS[:1]) if saved else InputOrigin())
    if most is not None:
        graph = Graph(graph.name, graph.workers, tuple(_bounded(node, most) for node in graph.nodes), graph.outputs)
    return analyze(graph, copies=always)


def _bounded(node: Any, most: int) -> Any:
    if node.spec is None or node.spec.static:
        return node

    def bound(numbers: Any) -> tuple[Any, ...]:
        return tuple(
            Unknown(n.text, most if n.text.isidentifier() else 999) if isinstance(n, Unknown) else n for n in numbers
        )

    return replace(node, spec=replace(node.spec, shape=bound(node.spec.shape), stride=bound(node.spec.stride)))


def second(
    module: fx.GraphModule, analysis: Analysis, examples: Sequence[torch.Tensor], device: Callable[[], Device]
) -> tuple[list[torch.Tensor], int]:
    """What worker 1 returns in a third run, and how many copies that run made."""
    with Together(2, device) as together:
        prepared = together.each(lambda group: Runs(group, module, analysis))

        def once(group: WorkerGroup) -> list[torch.Tensor]:
            results: list[torch.Tensor] = prepared[WORKERS.index(group.me)](*examples)
            return results

        for _ in range(2):
            together.each(once)
        before = counters.snapshot()
        results = together.each(once)[1]
        copies = counters.since(before).copies
        return [kept(result) for result in results], copies


def kept(value: torch.Tensor) -> torch.Tensor:
    """Of memory of its own."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def check(
    function: Function,
    examples: Sequence[torch.Tensor],
    kinds: str,
    copies: int,
    device: Callable[[], Device] = LoopbackDevice,
    *,
    strides: bool = True,
    **options: Any,
) -> None:
    """``kinds``: of the edges. Values and ``strides`` are those of one process."""
    module = captured(function, examples, symbolic=kinds in (BOUNDED, DYNAMIC))
    analysis = cut(module, **options)
    assert {edge.kind for edge in analysis.plan.edges if edge.spec is not None} == {kinds}
    results, made = second(module, analysis, examples, device)
    for mine, right in zip(results, module(*examples), strict=True):
        assert torch.equal(mine, right)
        assert not strides or mine.stride() == right.stride()
    assert made == copies


STRAIGHT, TURNED = [0, 1, 2], [0, 2, 1]
X = torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)
devices = pytest.mark.parametrize("device", [LoopbackDevice, TcpDevice])


@devices
@pytest.mark.parametrize(("traced", "real"), [(STRAIGHT, TURNED), (TURNED, STRAIGHT), (STRAIGHT, [2, 1, 0])])
@pytest.mark.parametrize("always", [False, True])
def test_known_shapes(traced: list[int], real: list[int], always: bool, device: Callable[[], Device]) -> None:
    check(lambda x: (lie(x, traced, real, 0).relu(),), [X], STATIC, int(always), device, always=always)


@devices
def test_parts_of_one_memory_lie_where_they_are(device: Callable[[], Device]) -> None:
    """Neither overwrites the other, nor what the source goes on to read."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = lie(x, STRAIGHT, TURNED, 0)
        return made[1:2].relu(), made[:, 1:3, 2:5].neg(), (made + 1).sum(0).exp()

    check(function, [X], STATIC, 0, device)


@devices
def test_small_tensors(device: Callable[[], Device]) -> None:
    check(lambda x: (lie(x, [0, 1], [1, 0], 0).relu(),), [X[0, :2, :6]], VALUE, 0, device)


@devices
def test_a_small_tensor_that_shows_much(device: Callable[[], Device]) -> None:
    """Its memory has 4 bytes, its elements have 4000: its neighbours stay what they are."""
    wide, narrow = torch.ones(1).expand(1000), torch.arange(3.0)
    check(lambda x, y, z: (x.relu(), y.neg(), z.neg()), [wide, narrow, narrow + 4], VALUE, 0, device, saved=True)


@devices
@pytest.mark.parametrize("kind", [BOUNDED, DYNAMIC])
def test_unknown_shapes(kind: str, device: Callable[[], Device]) -> None:
    most = 16 if kind == BOUNDED else None
    check(lambda x: (lie(x, STRAIGHT, TURNED, 0).relu(),), [X], kind, 0, device, most=most)


@devices
@pytest.mark.parametrize("kind", [STATIC, BOUNDED, DYNAMIC])
def test_what_does_not_begin_where_its_memory_does_is_copied(kind: str, device: Callable[[], Device]) -> None:
    """Its memory is larger than traced, so it is born elsewhere."""
    most = 16 if kind == BOUNDED else None
    check(lambda x: (lie(x, STRAIGHT, TURNED, 5).relu(),), [X], kind, 1, device, most=most)


@devices
def test_parts_of_a_memory_of_another_size(device: Callable[[], Device]) -> None:
    """They are copied to where the plan has them, with the strides that it has."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = lie(x, STRAIGHT, TURNED, 5)
        return made[1:2].relu(), made[:, 1:3, 2:5].neg(), (made + 1).sum(0).exp()

    check(function, [X], STATIC, 2, device, strides=False)


@devices
def test_memory_with_gaps_that_were_not_traced(device: Callable[[], Device]) -> None:
    """It has no room with its gaps: the order of its dimensions stays."""
    function = aten.relu.default
    module = captured(lambda x: (function(x),), [X.transpose(1, 2)])
    results, copies = second(module, cut(module, saved=True), [torch.zeros(4, 8, 12)[:, :, ::2]], device)
    assert copies == 1
    assert results[0].shape == (4, 8, 6)
    assert results[0].is_contiguous()


def test_a_view_of_more_than_it_was_given() -> None:
    """It counts from the memory that the narrow one is a part of: both are made of all of it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = lie(x, STRAIGHT, STRAIGHT, 0)[1:2]
        return part.as_strided((3, 6, 8), (48, 8, 1), 48).neg(), part.exp()

    check(function, [X], STATIC, 0)


@pytest.mark.parametrize("shape", [[4, 8, 6], [192]])
def test_a_shape_that_was_not_traced_is_refused(shape: list[int]) -> None:
    with pytest.raises(Unsupported, match=r"mislead is float32\[4, 6, 8\] now, and was traced as float32"):
        check(lambda x: (mislead(x, shape, torch.float32).relu(),), [X], STATIC, 0)


@pytest.mark.parametrize("x", [X, X[0, 0, :2]])
def test_a_dtype_that_was_not_traced_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match=r"mislead is float32.* now, and was traced as int32"):
        check(lambda x: (mislead(x, list(x.shape), torch.int32).neg(),), [x], kind_of_x(x), 0)


def kind_of_x(x: torch.Tensor) -> str:
    return VALUE if x.nbytes <= 64 else STATIC


def test_a_fold_that_was_traced_and_is_none_is_refused() -> None:
    """One element stands for many in the plan; here they differ."""
    module = captured(lambda x: (aten.relu.default(x),), [torch.ones(4, 6, 1).expand(4, 6, 8)])
    with pytest.raises(Unsupported, match="has strides"):
        second(module, cut(module, saved=True), [X], LoopbackDevice)


def test_nothing_is_copied_onto_memory_that_it_lies_in() -> None:
    room = torch.zeros(20)
    for value, there in [(room[:9].view(3, 3), room[:9].view(3, 3).t()), (room[:10], room[9:19])]:
        with pytest.raises(Unsupported, match="onto memory that it lies in"):
            fill(there, value)
    assert torch.equal(fill(room[10:], torch.ones(10)), torch.ones(10))
    assert torch.equal(fill(room[:10], room[10:]), torch.ones(10))


@devices
@pytest.mark.parametrize("turn", ["moved", "moved and turned", "turned"])
def test_a_parameter_that_is_lent(turn: str, device: Callable[[], Device]) -> None:
    """Its borrower reads it with the strides that it had when the graph was planned."""
    weight = torch.arange(256.0).view(16, 16)
    module = captured(lambda w: (w.relu(),), [weight])
    analysis = analyze(moved(module, InputOrigin("parameter", WORKERS[:1])))
    assert [edge.lent for edge in analysis.plan.edges] == [True]
    with Together(2, device) as together:

        def once(group: WorkerGroup) -> torch.Tensor | None:
            runs, found = Runs(group, module, analysis), None
            for step in range(2):
                if group.me == WORKERS[0] and not step:
                    runs.transfers.adopt(0, weight)
                elif group.me == WORKERS[0]:
                    weight.data = {
                        "moved": weight.clone(),
                        "moved and turned": weight.t().contiguous().t(),
                        "turned": weight.t(),
                    }[turn]
                found = runs(weight, use=lambda results: None if results[0] is None else results[0].clone())
            return found

        if turn == "turned":  # in the memory that it is lent from
            with pytest.raises(Unsupported, match="onto memory that it lies in"):
                together.each(once)
            return
        before = counters.snapshot()
        assert torch.equal(together.each(once)[1], weight)  # type: ignore[arg-type]
        assert counters.since(before).copies == 2  # one moved it into the memory that it is lent from
