"""A drawing of plans as SVG: a lane for each host, time downwards, an arrow for what crosses.

Arrows differ in their strokes as well as in colour, so that a grey print is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from tensorwire.graph.blocks import BORN, BY_VALUE, COPIED, LENT, Arrow, Block, fold
from tensorwire.graph.ir import Graph
from tensorwire.graph.plan import Analysis
from tensorwire.sizes import size_text

Drawn = tuple[Graph, Analysis, Mapping[str, str]]

LANE, GAP, MARGIN = 270, 250, 24  # pixels: widths of a lane, of the space between two, and around all
_LINE, _PORT, _ROW = 16, 30, 26  # heights: of a line of text, of an arrow's end, between two rows of blocks
# Colours of Okabe and Ito, which people with any colour vision tell apart.
_STROKES = {
    BORN: {"stroke": "#0072B2", "stroke-width": "2.2"},
    LENT: {"stroke": "#009E73", "stroke-width": "2.2", "stroke-dasharray": "14 3 2 3"},
    COPIED: {"stroke": "#D55E00", "stroke-width": "1.8", "stroke-dasharray": "7 4"},
    BY_VALUE: {"stroke": "#555555", "stroke-width": "1.2", "stroke-dasharray": "2 3"},
}
_WORDS = {BORN: "born in registered memory", LENT: "lent parameter", COPIED: "copied once", BY_VALUE: "by value"}


def draw(title: str, drawn: Sequence[Drawn]) -> str:
    """The SVG of graphs, one below the other: of each the graph, its analysis, and the module of nodes by name."""
    return _Drawing(title, drawn).text()


class _Drawing:
    def __init__(self, title: str, drawn: Sequence[Drawn]) -> None:
        self.hosts = drawn[0][0].hosts
        self.width = 2 * MARGIN + len(self.hosts) * LANE + (len(self.hosts) - 1) * GAP
        self.root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif"})
        self._style()
        self.back = ElementTree.SubElement(self.root, "g")
        self.y = float(MARGIN)
        self._text(MARGIN, self.y + 6, title, 17, weight="bold")
        self.y += 22
        self._legend()
        for one in drawn:
            self._graph(*one)
        self.root.set("viewBox", f"0 0 {self.width} {self.y:.0f}")
        self.root.set("width", str(self.width))
        self.root.set("height", f"{self.y:.0f}")
        paper = {"width": "100%", "height": "100%", "fill": "#ffffff"}
        self.back.insert(0, ElementTree.Element("rect", paper))

    def text(self) -> str:
        ElementTree.indent(self.root, " ")
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"

    # ---- parts

    def _style(self) -> None:
        definitions = ElementTree.SubElement(self.root, "defs")
        for manner, stroke in _STROKES.items():
            box = {"id": _head(manner), "viewBox": "0 0 10 10", "refX": "9", "refY": "5", "orient": "auto"}
            marker = ElementTree.SubElement(definitions, "marker", {**box, "markerWidth": "10", "markerHeight": "10"})
            marker.set("markerUnits", "userSpaceOnUse")
            ElementTree.SubElement(marker, "path", {"d": "M0 0 L10 5 L0 10 z", "fill": stroke["stroke"]})

    def _legend(self) -> None:
        x = float(MARGIN)
        for manner, words in _WORDS.items():
            line = {"x1": f"{x:.0f}", "x2": f"{x + 40:.0f}", "y1": f"{self.y:.0f}", "y2": f"{self.y:.0f}"}
            ElementTree.SubElement(
                self.root, "line", {**line, **_STROKES[manner], "marker-end": f"url(#{_head(manner)})"}
            )
            self._text(x + 48, self.y + 4, words, 12)
            x += 66 + 6.6 * len(words)
        self.y += 14

    def _graph(self, graph: Graph, analysis: Analysis, labels: Mapping[str, str]) -> None:
        blocks, arrows = fold(graph, analysis, labels)
        self.y += 30
        count = len(analysis.plan.edges)
        self._text(MARGIN, self.y, f"{graph.name}: {len(graph.nodes):,} nodes, {count:,} edge{'s' * (count != 1)}", 14)
        top = self.y + 10
        for host, nbytes in analysis.plan.outbox:
            middle = self._left(host) + LANE / 2
            self._text(middle, top + 22, host, 14, anchor="middle", weight="bold")
            self._text(middle, top + 40, f"outbox {size_text(nbytes)}", 12, anchor="middle")
        self.y = top + 54
        at = self._place(blocks, arrows)
        for host in graph.hosts:
            lane = {"x": f"{self._left(host):.0f}", "y": f"{top:.0f}", "width": str(LANE), "rx": "6", "fill": "#f1f3f5"}
            ElementTree.SubElement(self.back, "rect", {**lane, "height": f"{self.y - top:.0f}"})
        ports = self._ports(arrows, at)
        for arrow, begin, end in ports:
            self._arrow(arrow, begin, end)
        for arrow, begin, _ in ports:
            self._label(arrow, *begin)
        for block in blocks:
            self._block(block, *at[id(block)])

    def _place(self, blocks: Sequence[Block], arrows: Sequence[Arrow]) -> dict[int, tuple[float, float]]:
        """Top and height of each block; those of one level are side by side."""
        ends: dict[tuple[int, int], int] = defaultdict(int)  # by block and side
        for arrow in arrows:
            ends[id(arrow.source), self._side(arrow)] += 1
            ends[id(arrow.target), -self._side(arrow)] += 1
        levels: dict[int, list[Block]] = defaultdict(list)
        for block in blocks:
            levels[block.level].append(block)
        at = {}
        for level in sorted(levels):
            heights = []
            for block in levels[level]:
                ports = max(ends[id(block), side] for side in (-1, 1))
                heights.append(max(_LINE * len(_modules(block)) + 12.0, _PORT * ports + 8.0))
                at[id(block)] = (self.y, heights[-1])
            self.y += max(heights) + _ROW
        return at

    def _ports(
        self, arrows: Sequence[Arrow], at: Mapping[int, tuple[float, float]]
    ) -> list[tuple[Arrow, tuple[float, float], tuple[float, float]]]:
        """Where each arrow begins and ends: on the side towards the other host, what arrives above what leaves."""
        used: dict[tuple[int, int], int] = defaultdict(int)
        places: dict[tuple[int, bool], float] = {}
        for leaves in (False, True):
            for arrow in arrows:
                block = arrow.source if leaves else arrow.target
                side = self._side(arrow) if leaves else -self._side(arrow)
                places[id(arrow), leaves] = at[id(block)][0] + 4 + _PORT * (used[id(block), side] + 0.62)
                used[id(block), side] += 1
        found = []
        for arrow in arrows:
            side = self._side(arrow)
            begin = self._left(arrow.source.host) + (LANE if side > 0 else 0)
            end = self._left(arrow.target.host) + (0 if side > 0 else LANE)
            found.append((arrow, (begin, places[id(arrow), True]), (end, places[id(arrow), False])))
        return found

    def _arrow(self, arrow: Arrow, begin: tuple[float, float], end: tuple[float, float]) -> None:
        (x1, y1), (x2, y2) = begin, end
        bend = (GAP / 2) * self._side(arrow)
        curve = f"M{x1:.0f} {y1:.0f} C{x1 + bend:.0f} {y1:.0f} {x2 - bend:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
        line = {"d": curve, "fill": "none", **_STROKES[arrow.manner], "marker-end": f"url(#{_head(arrow.manner)})"}
        path = ElementTree.SubElement(self.root, "path", line)
        ElementTree.SubElement(path, "title").text = "\n".join(map(str, arrow.edges[:40]))

    def _label(self, arrow: Arrow, x: float, y: float) -> None:
        right = self._side(arrow) > 0
        self._text(x + (8 if right else -8), y - 6, _words(arrow), 11, anchor="start" if right else "end", halo=True)

    def _block(self, block: Block, top: float, height: float) -> None:
        x = self._left(block.host) + 8
        box = {"x": f"{x:.0f}", "y": f"{top:.0f}", "width": str(LANE - 16), "height": f"{height:.0f}", "rx": "4"}
        rect = ElementTree.SubElement(self.root, "rect", {**box, "fill": "#ffffff", "stroke": "#333333"})
        ElementTree.SubElement(rect, "title").text = "\n".join(f"{n} x {op}" for op, n in block.ops.most_common(20))
        lines = _modules(block)
        y = top + (height - _LINE * len(lines)) / 2 + 12
        for number, line in enumerate(lines):
            font, fill = (11, "#555555") if 0 < number == len(lines) - 1 else (12, "#111111")
            self._text(x + (LANE - 16) / 2, y + _LINE * number, line, font, anchor="middle", fill=fill)

    # ---- small things

    def _left(self, host: str) -> float:
        return MARGIN + self.hosts.index(host) * (LANE + GAP)

    def _side(self, arrow: Arrow) -> int:
        """1 if it goes to the right, -1 to the left."""
        return 1 if self.hosts.index(arrow.target.host) > self.hosts.index(arrow.source.host) else -1

    def _text(
        self,
        x: float,
        y: float,
        words: str,
        height: int,
        *,
        anchor: str = "start",
        weight: str = "normal",
        fill: str = "#111111",
        halo: bool = False,
    ) -> None:
        place = {"x": f"{x:.0f}", "y": f"{y:.0f}", "font-size": str(height), "text-anchor": anchor, "fill": fill}
        if halo:  # read across lines
            around = {**place, "stroke": "#ffffff", "stroke-width": "3", "stroke-linejoin": "round"}
            ElementTree.SubElement(self.root, "text", around).text = words
        ElementTree.SubElement(self.root, "text", {**place, "font-weight": weight}).text = words


def _head(manner: str) -> str:
    return "head-" + manner.replace(" ", "-")


def _words(arrow: Arrow) -> str:
    edges = arrow.edges
    total = None if any(edge.nbytes is None for edge in edges) else sum(edge.nbytes or 0 for edge in edges)
    kinds = ", ".join(sorted({edge.kind for edge in edges}))
    what = _short(edges[0].name, 18) if len(edges) == 1 else f"{len(edges)} tensors"
    return f"{what}: {'any size' if total is None else size_text(total)}, {kinds}"


def _modules(block: Block) -> list[str]:
    """What is written in a block: its first and its last module, and how many operators."""
    if not block.ops:
        return ["what the caller gets" if block.receives else "what it was given"]
    count = sum(block.ops.values())
    paths = [_layer(label) for label in block.labels if label]
    if not paths:
        paths = ["the model itself"] if block.labels else [block.ops.most_common(1)[0][0]]
    last = [f"to {_short(paths[-1], 34)}"] if paths[0] != paths[-1] else []
    return [_short(paths[0], 36), *last, f"{count:,} operator{'s' * (count != 1)}"]


def _layer(path: str) -> str:
    """The path up to its first number: of a part of a layer, the layer."""
    parts = path.split(".")
    return ".".join(parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts))])


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else f"…{words[1 - most :]}"
