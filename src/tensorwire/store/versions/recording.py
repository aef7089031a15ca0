"""A consumer's loading code, run once under tensors without values: which operators it called, on what.

Each recorded tensor has a *twin* on the device ``meta``, on which every operator runs: it says the result's shape,
strides and offset. A tensor of the version is its twin's storage, so that whatever has that storage is a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tensorwire.errors import ArgumentError
from tensorwire.store.versions.version_layout import FileTensor

Load = Callable[[dict[str, torch.Tensor]], object]
_aten = torch.ops.aten
_Tensor = torch.Tensor
_READS = (_Tensor.numpy, _Tensor.tolist, _Tensor.data_ptr, _Tensor.__array__, _Tensor.__dlpack__, _Tensor.__deepcopy__)
_SETS_DATA = _Tensor.data.__set__  # type: ignore[attr-defined]


class RecordedTensor(torch.Tensor):
    """A tensor that has no values: one of a version, or what an operator made of some.

    Attributes:
        twin: The same on the device ``meta``.
        number: Counts the recorded tensors.
    """

    twin: torch.Tensor
    number: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, twin: torch.Tensor, device: torch.device, number: int) -> RecordedTensor:
        made: RecordedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            twin.shape,
            strides=twin.stride(),
            storage_offset=twin.storage_offset(),
            dtype=twin.dtype,
            device=device,
        )
        made.twin, made.number = twin, number
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RecordedTensor(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            "this tensor stands for one of a version in the one run of load, in its thread, and has no values: "
            "copy it into a tensor of your own there"
        )


@dataclass(frozen=True)
class Call:
    """A call of an operator; ``results``: its flat results; ``changes``: which of its arguments it changes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    changes: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        return _tensors((self.args, self.kwargs))


class Recording:
    """What ``load`` does with tensors of a version; ``held``: these, by name. Nothing that it is given changes.

    Attributes:
        calls (list[Call]): Its operators in their order, without those that only make views of tensors of its own.
        made (dict[int, Call]): By number of a recorded tensor, what made it.

    Raises `ArgumentError` where ``load`` asks for values, or copies nothing.
    """

    def __init__(self, held: Mapping[str, FileTensor], load: Load) -> None:
        self.calls: list[Call] = []
        self.made: dict[int, Call] = {}
        self._count = 0
        self._changed: set[int] = set()  # storages
        self._starts: dict[int, int] = {}  # by storage of a tensor of the version: where that begins in the file
        weights: dict[str, torch.Tensor] = {}
        for name, (dtype, shape, start) in held.items():
            twin = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            weights[name] = self._recorded(twin, torch.device("cpu"))
            self._starts[_storage(twin)] = start
        self._weights = [*weights.values()]  # a storage that is gone may leave its number to another one
        with torch.no_grad(), _Functions(), _Operators(self):
            load(weights)
        if not any(not isinstance(changed, RecordedTensor) for call in self.calls for changed in call.changes):
            raise ArgumentError("load copies nothing: it has to copy tensors of the version into some of its own")

    def start(self, tensor: RecordedTensor) -> int | None:
        """Where the tensor of the version of which this is a view begins in the file; None: it is none, or changed."""
        view_of_changed = self.changed(tensor) and tensor.number in self.made
        if view_of_changed or tensor.twin.is_conj() or tensor.twin.is_neg():
            return None
        return self._starts.get(_storage(tensor.twin))

    def changed(self, tensor: torch.Tensor) -> bool:
        """Whether some operator changed memory of this tensor."""
        return _storage(tensor.twin if isinstance(tensor, RecordedTensor) else tensor) in self._changed

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator on the twins; returns what ``load`` gets in place of its result."""
        given = _tensors((args, kwargs))
        recorded = any(isinstance(tensor, RecordedTensor) for tensor in given)
        if torch.Tag.data_dependent_output in func.tags:
            if recorded or any(self.changed(tensor) for tensor in given):
                raise _without_values(func)
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise ArgumentError(f"load changes a tensor's shape in place ({func.overloadpacket}): make a view of it")
        if func is _aten.lift_fresh.default:  # a constant of the program, which it may change
            func = _aten.clone.default
        twins = {id(tensor): _twin(tensor) for tensor in given}
        try:
            made = self._run(func, args, kwargs, twins)
        except NotImplementedError:
            raise _without_values(func) from None
        storages = {_storage(twin) for twin in twins.values()}
        changes = [*_changed(func, args, kwargs)]
        if not (recorded or changes) and given and all(_storage(each) in storages for each in _tensors(made)):
            return func(*args, **kwargs)
        back = {id(twins[id(tensor)]): tensor for tensor in given}
        device = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
        result = tree_map_only(
            torch.Tensor, lambda each: back[id(each)] if id(each) in back else self._recorded(each, device), made
        )
        self._changed.update(_storage(t.twin if isinstance(t, RecordedTensor) else t) for t in changes)
        args, kwargs = tree_map_only(torch.Tensor, _as_it_is, (args, kwargs))
        self._keep(Call(func, args, kwargs, tree_leaves(result), changes))
        return result

    def _keep(self, call: Call) -> None:
        self.calls.append(call)
        given = {id(tensor) for tensor in call.tensors}
        self.made.update((each.number, call) for each in recorded_in(call.results) if id(each) not in given)

    def _run(self, func: Any, args: Any, kwargs: Any, twins: dict[int, torch.Tensor]) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: twins[id(tensor)], (args, kwargs))
        names = [argument.name for argument in func._schema.arguments]
        places = {"device": torch.device("meta"), "pin_memory": False}
        args = [places.get(name, given) for name, given in zip(names, args, strict=False)]
        rest = {name: value for name, value in places.items() if name in names[len(args) :]}
        return func(*args, **{**kwargs, **rest})

    def _recorded(self, twin: torch.Tensor, device: torch.device) -> RecordedTensor:
        self._count += 1
        return RecordedTensor(twin, device, self._count)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operators to a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recording.add(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Refuses what reaches for values or memory and is no operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, RecordedTensor) for each in args):
            if func in _READS:
                raise _without_values(func.__name__)
            if func == _SETS_DATA:
                raise ArgumentError("load assigns .data: copy into the tensor that is there, with copy_()")
        return func(*args, **(kwargs or {}))


def _without_values(what: Any) -> ArgumentError:
    name = getattr(what, "overloadpacket", what)
    return ArgumentError(
        f"load asks for values ({name}), and is recorded without any: choose by names and shapes, or use pull()"
    )


def recorded_in(nested: object) -> list[RecordedTensor]:
    """The recorded tensors in lists, tuples and dicts."""
    return [each for each in tree_leaves(nested) if isinstance(each, RecordedTensor)]


def _tensors(nested: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(nested) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, RecordedTensor):
        return tensor.twin
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, wherever a parameter's ``data`` is later."""
    return tensor if isinstance(tensor, RecordedTensor) else tensor.detach()


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
