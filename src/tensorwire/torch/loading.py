"""Noticing ``load_state_dict`` on modules that own parameters of the store."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tensorwire.errors import Unsupported


def watch_loading(params: Sequence[torch.nn.Parameter], loaded: Callable[[Iterable[torch.nn.Parameter]], None]) -> None:
    """Calls ``loaded(parameters)`` after ``load_state_dict`` wrote to some of ``params``.

    An optimizer is given parameters, not modules; the modules that own them are found once, among all live ones.
    """
    ours = {id(p) for p in params}

    def hook(module: torch.nn.Module, keys: Any) -> None:
        mine = [p for p in module._parameters.values() if p is not None]
        if any(id(p) not in ours for p in mine if id(p) not in others):
            raise Unsupported(
                "load_state_dict(assign=True) replaces parameters that live in the store: load without assign"
            )
        loaded(p for p in mine if id(p) in ours)

    others: set[int] = set()
    for module in _modules():
        mine = [p for p in module._parameters.values() if p is not None]
        if any(id(p) in ours for p in mine):
            others.update(id(p) for p in mine if id(p) not in ours)
            module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]


def _modules() -> list[torch.nn.Module]:
    return [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
