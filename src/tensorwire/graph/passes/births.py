"""Where a crossing tensor is born: the operator whose output allocation moves into registered memory.

From the sent value, the walk goes back through views and in-place operators to the operator that allocated the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorwire.edge.tensor import DTYPES
from tensorwire.graph.ir import INPUT, ITEM, PARAMETER, SAVED, Graph, Node, TensorSpec
from tensorwire.graph.kinds import STATIC, VALUE, kind_of
from tensorwire.graph.passes.aliases import Aliases
from tensorwire.graph.passes.crossing import Crossings

_WHY_GIVEN = {INPUT: "an input of the caller", PARAMETER: "a parameter", SAVED: "kept from the forward graph"}
_SMALL, _VARIES, _UNSIZED = "it is small", "a part of what varies", "its size is not known in advance"


@dataclass(frozen=True, slots=True)
class Birth:
    """``root``: the value whose memory it is. ``operator`` allocates that, ``nbytes`` in all, as its output number
    ``index``, and the value begins ``offset`` bytes from there. None where it has to be copied: ``why`` says why.
    ``lent``: it is a parameter, which nothing changes during a run; no operator allocates it, and it is not copied."""

    root: str
    operator: str | None = None
    index: int = 0
    offset: int = 0
    nbytes: int = 0
    why: str = ""
    lent: bool = False


def callers(graph: Graph, crossing: Crossings, aliases: Aliases) -> set[tuple[str, str]]:
    """The values, by their root, whose memory users get into their hands, and the workers on which they do."""
    return {
        (aliases.root(output.name).name, worker)
        for output in graph.outputs
        if output.caller
        for worker in output.to or crossing.holds[output.name]
    }


def births(graph: Graph, crossing: Crossings, aliases: Aliases) -> dict[str, Birth]:
    """The birth of every value that is sent."""
    given = callers(graph, crossing, aliases)
    written: dict[str, int] = {}  # by root, where it is last changed in place
    for place, node in enumerate(graph.nodes):
        for name in node.writes:
            written[aliases.root(name).name] = place
    found = {}
    for name, (source, _) in crossing.sent.items():
        root = aliases.root(name)
        operator = graph.node(root.inputs[0]) if root.kind == ITEM else root
        why = _WHY_GIVEN.get(root.kind, "")
        if not why and not operator.fresh:
            why = f"{operator.op} does not allocate it"
        if not why and (root.name, source) in given:
            why = "the caller gets it"
        if not why and name in crossing.if_small:
            why = "it crosses only while it is small"
        if not why and written.get(root.name, -1) > graph.place[name]:
            why = "it is changed in place after it was sent"
        lent = root.kind == PARAMETER and root.name == name and root.name not in written
        lent = lent and name not in crossing.if_small
        found[name] = _birth(root, operator, graph.node(name).spec, why, lent)
    return found


def _birth(root: Node, operator: Node, spec: TensorSpec | None, why: str, lent: bool) -> Birth:
    kind = kind_of(spec)
    if lent and kind == STATIC:
        return Birth(root.name, lent=True)
    if why or spec is None or kind == VALUE:
        return Birth(root.name, why=why or _SMALL)
    if kind != STATIC or root.spec is None or not root.spec.static:
        if root.spec != spec:
            return Birth(root.name, why=_VARIES)
        if not root.sized:
            return Birth(root.name, why=_UNSIZED)
        return Birth(root.name, operator.name, root.index, 0, spec.nbytes or 0)
    assert isinstance(spec.offset, int)
    assert spec.nbytes is not None
    assert root.spec.nbytes is not None
    offset = spec.offset * DTYPES[spec.dtype]
    if offset + spec.nbytes > root.spec.nbytes:
        return Birth(root.name, why=f"it shows more than {root.name}, whose memory it is")
    return Birth(root.name, operator.name, root.index, offset, root.spec.nbytes)
