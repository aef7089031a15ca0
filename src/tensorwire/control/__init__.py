"""Membership of the job: rendezvous, secret, addresses, plan comparison, and how the job ends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorwire.control.client import Client
from tensorwire.control.frames import Cause
from tensorwire.control.member import Member

if TYPE_CHECKING:
    from tensorwire.control.coordinator import Coordinator

__all__ = ["Cause", "Client", "Coordinator", "Member"]


def __getattr__(name: str) -> Any:
    if name == "Coordinator":  # one process of a job needs it, and asyncio with it
        return importlib.import_module("tensorwire.control.coordinator").Coordinator
    raise AttributeError(f"module 'tensorwire.control' has no attribute {name!r}")
