"""From a torch.fx graph, as AOTAutograd makes it, to Tensorwire's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tensorwire.errors import Unsupported
from tensorwire.graph import Graph, Node, Output, TensorSpec, Unknown
from tensorwire.graph.ir import CALL, GIVEN, INPUT, ITEM, PARAMETER, Dim
from tensorwire.torch.graph.capture.module_paths import module_path
from tensorwire.torch.graph.memory.birthplace import is_new

HostOf = Callable[[fx.Node], str | None]

# What costs less to compute twice than to send, in addition to all that works element by element.
_CHEAP = frozenset(
    [
        "arange",
        "full",
        "full_like",
        "scalar_tensor",
        "ones",
        "ones_like",
        "zeros",
        "zeros_like",
        "empty",
        "empty_like",
        "new_ones",
        "new_zeros",
        "new_full",
        "new_empty",
        "eye",
        "tril",
        "triu",
        "cumsum",
        "index",
        "cat",
        "stack",
        "constant_pad_nd",
        "clone",
        "_to_copy",
        "repeat",
        "lift_fresh_copy",
    ]
)


@dataclass(frozen=True)
class InputOrigin:
    """Where a placeholder's value comes from: ``kind`` and ``present`` of its node."""

    kind: str = INPUT
    present: tuple[str, ...] | None = None


def import_graph(
    module: fx.GraphModule,
    name: str,
    workers: tuple[str, ...],
    origins: Sequence[InputOrigin],
    outputs: Sequence[Output],
    worker_of: HostOf,
) -> Graph:
    """Our graph of ``module``: ``origins`` one a placeholder, in their order."""
    given, known = iter(origins), set[Any]()
    nodes = []
    for node in module.graph.nodes:
        if node.op != "output":
            symbols = _symbols(node.meta.get("val"))
            made = _node(node, given, worker_of)
            nodes.append(made if symbols <= known or made.kind in GIVEN else replace(made, sized=False))
            known |= symbols
    return Graph(name, workers, tuple(nodes), tuple(outputs))


def _symbols(value: Any) -> set[Any]:
    """What the lengths of a traced value depend on."""
    if isinstance(value, torch.Tensor):
        return {symbol for number in (*value.shape, *value.stride()) for symbol in _symbols(number)}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(value.node.expr.free_symbols)
    return {symbol for item in value for symbol in _symbols(item)} if _is_tuple(value) else set()


def _node(node: fx.Node, given: Any, worker_of: HostOf) -> Node:
    value = node.meta.get("val")
    _check_layout(node, value)
    spec = spec_of(value) if isinstance(value, torch.Tensor) else None
    if node.op == "placeholder":
        origin = next(given)
        return Node(node.name, "placeholder", kind=origin.kind, spec=spec, present=origin.present)
    if node.op == "get_attr":
        return Node(node.name, "constant", kind=PARAMETER, spec=spec)
    inputs = tuple(dict.fromkeys(operand.name for operand in node.all_input_nodes))
    if node.target is operator.getitem:
        index: Any = node.args[1]
        return Node(node.name, "item", inputs, ITEM, spec, worker_of(node), alias=alias_of(node, value), index=index)
    writes = _writes(node)
    alias = alias_of(node, value)
    target: Any = node.target
    tags = getattr(target, "tags", ())
    return Node(
        node.name,
        str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target)),
        inputs,
        CALL,
        spec,
        worker_of(node),
        alias=alias,
        writes=writes,
        fresh=alias is None and _allocates(target),
        cheap=torch.Tag.pointwise in tags or _packet(target) in _CHEAP or (spec is None and not _is_tuple(value)),
        random=torch.Tag.nondeterministic_seeded in tags,
        tuple_=_is_tuple(value),
    )


def _check_layout(node: fx.Node, value: Any) -> None:
    """Raises `Unsupported` for tensors that are sparse, or have no strides for another reason."""
    layouts = [one.layout for one in (value if _is_tuple(value) else (value,)) if isinstance(one, torch.Tensor)]
    layout = next((layout for layout in layouts if layout is not torch.strided), None)
    if layout is None:
        return
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    where = module_path(node) or "the model"
    if stack:
        kind = next(reversed(stack.values()))[1]
        where += f" ({getattr(kind, '__name__', kind)})"
    if "fwd_nn_module_stack" in node.meta and layout is torch.sparse_coo:
        raise Unsupported(
            f"{where} makes a sparse gradient, which is not supported in a model that is cut over workers: "
            "use sparse=False"
        )
    raise Unsupported(f"{where}: {node.name} is {layout}, and a model that is cut over workers takes strided tensors")


def spec_of(value: torch.Tensor) -> TensorSpec:
    """Shape, dtype and layout of a traced tensor."""
    shape = tuple(_dim(length) for length in value.shape)
    stride = tuple(_dim(step) for step in value.stride())
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(shape, dtype, stride, _dim(value.storage_offset()))


def _dim(length: Any) -> Dim:
    if isinstance(length, int):
        return length
    node = length.node
    if node.maybe_as_int() is not None:
        return int(node.maybe_as_int())
    upper = node.shape_env.bound_sympy(node.expr).upper
    bounded = upper.is_Integer and int(upper) < 2**40  # more is how shape environments say "any"
    return Unknown(str(node.expr), int(upper) if bounded else None)


def _is_tuple(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _packet(target: Any) -> str:
    return target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""


def _allocates(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.returns) and is_new(target, 0)


def _writes(node: fx.Node) -> tuple[str, ...]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    found: list[str] = []
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        for operand in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(operand, fx.Node):
                found.append(operand.name)
    return tuple(found)


def alias_of(node: fx.Node, value: Any) -> str | None:
    """The operand whose memory the output shares: seen by the memory of the traced tensors."""
    first = value[0] if _is_tuple(value) and value else value
    if not isinstance(first, torch.Tensor):
        return None
    storage = first.untyped_storage()._cdata
    for operand in node.all_input_nodes:
        shown = operand.meta.get("val")
        if _is_tuple(shown):
            if node.target is operator.getitem and operand.target is not operator.getitem:
                return alias_of(operand, shown)
            continue
        if isinstance(shown, torch.Tensor) and shown.untyped_storage()._cdata == storage:
            return operand.name
    return None
