"""A server's checks before it serves a store: the workers' software versions, and memory. Imports no framework."""

from __future__ import annotations

import importlib.metadata

from tensorwire._native import available_bytes
from tensorwire.errors import OutOfMemory, PlanMismatch
from tensorwire.sizes import size_text

_ALL = ("tensorwire", "numpy", "torch")
_ADAPTERS = {"mxnet": ("mxnet",), "tensorflow": ("tensorflow", "keras")}  # whose rules run which packages


def versions(rule: str = "") -> str:
    """The software that gives the updates of a rule their bits; workers and servers of a job must agree on it."""
    adapter = rule.partition(":")[0].removeprefix("tensorwire.").partition(".")[0]
    return ", ".join(f"{name} {_version(name)}" for name in (*_ALL, *_ADAPTERS.get(adapter, ())))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check_versions(of_workers: str, rule: str, who: str) -> None:
    """Raises `PlanMismatch` where a server has other software for a rule."""
    here = versions(rule)
    if of_workers != here:
        raise PlanMismatch(f"the workers run {of_workers}, {who} {here}: install one everywhere")


def check_memory(nbytes: int, who: str) -> None:
    """Refuses a plan that does not fit the machine, before step 1. Raises `OutOfMemory`."""
    available = available_bytes()
    if nbytes > available:
        raise OutOfMemory(
            f"{who} would register {size_text(nbytes)}, and this machine has {size_text(available)} free: "
            "use more servers on other machines, or fewer workers per server"
        )
