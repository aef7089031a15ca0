"""Plans as pictures: a lane for each worker, boxes for its operators, arrows for crossing tensors."""

from __future__ import annotations

from collections.abc import Sequence

from tensorwire.charts.lanes import Box, LaneMessage, Panel, plot_lanes
from tensorwire.cli.plan.blocks import BORN, BY_VALUE, COPIED, LENT, Arrow, Block, fold
from tensorwire.graph.plan import Edge
from tensorwire.sizes import size_text
from tensorwire.torch.graph.planning.plan_model import Planned

# In the legend's order.
KINDS = {BORN: "born in registered memory", LENT: "lent parameter", COPIED: "copied once", BY_VALUE: "by value"}


def plot_plans(path: str, title: str, planned: Sequence[Planned], *, option: str) -> None:
    """Draws the plans of a model's graphs, one below the other.

    Args:
        path: The picture; its suffix says its format.
        title: Stands above all.
        planned: The graphs, with their plans.
        option: What people gave the path to, for messages.

    Raises:
        ArgumentError: It cannot be drawn there.
        MissingPackage: matplotlib is not installed.
    """
    plot_lanes(path, title, [panel(one) for one in planned], kinds=[*KINDS.values()], option=option)


def panel(planned: Planned) -> Panel:
    """One graph's diagram."""
    graph, plan = planned.graph, planned.analysis.plan
    blocks, arrows = fold(graph, planned.analysis, planned.labels)
    count = len(plan.edges)
    title = f"{graph.name}: {len(graph.nodes):,} nodes, {count:,} edge{'s' * (count != 1)}"
    outboxes = dict(plan.outbox)
    lanes = {worker: f"outbox {size_text(outboxes.get(worker, 0))}" for worker in graph.workers}
    boxes = [Box(block.worker, block.level, _lines(block)) for block in blocks]
    return Panel(title, lanes, boxes, _messages(arrows))


def _messages(arrows: Sequence[Arrow]) -> list[LaneMessage]:
    """What goes to several workers is one message."""
    groups: dict[tuple[int, str, tuple[str, ...]], list[Arrow]] = {}
    for arrow in arrows:
        groups.setdefault((id(arrow.source), arrow.manner, tuple(e.name for e in arrow.edges)), []).append(arrow)
    found = []
    for same in groups.values():
        source, targets = same[0].source, tuple(dict.fromkeys(arrow.target.worker for arrow in same))
        found.append(LaneMessage(source.level, source.worker, targets, KINDS[same[0].manner], _words(same[0].edges)))
    return found


def _words(edges: Sequence[Edge]) -> str:
    what = edges[0].name if len(edges) == 1 else f"{len(edges)} tensors"
    known = [edge.nbytes for edge in edges if edge.nbytes is not None]
    amount = size_text(sum(known)) if len(known) == len(edges) else "any size"
    kinds = sorted({edge.kind for edge in edges} - {"static", "value"})
    return ", ".join([f"{what}: {amount}", *kinds])


def _lines(block: Block) -> tuple[str, ...]:
    """What stands in a box: its first and its last module, and how many operators."""
    if not block.ops:
        return ("what the caller gets" if block.receives else "what it was given",)
    count = sum(block.ops.values())
    paths = [_layer(label) for label in block.labels if label]
    if not paths:
        paths = ["the model itself"] if block.labels else [block.ops.most_common(1)[0][0]]
    last = [f"to {paths[-1]}"] if paths[0] != paths[-1] else []
    return (paths[0], *last, f"{count:,} operator{'s' * (count != 1)}")


def _layer(path: str) -> str:
    """The path up to its first number: of a part of a layer, the layer."""
    parts = path.split(".")
    return ".".join(parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts))])
