"""What a server asks before it serves a store: the same software as the workers, and memory. Imports no framework."""

from __future__ import annotations

import importlib.metadata

from tensorwire._native import available_bytes
from tensorwire.errors import OutOfMemory, PlanMismatch
from tensorwire.sizes import size_text


def versions() -> str:
    """The software that gives an update its bits; workers and servers of a job must agree on it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return f"tensorwire {importlib.metadata.version('tensorwire')}, torch {torch}"


def check_versions(of_workers: str, who: str) -> None:
    """Raises `PlanMismatch` where a server has other software."""
    if of_workers != versions():
        raise PlanMismatch(f"the workers run {of_workers}, {who} {versions()}: install one everywhere")


def check_memory(nbytes: int, who: str) -> None:
    """Refuses a plan that does not fit the machine, before step 1. Raises `OutOfMemory`."""
    available = available_bytes()
    if nbytes > available:
        raise OutOfMemory(
            f"{who} would register {size_text(nbytes)}, and this machine has {size_text(available)} free: "
            "use more servers on other machines, or fewer workers per server"
        )
