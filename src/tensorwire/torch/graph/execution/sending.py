"""Functions that a partition calls to send a value, one per edge, prepared once.

The tensor at run time decides how it is sent, not its trace. If an operator makes other strides than its trace, the
edge describes them to the target, so that it computes on the same layout as one process. Other dtypes or shapes than
traced are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorwire.edge import Lease
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.header import HEADER, pack_number, pack_tensor
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.graph import Edge
from tensorwire.graph.kinds import BY_VALUE
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock
from tensorwire.torch.graph.memory.strided import actual_spec, extent_bytes, fill, fitting
from tensorwire.torch.graph.memory.target import over

Send = Callable[[Any], None]


def number(group: EdgeGroup, index: int, edge: Edge) -> Send:
    """An int, bool or float, by value."""
    at = _slot(edge)

    def send(value: Any) -> None:
        pack_number(_bank(group), at, group.step, value)
        group.send(index, HEADER)

    return send


def small(group: EdgeGroup, index: int, edge: Edge, shares: bool) -> Send:
    """A tensor of a few bytes, by value. ``shares``: as for `static`."""
    shape, strides, dtype = layout(edge)
    at, nbytes = _slot(edge), _nbytes(edge)

    def send(value: torch.Tensor) -> None:
        if value.stride() == strides and value.shape == shape and value.dtype == dtype:
            fill(over(group.held, dtype=dtype, shape=shape, strides=strides, offset=at), value)
            group.send(index, nbytes)
        else:
            _check(edge, value, shape)
            there = _room(group, edge, value, BY_VALUE, shares)
            fill(there, value)
            _describe(group, index, edge, there)

    return send


def static(group: EdgeGroup, index: int, edge: Edge, shares: bool) -> Send:
    """A tensor that was born in its slot, which goes as it is, whatever its strides; another one is copied there.

    ``shares``: other edges are born in its memory, too.
    """
    shape, strides, dtype = layout(edge)
    at, nbytes = _slot(edge) + edge.offset, _nbytes(edge)

    def send(value: torch.Tensor) -> None:
        start = _address(group)
        if value.stride() != strides or value.shape != shape or value.dtype != dtype:
            _check(edge, value, shape)
        elif value.data_ptr() == start + at:
            group.send(index, nbytes)
            return
        if not _was_born(edge, value, start + _slot(edge)):
            there = _room(group, edge, value, nbytes, shares)
            _copy(group, index, value, there)
            value = there
        _describe(group, index, edge, value)

    return send


def bounded(group: EdgeGroup, index: int, edge: Edge) -> Send:
    """A tensor of varying shape, with a header in front. Raises `ArgumentError` above the bound."""
    at, most = _slot(edge), _nbytes(edge)

    def send(value: torch.Tensor) -> None:
        nbytes = extent_bytes(value)
        _check(edge, value)
        room = _address(group) + at + HEADER
        if nbytes and value.data_ptr() != room:
            if _was_born(edge, value, room):
                raise _refusal(edge, f"begins {value.data_ptr() - room} bytes after where its memory does")
            if (strides := next(fitting(value, most), None)) is None:
                raise ArgumentError(f"{edge.name} has {nbytes} bytes now; its edge was made for at most {most}")
            there = over(group.held, dtype=value.dtype, shape=value.shape, strides=strides, offset=at + HEADER)
            _copy(group, index, value, there)
            value = there
        _send_with_header(group, index, at, value)

    return send


def if_small(group: EdgeGroup, index: int, edge: Edge, stayed: set[str]) -> Send:
    """A tensor of varying shape, with a header in front. One that is too large adds its name to ``stayed``, and only
    the header is sent."""
    at, most = _slot(edge), _nbytes(edge)

    def send(value: torch.Tensor) -> None:
        _check(edge, value)
        if value.numel() * value.element_size() > most:
            stayed.add(edge.name)
            pack_tensor(_bank(group), at, group.step, actual_spec(value))
            group.send(index, HEADER)
            return
        strides = next(fitting(value, most))  # of one with gaps that are too large, others
        there = over(group.held, dtype=value.dtype, shape=value.shape, strides=strides, offset=at + HEADER)
        if value.numel():
            _copy(group, index, value, there)
        _send_with_header(group, index, at, there)

    return send


def _send_with_header(group: EdgeGroup, index: int, at: int, value: torch.Tensor) -> None:
    """Sends ``value``, which lies after the header at ``at``."""
    spec = actual_spec(value)
    pack_tensor(_bank(group), at, group.step, spec)
    group.send(index, HEADER + spec.nbytes)


def dynamic(group: EdgeGroup, index: int, edge: Edge, born: dict[int, Lease]) -> Send:
    """A tensor of any size. ``born``: by edge, the memory that it may have been born in."""

    def send(value: torch.Tensor) -> None:
        _check(edge, value)
        spec, lease = actual_spec(value), born.pop(index, None)
        if lease is None or lease.nbytes != spec.nbytes or not _lies_in(lease, value):
            lease = group.room(index, spec.nbytes)
            fill(over(lease.memory, dtype=value.dtype, shape=value.shape, strides=value.stride()), value)
            counters.add(copies=1, copied_bytes=spec.nbytes)
        group.send_dynamic(index, lease, spec)

    return send


def _lies_in(lease: Lease, value: torch.Tensor) -> bool:
    """Whether ``value`` begins where ``lease`` does; of one without elements there is nothing to copy."""
    return not value.numel() or value.data_ptr() == lease.slab.region.address + lease.offset


def lent(group: EdgeGroup, index: int, edge: Edge) -> Send:
    """A parameter that lives in the memory it is lent from; one that was moved is copied there."""
    shape, strides, dtype = layout(edge)

    def send(parameter: torch.Tensor) -> None:
        as_planned = parameter.stride() == strides and parameter.shape == shape and parameter.dtype == dtype
        if not as_planned or parameter.data_ptr() != group.loan_address(index):
            _copy_loan(group, index, edge, parameter)
        group.lend(index)

    return send


def adopt(group: EdgeGroup, index: int, edge: Edge, parameter: torch.Tensor) -> None:
    """Moves a parameter that is lent into the memory that it is lent from, so that no run copies it."""
    loan = _copy_loan(group, index, edge, parameter)
    if parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size():  # it has it for itself
        parameter.data = loan


def _copy_loan(group: EdgeGroup, index: int, edge: Edge, parameter: torch.Tensor) -> torch.Tensor:
    """Its borrowers know only the strides that it had when the graph was planned."""
    shape, strides, dtype = layout(edge)
    _check(edge, parameter, shape)
    loan = over(group.loan(index), dtype=dtype, shape=shape, strides=strides)
    if _folds(strides, parameter):
        raise _refusal(edge, f"has strides {list(parameter.stride())}")
    _copy(group, index, parameter.detach(), loan)
    return loan


def _check(edge: Edge, value: torch.Tensor, shape: Any = None) -> None:
    """Raises `Unsupported` for another dtype, rank or ``shape`` than the edge's: the target relies on these."""
    assert edge.spec is not None
    dtype, rank = getattr(torch, edge.spec.dtype), len(edge.spec.shape)
    if value.dtype != dtype or value.dim() != rank or (shape is not None and value.shape != shape):
        raise _refusal(edge, f"is {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")


