"""Optional packages, and one message for all that are missing: how to install the extra that brings them."""

from __future__ import annotations

from typing import Literal

Extra = Literal["torch", "mxnet", "tensorflow", "verbs", "plot", "benchmarks", "files", "testing"]


def how_to_install(extra: Extra) -> str:
    """What to run for an extra of ``pyproject.toml``.

    Tensorwire is on no package index, so the command names the source folder, which is where it has to be run.
    """
    return f"run pip install '.[{extra}]' in the folder of Tensorwire's source"
