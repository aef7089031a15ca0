"""What ``tensorwire plan`` prints about a model, for people and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from tensorwire.cli.plan.blocks import BY_VALUE, LENT, manner
from tensorwire.graph.plan import Edge, Plan
from tensorwire.sizes import size_text
from tensorwire.tables import print_table
from tensorwire.torch.graph.planning.plan_model import Planned

MOST_EDGES = 16  # of a graph, that are shown one by one
KIB, MIB = 2**10, 2**20
CLASSES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, None)  # bytes, each up to but without
_BAR = 24  # characters


@dataclass(frozen=True)
class Summary:
    """``parameters``: bytes and elements by name; ``cut``: nobody said the placement; ``seconds``: of tracing, of
    analysis."""

    name: str
    parameters: Mapping[str, tuple[int, int]]
    placement: Mapping[str, str]
    cut: bool
    planned: Sequence[Planned]
    seconds: tuple[float, float]

    # ---- in words

    def show(self) -> None:
        """Prints it."""
        sizes = [nbytes for nbytes, _ in self.parameters.values()]
        elements = sum(n for _, n in self.parameters.values())
        click.echo(f"{self.name}: {elements:,} parameters in {len(sizes):,} variables, {sum(sizes) / MIB:,.2f} MiB")
        if sizes:
            mean, median, largest = map(size_text, (statistics.fmean(sizes), statistics.median(sizes), max(sizes)))
            click.echo(f"mean {mean}, median {median}, largest {largest}")
            click.echo()
            print_table(("bytes of a variable", "variables", "MiB", ""), self._histogram(sizes), left=(0, 3))
        click.echo(f"\ntraced in {self.seconds[0]:.2f} s, analysed in {self.seconds[1]:.2f} s\n")
        self._show_placement()
        for planned in self.planned:
            self._show_graph(planned)
        self._show_copies()
        self._show_memory()

    def _histogram(self, sizes: Sequence[int]) -> list[tuple[str, str, str, str]]:
        rows = []
        for one in self._classes(sizes):
            least, limit, count = one["from"], one["below"], one["variables"]
            words = f"{size_text(least)} and more" if limit is None else f"{size_text(least)} to {size_text(limit)}"
            bar = "#" * round(_BAR * count / len(sizes)) or "." * bool(count)
            words = words if least else f"less than {size_text(limit)}"
            rows.append((words, f"{count:,}", f"{one['nbytes'] / MIB:,.2f}", bar))
        return rows

    def _show_placement(self) -> None:
        how = "cut in the order of its layers, by bytes of parameters" if self.cut else "as it was said"
        click.echo(f"placement, {how}")
        paths: dict[str, list[str]] = defaultdict(list)
        for path, worker in self.placement.items():
            paths[worker].append(path or "the model itself")
        if "" not in self.placement and not self.cut:
            paths[self.planned[0].graph.workers[0]].append("all others")
        held = self._held()
        rows = []
        for worker in self.planned[0].graph.workers:
            some = paths[worker]
            shown = ", ".join(some) if len(some) <= 4 else f"{some[0]}, {some[1]}, ... {some[-1]} ({len(some)} modules)"
            rows.append((worker, shown or "nothing", f"{held[worker] / MIB:,.2f}"))
        print_table(("worker", "modules", "MiB of parameters"), rows, left=(0, 1))

    def _held(self) -> Counter[str]:
        """Bytes of parameters and buffers by worker; of tied ones, once."""
        held: Counter[str] = Counter()
        for planned in self.planned:
            for node in planned.graph.nodes:
                if node.kind == "parameter" and node.present and node.spec is not None:
                    held[node.present[0]] += node.spec.nbytes or 0
        return held

    def _show_graph(self, planned: Planned) -> None:
        plan = planned.analysis.plan
        count = len(plan.edges)
        click.echo(f"\n{plan.name}: {len(planned.graph.nodes):,} nodes, {count:,} edge{'s' * (count != 1)}")
        if not plan.edges:
            return
        if count <= MOST_EDGES:
            rows = [_row(edge) for edge in plan.edges]
            print_table(("edge", "from", "to", "tensor", "kind", "bytes", "born"), rows, left=(0, 1, 2, 3, 4, 6))
        else:
            print_table(("edges", "from", "to", "kind", "bytes", "born"), _folded(plan), left=(1, 2, 3, 5))
        for one in plan.traffic:
            more = f", besides {one.unbounded} of any size" if one.unbounded else ""
            copies = f"{one.born} born, {one.lent} lent, {one.copied} copied, {one.values} by value"
            click.echo(f"{one.source} to {one.target}: {one.nbytes:,} bytes a step{more}: {copies}")

    def _show_copies(self) -> None:
        """What a step copies, of all graphs together."""
        rows = []
        for worker in self.planned[0].graph.workers:
            ours = [one for planned in self.planned for one in planned.analysis.plan.copies if one.worker == worker]
            sent, received, unbounded = (
                sum(getattr(one, n) for one in ours) for n in ("sent", "received", "unbounded")
            )
            nbytes = f"{sum(one.nbytes for one in ours):,}" + (f", and {unbounded} of any size" if unbounded else "")
            rows.append((worker, f"{sent:,}", f"{received:,}", nbytes))
        click.echo("\ncopies a step, in the steady state")
        print_table(("worker", "of what it sends", "of what it receives", "bytes"), rows, left=(0,))

    def _show_memory(self) -> None:
        """What is registered: for all graphs together, since all stay."""
        outboxes, inboxes = self._registered()
        click.echo("\nregistered memory, a bank (a graph begins with two)")
        rows = [(worker, "outbox", f"{nbytes:,}") for worker, nbytes in outboxes.items()]
        for (source, target), nbytes in sorted(inboxes.items(), key=lambda one: one[0][::-1]):
            rows.append((target, f"inbox for {source}, unless it maps that outbox", f"{nbytes:,}"))
        for planned in self.planned:
            rows += [(worker, "parameters that it lends", f"{n:,}") for worker, n in planned.analysis.plan.lent.items()]
        print_table(("worker", "memory", "bytes"), rows, left=(0, 1))

    def _registered(self) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        outboxes: Counter[str] = Counter()
        inboxes: Counter[tuple[str, str]] = Counter()
        for planned in self.planned:
            outboxes.update(dict(planned.analysis.plan.outbox))
            inboxes.update(planned.analysis.plan.inboxes)
        return dict(outboxes), dict(inboxes)

    # ---- for programs

    def json(self) -> str:
        """All of it, as JSON."""
        sizes = [nbytes for nbytes, _ in self.parameters.values()]
        outboxes, inboxes = self._registered()
        record: dict[str, Any] = {
            "model": self.name,
            "parameters": sum(n for _, n in self.parameters.values()),
            "variables": len(sizes),
            "nbytes": sum(sizes),
            "mean": statistics.fmean(sizes) if sizes else 0,
            "median": statistics.median(sizes) if sizes else 0,
            "largest": max(sizes, default=0),
            "histogram": self._classes(sizes),
            "tensors": [{"name": name, "nbytes": b, "elements": n} for name, (b, n) in self.parameters.items()],
            "seconds": {"tracing": self.seconds[0], "analysis": self.seconds[1]},
            "placement": dict(self.placement),
            "graphs": [planned.analysis.plan.to_json() for planned in self.planned],
            "outboxes": [{"worker": worker, "nbytes": n} for worker, n in outboxes.items()],
            "inboxes": [{"worker": target, "of": source, "nbytes": n} for (source, target), n in inboxes.items()],
        }
        return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"

    def _classes(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        least, found = 0, []
        for limit in CLASSES:
            inside = [n for n in sizes if least <= n and (limit is None or n < limit)]
            found.append({"from": least, "below": limit, "variables": len(inside), "nbytes": sum(inside)})
            least = limit or 0
        return found


def _row(edge: Edge) -> tuple[str, ...]:
    spec = "a number" if edge.spec is None else f"{edge.spec.dtype}[{', '.join(map(str, edge.spec.shape))}]"
    return (edge.name, edge.source, ", ".join(edge.targets), spec, edge.kind, _count(edge.nbytes), _birth(edge))


def _folded(plan: Plan) -> list[tuple[str, ...]]:
    """Edges that differ in nothing but their names and shapes, together; the heaviest first."""
    groups: dict[tuple[str, str, str, str], list[Edge]] = defaultdict(list)
    for edge in plan.edges:
        birth = "yes" if edge.birthplace else _birth(edge)
        groups[edge.source, ", ".join(edge.targets), edge.kind, birth].append(edge)
    rows = []
    for (source, targets, kind, birth), edges in groups.items():
        total = None if any(edge.nbytes is None for edge in edges) else sum(edge.nbytes or 0 for edge in edges)
        rows.append((total or 0, (f"{len(edges):,}", source, targets, kind, _count(total), birth)))
    return [row for _, row in sorted(rows, key=lambda one: -one[0])]


def _birth(edge: Edge) -> str:
    if manner(edge) in (BY_VALUE, LENT):
        return manner(edge)
    return f"in {edge.birthplace}" if edge.birthplace else f"copied: {edge.copied}"


def _count(nbytes: int | None) -> str:
    return "any" if nbytes is None else f"{nbytes:,}"
