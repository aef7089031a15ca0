"""Python values as bytes, and back, for ``job.broadcast`` and ``job.all_reduce``.

The tree of a value is msgpack; its arrays follow as plain bytes. Unpacking executes nothing.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import ArgumentError, ProtocolError
from tensorwire.sizes import round_up

ALIGNMENT = 64  # of each array: of a cache line, and of every dtype
MOST_DEPTH = 64
Bytes = NDArray[np.uint8]
# Scalars that msgpack has itself. Not their subclasses: an enum would come back as another type.
_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True)
class Form:
    """The type, dtype and shape of a value.

    ``kind`` is int, float, bool, array, scalar (of numpy) or tensor; ``dtype`` is numpy's name or torch's.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return self.kind if self.kind in ("int", "float", "bool") else f"{self.dtype} {self.kind} {list(self.shape)}"

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * int(self._dtype().itemsize)

    def _dtype(self) -> Any:
        if self.kind != "tensor":
            return np.dtype(self.dtype)
        import torch

        return getattr(torch, self.dtype)

    def elements(self, data: Bytes) -> Any:
        """``data`` as a flat array or tensor of this dtype. It shares the memory."""
        if self.kind != "tensor":
            return data.view(self._dtype())
        import torch

        flat = torch.from_numpy(data) if data.nbytes else torch.empty(0, dtype=torch.uint8)
        return flat.view(self._dtype())

    def value(self, data: Bytes) -> Any:
        """``data``, which is nobody else's, as a value of this form."""
        found = self.elements(data).reshape(self.shape)
        if self.kind in ("array", "tensor"):
            return found
        return found[()] if self.kind == "scalar" else found.item()


