"""How far each worker knows the others' progress from received tensors: vector clocks over the global order.

A worker may refill a slot without asking once it knows that all readers are done with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tensorwire.graph.ir import Graph
from tensorwire.graph.passes.crossing import Crossings

Clock = dict[str, int]  # by worker, the place in the order up to which it is known to have come


def walk(graph: Graph, crossing: Crossings) -> Iterator[tuple[int, Mapping[str, Clock]]]:
    """For each node in order: its place, and what each worker knows when it runs that node, its operands received.

    Values are sent when they were computed, and received where they are first used.
    """
    knows: dict[str, Clock] = {worker: dict.fromkeys(graph.workers, -1) for worker in graph.workers}
    letters: dict[str, Clock] = {}  # what a sent value tells of its sender's knowledge
    opened: set[tuple[str, str]] = set()
    for place, node in enumerate(graph.nodes):
        at = crossing.runs.get(node.name, ())
        for worker in at:
            for name in node.inputs:
                if name in letters and worker in crossing.sent[name][1] and (name, worker) not in opened:
                    opened.add((name, worker))
                    _merge(knows[worker], letters[name])
        yield place, knows
        for worker in at:
            knows[worker][worker] = place
        if node.name in crossing.sent:
            source = crossing.sent[node.name][0]
            knows[source][source] = max(knows[source][source], place)
            letters[node.name] = dict(knows[source])


def sends_before(graph: Graph, crossing: Crossings, me: str) -> dict[str, tuple[str, str]]:
    """For what ``me`` receives, by its name, a send of ``me`` without which it cannot come: the value, and to whom.

    It is the last one, in the graph's order. Only what values need of each other counts, in whatever order workers run.
    """
    sends: list[tuple[str, str]] = []
    number: dict[tuple[str, str], int] = {}  # of each send
    last: dict[tuple[str, str], int] = {}  # of the sends that a value needs, by value and worker, where it needs some

    def of_operand(name: str, worker: str) -> int:
        source, targets = crossing.sent.get(name, ("", ()))
        if worker not in targets:
            return last.get((name, worker), -1)
        return max(last.get((name, source), -1), number.get((name, worker), -1))

    for node in graph.nodes:
        for worker in crossing.runs.get(node.name, ()):
            found = max((of_operand(name, worker) for name in node.inputs), default=-1)
            if found >= 0:
                last[node.name, worker] = found
        source, targets = crossing.sent.get(node.name, ("", ()))
        for target in targets if source == me else ():
            number[node.name, target] = len(sends)
            sends.append((node.name, target))
    received = [(name, source) for name, (source, targets) in crossing.sent.items() if me in targets]
    return {name: sends[last[name, source]] for name, source in received if (name, source) in last}


def _merge(mine: Clock, theirs: Clock) -> None:
    for worker, place in theirs.items():
        if place > mine[worker]:
            mine[worker] = place
