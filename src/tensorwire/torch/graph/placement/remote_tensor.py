"""The stand-in for another worker's tensor: its shape, and an error for any reader.

It takes no memory: its storage is a mapping of the right size whose pages cannot be accessed. Three levels stop
readers:

1. `RemoteTensor` and `RemoteParameter` let a torch function run only as far as it reads no element, and raise
   `NotOnThisWorker`. This holds in eager code, also in frames that dynamo skips: it never compiles the check.
2. With the allocator of ``allocator.cpp``, the storage itself refuses its address to native code that comes without a
   torch function, such as the kernels of another compiler's graph: a ``RuntimeError`` with the same text.
3. Native code that got the address by other means is killed by SIGSEGV.

To dynamo both classes are plain tensors, so every process compiles the same graph.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensorwire.errors import NotOnThisWorker, TensorwireError
from tensorwire.torch.graph.memory.allocator import allocator
from tensorwire.torch.graph.placement import compile_check
from tensorwire.torch.graph.placement.gradient_hooks import only_with_gradient

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# They reach the elements without any operator that torch could stop, or give the tensor other ones.
_BYPASSES = {"numpy", "__array__", "tolist", "data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__"}
_BYPASSES |= {"share_memory_", "set_", "module_load"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
# Only the shape of their argument matters to them.
_LIKES = {f"aten::{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
_NEWS = {f"aten::new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")}


@dataclass(frozen=True)
class Location:
    """Where the tensor ``name`` is, and what to do instead of reading it here."""

    name: str
    worker: str
    advice: str


class _Stand:
    """What both classes below are: a tensor that may be asked for everything but its elements.

    ``_tensorwire`` is None for one that is here after all, see `here_now`: it is like any other.
    """

    _tensorwire: Location | None
    _checked: Callable[..., Any]  # `_unread`, which dynamo leaves alone with all that it calls

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # True while dynamo traces this: what reads the tensor is in the graph then, and runs where it lives. Where the
        # frame runs, it is not compiled (see _plain_to_dynamo): in compiled code this would be True as well.
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._checked(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._tensorwire is not None:
            raise _refusal(self._tensorwire, "copy or pickle")
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        if self._tensorwire is not None:
            raise _refusal(self._tensorwire, "deepcopy")
        return _plain(self).__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __repr__(self, **options: Any) -> str:
        tensor, location = cast(torch.Tensor, self), self._tensorwire
        if location is None:
            return _plain(self).__repr__(**options)  # type: ignore[no-untyped-call, no-any-return]
        return f"<{location.name} on {location.worker}: {tuple(tensor.shape)}, {tensor.dtype}>"


class RemoteTensor(_Stand, torch.Tensor):  # type: ignore[misc]
    """A tensor of another worker."""


class RemoteParameter(_Stand, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter of another worker."""


def location_of(tensor: torch.Tensor) -> Location | None:
    """Where ``tensor`` is, if it is not here."""
    return tensor._tensorwire if isinstance(tensor, _Stand) else None