@dataclass(frozen=True)
class Packed:
    """A value as bytes: the tree in msgpack, then each array at a multiple of `ALIGNMENT`."""

    tree: bytes
    arrays: tuple[Bytes, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that ``write`` fills."""
        end = len(self.tree)
        for array in self.arrays:
            end = round_up(end, ALIGNMENT) + array.nbytes
        return end

    def write(self, target: Bytes) -> None:
        """Fills the first ``nbytes`` bytes of ``target``."""
        end = len(self.tree)
        target[:end] = np.frombuffer(self.tree, np.uint8)
        for array in self.arrays:
            start = round_up(end, ALIGNMENT)
            end = start + array.nbytes
            target[start:end] = array


def pack(value: Any, what: str) -> Packed:
    """Takes ``value`` apart. The result may share memory with its arrays.

    Args:
        value: None, bool, int (64 bits), float, str, bytes, numpy arrays and scalars, torch tensors on the CPU, and
            lists, tuples, dicts and OrderedDicts of them.
        what: Who asks, for messages: ``job.broadcast``.

    Raises:
        ArgumentError: Something else is in it. The message names the type and where it is.
    """
    arrays: list[Bytes] = []
    tree = _tree(value, arrays, what, "", 0)
    try:
        return Packed(msgspec.msgpack.encode([len(arrays), tree]), tuple(arrays))
    except OverflowError:
        raise ArgumentError(f"{what} carries ints of up to 64 bits; send larger ones as str") from None
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{what} carries text that UTF-8 can encode: {error}") from None


def unpack(data: Bytes, tree: int) -> Any:
    """The value whose first ``tree`` bytes of ``data`` are its tree.

    Arrays have memory of their own, except that an only one may keep ``data``. Raises `ProtocolError`.
    """
    try:
        count, form = msgspec.msgpack.decode(data[:tree].tobytes())
        return _Reader(data, tree, copy=count > 1 or not data.flags.writeable).value(form)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise ProtocolError(f"another worker sent a malformed value: {error}") from None


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor; without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def form_of(value: Any) -> Form | None:
    """The form of a tensor, an array or a scalar of numpy; None: it is something else."""
    if is_tensor(value):
        return Form("tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if isinstance(value, (np.ndarray, np.generic)):
        return Form("array" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, value.shape)
    return None


def bytes_of(value: Any, what: str, where: str = "") -> Bytes:
    """The elements of what has a form, in the order of their indices. Raises `ArgumentError` for what cannot travel."""
    if is_tensor(value):
        return tensor_bytes(value, what, where)
    return _array_bytes(value if isinstance(value, np.ndarray) else np.asarray(value), what, where)


def tensor_bytes(tensor: Any, what: str, where: str = "") -> Bytes:
    """The elements of a torch tensor in the order of their indices. Raises `ArgumentError` if it has none here."""
    torch = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(what, _named(tensor), where, "send a plain tensor")
    if tensor.device.type != "cpu":
        raise _refused(what, f"a tensor on {tensor.device}", where, "send tensor.cpu()")
    if tensor.layout is not torch.strided:
        raise _refused(what, f"a tensor of layout {tensor.layout}", where, "send tensor.to_dense()")
    if tensor.is_quantized:
        raise _refused(what, "a quantized tensor", where, "send tensor.dequantize()")
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def _array_bytes(array: NDArray[Any], what: str, where: str) -> Bytes:
    if type(array) is not np.ndarray:
        raise _refused(what, _named(array), where, "send a plain array")
    if array.dtype.hasobject or array.dtype.kind == "V":
        raise _refused(what, f"an array of dtype {array.dtype}", where, "send arrays of plain numbers")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _tree(value: Any, arrays: list[Bytes], what: str, where: str, depth: int) -> Any:
    """Plain msgpack: scalars as they are, everything else as a list that begins with its kind."""
    if type(value) in _PLAIN:
        return value
    if depth > MOST_DEPTH:
        raise ArgumentError(f"{what} carries values nested up to {MOST_DEPTH} deep; this one is deeper, or has a cycle")
    if type(value) in (list, tuple):
        inner = [_tree(v, arrays, what, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return ["list" if type(value) is list else "tuple", *inner]
    if type(value) in (dict, OrderedDict):
        pairs: list[Any] = ["dict" if type(value) is dict else "OrderedDict"]
        for key, item in value.items():
            pairs.append(_tree(key, arrays, what, f"{where} (a key)", depth + 1))
            pairs.append(_tree(item, arrays, what, f"{where}[{key!r}]", depth + 1))
        return pairs
    if form := form_of(value):
        arrays.append(bytes_of(value, what, where))
        return [form.kind, form.dtype, *form.shape]
    allowed = "None, numbers, str, bytes, arrays and CPU tensors, in lists, tuples and dicts"
    raise _refused(what, _named(value), where, f"it carries {allowed}")


def _named(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refused(what: str, thing: str, where: str, instead: str) -> ArgumentError:
    return ArgumentError(f"{what} cannot carry {thing}{f' (at {where.strip()})' if where else ''}: {instead}")


class _Reader:
    """Puts a value together again."""

    def __init__(self, data: Bytes, end: int, *, copy: bool) -> None:
        self._data, self._end, self._copy = data, end, copy

    def value(self, form: Any) -> Any:
        """What `_tree` made ``form`` of. Call it in the same order."""
        if not isinstance(form, list):
            return form
        kind, *rest = form
        if kind in ("list", "tuple"):
            items = [self.value(item) for item in rest]
            return items if kind == "list" else tuple(items)
        if kind in ("dict", "OrderedDict"):
            values = [self.value(item) for item in rest]
            pairs = zip(values[::2], values[1::2], strict=True)
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        if kind in ("tensor", "array", "scalar"):
            found = Form(kind, rest[0], tuple(rest[1:]))
            return found.value(self._take(found.nbytes))
        raise ValueError(f"no kind of value is called {kind!r}")

    def _take(self, nbytes: int) -> Bytes:
        start = round_up(self._end, ALIGNMENT)
        self._end = start + nbytes
        if nbytes < 0 or self._end > self._data.nbytes:
            raise ValueError("its arrays are longer than its bytes")
        found = self._data[start : self._end]
        return found.copy() if self._copy else found
