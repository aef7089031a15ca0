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
    watch = _Watch(params, loaded)
    for module in _modules():
        mine = [p for p in module._parameters.values() if p is not None]
        if any(id(p) in watch.ours for p in mine):
            watch.others.update(id(p) for p in mine if id(p) not in watch.ours)
            module.register_load_state_dict_post_hook(watch)  # type: ignore[no-untyped-call]


class _Watch:
    """The hook itself. A copy or a pickle of a module has parameters of its own, that nobody watches."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], loaded: Callable[[Iterable[torch.nn.Parameter]], None]
    ) -> None:
        self.ours = {id(p) for p in params}
        self.others: set[int] = set()
        self._loaded = loaded

    def __call__(self, module: torch.nn.Module, keys: Any) -> None:
        mine = [p for p in module._parameters.values() if p is not None]
        if any(id(p) not in self.ours and id(p) not in self.others for p in mine):
            raise Unsupported(
                "load_state_dict(assign=True) replaces parameters that live in the store: load without assign"
            )
        self._loaded(p for p in mine if id(p) in self.ours)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()


def _unwatched(module: torch.nn.Module, keys: Any) -> None:
    """The hook of a copy."""


def _nobody() -> Callable[[torch.nn.Module, Any], None]:
    return _unwatched


def _modules() -> list[torch.nn.Module]:
    return [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