def reserve(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU that takes addresses, but no memory. What reads it behind torch's back is killed."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if span == 0:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
    room = mmap.mmap(-1, span * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    tensor = torch.frombuffer(room, dtype=dtype).as_strided(tuple(shape), tuple(strides))
    if _libc.mprotect(tensor.data_ptr(), len(room), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return tensor


def make_remote(tensor: torch.Tensor, name: str, worker: str, *, advice: str = "") -> torch.Tensor:
    """Makes ``tensor`` itself, such as what a graph returned in its place, the stand-in for ``name`` of ``worker``.

    It keeps its ``grad_fn`` and its memory (`reserve` has none), and a compiled graph takes it as the tensor it was. To
    read it raises `NotOnThisWorker`, with ``advice``.
    """
    _plain_to_dynamo()
    tensor.__class__ = RemoteParameter if isinstance(tensor, torch.nn.Parameter) else RemoteTensor
    cast(Any, tensor)._tensorwire = Location(name, worker, advice)
    if tensor.numel():
        _lock(tensor, cast(Any, tensor)._tensorwire)
    return tensor


def _lock(tensor: torch.Tensor, location: Location) -> None:
    """Stops what torch functions do not see: every user of the storage's address, or at least those that write."""
    native = allocator()
    if native is not None:
        with torch._C.DisableTorchFunctionSubclass():
            native.lock(tensor.untyped_storage()._cdata, str(_refusal(location, "native code")).encode())
        return
    guard = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
    if guard is not None:
        guard(tensor)


def here_now(tensor: torch.Tensor) -> torch.Tensor:
    """Gives ``tensor``, which is here now, the class that it has in the runs in which another worker holds it.

    Dynamo compiles again for another class of tensor, and all processes must do so in the same runs, or in none.
    """
    _plain_to_dynamo()
    tensor.__class__ = RemoteTensor
    cast(Any, tensor)._tensorwire = None
    return tensor


def _plain(tensor: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return cast(torch.Tensor, tensor).as_subclass(torch.Tensor)


def release(tensor: torch.Tensor, name: str, worker: str, *, advice: str = "") -> None:
    """Gives the memory of a parameter or buffer back, and its gradient: it is ``name`` of ``worker`` from now on."""
    tensor.grad = None
    tensor.data = reserve(tensor.shape, tensor.stride(), tensor.dtype)
    only_with_gradient(tensor)
    make_remote(tensor, name, worker, advice=advice)


def restore(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Brings a stand-in back: ``value``, of its shape and dtype, is copied into memory of its own."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        tensor.data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(value)
    del cast(Any, tensor)._tensorwire
    tensor.__class__ = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor


class _Unread(TorchDispatchMode):
    """Lets through what reads no element: views, and tensors made after the shape of another."""

    def __init__(self, location: Location) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._location = location

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.is_view or func._schema.name in _LIKES | _NEWS:
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        raise _refusal(self._location, "item() or similar" if name == "local_scalar_dense" else name)


def _unread(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    stands = (a for a in tree_leaves((args, kwargs)) if isinstance(a, _Stand))
    found = next((stand for stand in stands if stand._tensorwire is not None), None)
    if found is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    assert found._tensorwire is not None
    name = getattr(func, "__name__", "")
    if name == "copy_" and _same_elements(args[0], args[1]):  # what a graph changed where it lives
        return args[0]
    if name in _BYPASSES and not _dynamo_looks(name):
        raise _refusal(found._tensorwire, name)
    if func == torch.Tensor.data.__set__ and not isinstance(args[1], _Stand):  # type: ignore[attr-defined]
        raise _refusal(found._tensorwire, "an assignment of its data")  # .to("cpu") assigns what it already was
    with torch._C.DisableTorchFunctionSubclass(), _Unread(found._tensorwire):
        result = func(*args, **kwargs)
    where = found._tensorwire
    if name in _HOOKS:
        only_with_gradient(cast(torch.Tensor, found))
    for tensor in tree_leaves(result):  # views of it live there as well
        if type(tensor) is torch.Tensor and _same_memory(tensor, cast(torch.Tensor, found)):
            tensor.__class__ = RemoteTensor
            cast(Any, tensor)._tensorwire = where
    return result


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        where = [(one.storage_offset(), one.shape, one.stride(), one.dtype) for one in (a, b)]
    return where[0] == where[1] and _same_memory(a, b)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _dynamo_looks(name: str) -> bool:
    """Whether dynamo is describing an input, for which it asks for the identity of its storage."""
    return name == "untyped_storage" and torch._guards.TracingContext.try_get() is not None


def _refusal(location: Location, what: str) -> TensorwireError:
    if (left_out := compile_check.left_out()) is not None:  # it reads its parameters, and the user reads nothing
        return left_out
    said = f"{location.name} is on {location.worker}: it cannot be read here (by {what})"
    return NotOnThisWorker(f"{said}; {location.advice}" if location.advice else said)


@functools.cache
def _plain_to_dynamo() -> None:
    """Dynamo takes both classes for plain tensors, and compiles nothing of what is called instead of torch's functions.

    Without the first (the name is private) it traces into ``__torch_function__``. That gives the same operators, too,
    but code that asks ``has_torch_function``, such as that of `torch.nn.TransformerEncoderLayer`, would go another way.
    Without the second (it is private, too) after a graph break dynamo would compile ``__torch_function__`` as a frame
    of its own, as if it were tracing, and native code would read memory that is not there.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.variables import builder

    _Stand._checked = staticmethod(torch.compiler.disable(_unread))  # type: ignore[no-untyped-call]
    skip = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        skip(_Stand.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]
    infer = getattr(builder, "infer_subclass_type", None)
    if infer is not None:
        plain = (RemoteTensor, RemoteParameter)
        builder.infer_subclass_type = lambda value: None if type(value) in plain else infer(value)
