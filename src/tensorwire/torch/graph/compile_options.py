"""The options of ``torch.compile(model, backend="tensorwire", options={...})``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tensorwire.errors import ArgumentError

OUTPUTS = ("small", "all")
MODES = ("zerocopy", "copy")


@dataclass(frozen=True)
class CompileOptions:
    """``workers``: by module path, the rank of the worker that runs it; not needed where the model was placed.

    ``outputs``: which of the graph's outputs reach every worker: those of up to 64 KiB ("small"), or "all".
    ``mode``: how tensors cross: born in registered memory ("zerocopy"), or to compare with, copied there ("copy").
    ``replay_random``: workers also draw the random numbers of the others' operators, so that dropout is that of one
    process; it costs those operators' time.
    """

    workers: Mapping[str, int | str] | None = None
    outputs: str = "small"
    mode: str = "zerocopy"
    replay_random: bool = False

    @classmethod
    def of(cls, said: Mapping[str, Any] | None) -> CompileOptions:
        """Raises `ArgumentError` for names and values that it does not know."""
        known = [field.name for field in fields(cls)]
        for name in said or {}:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f": there are {', '.join(known)}"
                raise ArgumentError(f"options has no {name!r}{hint}")
        options = cls(**(said or {}))
        for name, values in (("outputs", OUTPUTS), ("mode", MODES), ("replay_random", (False, True))):
            if getattr(options, name) not in values:
                raise ArgumentError(f"options[{name!r}] must be one of {values}, not {getattr(options, name)!r}")
        return options
