"""Hooks on the modules that own parameters of the store."""

from __future__ import annotations

import copyreg
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tensorwire.errors import Unsupported
from tensorwire.torch.awaited import Awaited


class Hook:
    """``call(*bound, *arguments)``, that stays behind when its module is copied or pickled."""

    def __init__(self, call: Callable[..., Any], *bound: Any) -> None:
        self._call, self._bound = call, bound

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*self._bound, *arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def leave_hooks_behind(modules: Iterable[torch.nn.Module]) -> None:
    """Copies and pickles of ``modules``, and of others of their classes, have no `Hook`: they are plain PyTorch."""
    for cls in {type(m) for m in modules} - copyreg.dispatch_table.keys():
        copyreg.pickle(cls, _reduced)


def _reduced(module: torch.nn.Module) -> Any:
    """What the module itself says, without our hooks."""
    found = module.__reduce_ex__(2)
    if not isinstance(found, tuple) or len(found) < 3 or not isinstance(found[2], dict):
        return found
    state = found[2].copy()
    for name, value in state.items():
        if isinstance(value, Awaited):
            state[name] = value.copy()
        elif name.endswith("_hooks") and isinstance(value, dict):
            state[name] = type(value)((key, hook) for key, hook in value.items() if not isinstance(hook, Hook))
    return *found[:2], state, *found[3:]


def find_modules(params: Iterable[torch.Tensor], model: torch.nn.Module | None) -> list[torch.nn.Module]:
    """Finds modules, among them owners of ``params``: those of ``model`` if it has all of ``params``.

    Otherwise all modules of this process, but for those that ``gc.freeze()`` hides: PyTorch has no way from a parameter
    to its modules, of which there may be several, in several models.
    """
    if model is not None:
        owned = {id(p) for p in model.parameters()}
        if all(id(p) in owned for p in params):
            return list(model.modules())
    return [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]


def find_compiled(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of ``modules`` that ``torch.compile`` has made of others."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return [m for m in modules if isinstance(m, kind)]


def owners(params: Iterable[torch.nn.Parameter], modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of ``modules`` that have some of ``params`` as their own."""
    ours = {id(p) for p in params}
    return [m for m in modules if any(id(p) in ours for p in m._parameters.values() if p is not None)]


def watch_loading(
    params: Sequence[torch.nn.Parameter],
    modules: Iterable[torch.nn.Module],
    loaded: Callable[[Iterable[torch.nn.Parameter]], None],
) -> list[RemovableHandle]:
    """Calls ``loaded(parameters)`` after ``load_state_dict`` of ``modules``, their owners, wrote to some of ``params``.

    Returns:
        The hooks' handles.
    """
    ours = {id(p) for p in params}

    def hook(others: set[int], module: torch.nn.Module, keys: Any) -> None:
        mine = [p for p in module._parameters.values() if p is not None]
        if any(id(p) not in ours and id(p) not in others for p in mine):
            raise Unsupported(
                "load_state_dict(assign=True) replaces parameters that live in the store: load without assign"
            )
        loaded(p for p in mine if id(p) in ours)

    handles, modules = [], list(modules)
    leave_hooks_behind(modules)
    for module in modules:
        others = {id(p) for p in module._parameters.values() if p is not None and id(p) not in ours}
        handles.append(module.register_load_state_dict_post_hook(Hook(hook, others)))  # type: ignore[no-untyped-call]
    return handles