def _refusal(edge: Edge, what: str) -> Unsupported:
    return Unsupported(
        f"{edge.name} {what} now, and was traced as {edge.spec}: an operator does not make what torch's tracing says "
        "it does, or the tensor was changed"
    )


def _was_born(edge: Edge, value: torch.Tensor, address: int) -> bool:
    """Whether the memory of ``value`` is that of its birth, at ``address``."""
    return edge.birthplace != "" and value.untyped_storage().data_ptr() == address


def _room(group: EdgeGroup, edge: Edge, value: torch.Tensor, nbytes: int, shares: bool) -> torch.Tensor:
    """Where to copy ``value`` to, with its own strides if there is room for them.

    Where other parts of one memory are sent, too, each has room only where the plan says.
    """
    _, strides, dtype = layout(edge)
    at = _slot(edge)
    if not shares:
        strides = next(fitting(value, nbytes), strides)
    if _folds(strides, value):
        raise _refusal(edge, f"has strides {list(value.stride())}")
    return over(group.held, dtype=dtype, shape=value.shape, strides=strides, offset=at + edge.offset)


def _folds(strides: Sequence[int], value: torch.Tensor) -> bool:
    """Whether elements of ``value`` that may differ would be one in memory of ``strides``."""
    there = zip(strides, value.stride(), value.shape, strict=True)
    return any(planned == 0 and stride != 0 and length > 1 for planned, stride, length in there)


def _describe(group: EdgeGroup, index: int, edge: Edge, value: torch.Tensor) -> None:
    """Sends ``value``, which lies in the outbox, with a header if it does not lie as the plan says."""
    _, strides, _ = layout(edge)
    at, planned = value.data_ptr() - _address(group), _slot(edge) + edge.offset
    if not value.numel() or (at == planned and value.stride() == strides):
        group.send(index, _nbytes(edge))
        return
    group.describe(index, actual_spec(value), at)
    group.send(index, extent_bytes(value), at)


def _copy(group: EdgeGroup, index: int, value: torch.Tensor, there: torch.Tensor) -> None:
    """A copy on its way out, counted; it keeps the thread that computes, as sending does."""
    start = clock()
    fill(there, value)
    counters.add(copies=1, copied_bytes=value.numel() * value.element_size())
    spans.add("push", group.step, start, clock(), group.labels[index])


def layout(edge: Edge) -> tuple[Any, Any, torch.dtype]:
    """Shape, strides and dtype of a static edge."""
    assert edge.spec is not None
    dtype: torch.dtype = getattr(torch, edge.spec.dtype)
    return edge.spec.shape, edge.spec.stride, dtype


def _bank(group: EdgeGroup) -> memoryview:
    assert group.bank is not None
    return group.bank.memory


def _address(group: EdgeGroup) -> int:
    """Where the outbox of this step begins."""
    assert group.bank is not None
    return group.bank.owner.address


def _slot(edge: Edge) -> int:
    assert edge.slot is not None
    return edge.slot


def _nbytes(edge: Edge) -> int:
    assert edge.nbytes is not None
    return edge.nbytes
