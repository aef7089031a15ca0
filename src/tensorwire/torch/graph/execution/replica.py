"""A graph that every worker runs whole, because nothing was placed: data-parallel training.

Gradients of a `StoreOptimizer`'s parameters are born in the store's slots, so pushing copies nothing. This needs a
gradient that is the whole output of one operator, and shares its memory with nothing else that the graph returns.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tensorwire.torch.graph.capture.importer import alias_of
from tensorwire.torch.graph.capture.joint import Boxed, function_of, given, returned
from tensorwire.torch.graph.memory.allocator import MOST_OUTPUTS
from tensorwire.torch.graph.memory.birthplace import Birthplace, MemoryTarget, is_new, why_not
from tensorwire.torch.graph.memory.gradient_slots import GradientSlot, slot_of

Slots = Sequence[GradientSlot | None]


@dataclass(frozen=True, slots=True)
class Gradient:
    """Output ``output`` of an operator is the gradient of input ``of`` of the forward graph, counting tensors only."""

    output: int
    of: int
    nbytes: int


def gradients(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, list[Gradient]]:
    """Those that can be born in a slot, by the node of ``backward`` whose output they are."""
    results = returned(backward)
    roots = [_root(value) if isinstance(value, fx.Node) else None for value in results]
    times = Counter(root for root in roots if root is not None)
    found: dict[str, list[Gradient]] = {}
    of = -1
    for argument, value, root in zip(given(forward), results, roots, strict=False):
        of += isinstance(argument.meta.get("val"), torch.Tensor)
        if root is None or times[root] > 1:
            continue
        item = root.target is operator.getitem
        source, output = (root.args[0], root.args[1]) if item else (root, 0)
        nbytes = _whole(value.meta["val"])
        if nbytes and isinstance(source, fx.Node) and isinstance(output, int) and _allocates(source, output):
            its = found.setdefault(source.name, [])
            if len(its) < MOST_OUTPUTS:
                its.append(Gradient(output, of, nbytes))
    return found


def replica(module: fx.GraphModule, born: Mapping[str, Sequence[Gradient]] | None = None) -> Boxed:
    """``module`` as a function that takes the list of all arguments, which it empties, and returns all outputs.

    With gradients ``born``, as `gradients` finds them, its last argument is the `slots_of_inputs`.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            made[node] = graph.node_copy(node)
    slots = graph.placeholder("slots") if born else None
    for node in module.graph.nodes:
        its = (born or {}).get(node.name)
        if its:
            args = fx.map_arg((slots, *node.args), lambda used: made.get(used, used))
            kwargs = fx.map_arg(node.kwargs, made.__getitem__)
            made[node] = graph.call_function(_born(node, its), args, kwargs)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], made.__getitem__))
        elif node.op != "placeholder":
            made[node] = graph.node_copy(node, made.__getitem__)
    return function_of(graph, module)


def slots_of_inputs(count: int) -> Slots:
    """Inside a backward graph: where the gradients of its forward graph's ``count`` tensors may be born now.

    Autograd knows which parameters these were; one graph may serve several modules. None for what is not a parameter of
    a store, for a gradient that will be added to another one, and one that a caller of ``torch.autograd.grad`` gets.
    """
    node = torch._C._current_autograd_node()
    inputs = () if node is None else node.next_functions
    return [_slot(function) for function, _ in inputs] if len(inputs) == count else [None] * count


def _slot(function: Any) -> GradientSlot | None:
    variable = getattr(function, "variable", None)
    if variable is None or variable.grad is not None:
        return None
    slot = slot_of(variable)
    if slot is None:
        return None
    try:
        return slot if torch._C._will_engine_execute_node(function) else None
    except RuntimeError:  # so it says of the inputs of torch.autograd.grad
        return None


def _born(node: fx.Node, its: Sequence[Gradient]) -> Callable[..., Any]:
    """``node``'s operator, whose outputs ``its`` are born in their slots, where these are free."""
    op: Any = node.target
    births: dict[tuple[int, ...], Birthplace] = {}

    def born(slots: Slots, *args: Any, **kwargs: Any) -> Any:
        places: dict[int, MemoryTarget] = {}
        for gradient in its:
            slot = slots[gradient.of]
            if slot is not None and slot.nbytes == gradient.nbytes and (place := slot.place()) is not None:
                places[gradient.output] = place
        outputs = tuple(places)
        if not outputs or why_not() is not None:
            return op(*args, **kwargs)
        if outputs not in births:
            births[outputs] = Birthplace(op, outputs)
        result, _ = births[outputs](list(places.values()), args, kwargs)
        for gradient in its:
            slot = slots[gradient.of]
            if slot is not None and gradient.output in places:
                slot.born(result if isinstance(result, torch.Tensor) else result[gradient.output])
        return result

    born.__name__ = f"born_{node.name}"  # as people read it in tracebacks
    return born


def _root(value: fx.Node) -> fx.Node:
    """The node whose memory ``value`` shows."""
    while (alias := alias_of(value, value.meta.get("val"))) is not None:
        value = next(operand for operand in _near(value) if operand.name == alias)
    return value


def _near(node: fx.Node) -> list[fx.Node]:
    """Its operands; of an item also those of the operator whose output it is."""
    deeper = [far for operand in node.all_input_nodes for far in operand.all_input_nodes]
    return [*node.all_input_nodes, *(deeper if node.target is operator.getitem else ())]


def _allocates(node: fx.Node, output: int) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_new(node.target, output)


def _whole(traced: torch.Tensor) -> int:
    """Its bytes, if they are all of its memory and its elements follow one another; else 0."""
    nbytes = traced.numel() * traced.element_size()
    if not isinstance(nbytes, int) or not traced.is_contiguous() or traced.storage_offset() != 0:
        return 0
    return nbytes if traced.untyped_storage().nbytes() == nbytes else 0
