"""A module's parameters, some of which must be awaited before use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

Arrive = Callable[[Sequence[int]], object]


class Awaited(dict[str, "torch.nn.Parameter | None"]):
    """A module's ``_parameters``: reading one waits for it. A copy is an ordinary dictionary.

    PyTorch has hooks around ``forward()``, but none for ``module.weight`` and ``module.parameters()``.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self._waits: dict[str, Callable[[], object]] = {}  # by the name of a parameter
        self._all: dict[Arrive, Callable[[], object]] = {}

    @classmethod
    def watch(cls, module: torch.nn.Module, own: Mapping[str, int], arrive: Arrive) -> None:
        """Calls ``arrive([own[name], ...])`` before somebody gets parameters of ``module`` by these names."""
        if not isinstance(module._parameters, cls):
            module._parameters = cls(module._parameters)
        module._parameters._waits.update({name: partial(arrive, (index,)) for name, index in own.items()})
        module._parameters._all[arrive] = partial(arrive, tuple(own.values()))

    @classmethod
    def release(cls, module: torch.nn.Module, own: Mapping[str, int], arrive: Arrive) -> None:
        """Undoes `watch`; the last one gives ``module`` an ordinary dictionary."""
        awaited = module._parameters
        if not isinstance(awaited, cls):
            return
        for name in own:
            awaited._waits.pop(name, None)
        awaited._all.pop(arrive, None)
        if not awaited._all:
            module._parameters = dict(awaited.items())

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        if name in self._waits:
            self._waits[name]()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it is this method)

    def items(self) -> Any:
        self._arrive()
        return super().items()

    def values(self) -> Any:
        self._arrive()
        return super().values()

    def _arrive(self) -> None:
        for arrive in self._all.values():
            arrive()

    def copy(self) -> dict[str, torch.nn.Parameter | None]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)
