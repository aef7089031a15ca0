"""A `StoreOptimizer` in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorwire.control.names import member_name
from tensorwire.control.reach import Route
from tensorwire.sizes import counted, size_text
from tensorwire.store.sharding import StorePlan


def describe(
    name: str, groups: Sequence[Mapping[str, Any]], plans: Sequence[StorePlan], routes: Mapping[str, Route], **own: Any
) -> str:
    """Several lines: what moves and where to, the options of each group, by which device each server is reached.

    ``own``: the options of the `StoreOptimizer` itself.
    """
    tensors = [t for plan in plans for t in plan.tensors]
    buckets = sum(len(b) for plan in plans for b in plan.buckets)
    servers = plans[0].servers
    lines = [
        f"StoreOptimizer of {name}: {counted(len(tensors), 'tensor')}, {size_text(sum(t.nbytes for t in tensors))}, "
        f"{counted(buckets, 'bucket')} on {counted(servers, 'server')}",
        "  " + ", ".join(f"{key}={value!r}" for key, value in own.items()),
    ]
    for number, group in enumerate(groups):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        lines.append(
            f"  group {number}, {counted(len(group['params']), 'tensor')}: "
            + ", ".join(f"{key}={value!r}" for key, value in options.items())
        )
    names = [member_name("server", index) for index in range(servers)]
    lines += [f"  {name} by {route}" for name in names if (route := routes.get(name)) is not None]
    return "\n".join(lines)
