"""``TF_CONFIG``: the JSON by which TensorFlow's launchers tell a process its cluster and task.

The workers are the tasks of ``chief`` and then of ``worker``. The coordinator listens at the first one's address.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensorwire.errors import ArgumentError

_ROLES = ("chief", "master", "worker")  # in the order of the ranks


class _Task(msgspec.Struct):
    type: str = "worker"
    index: int = 0


class _Config(msgspec.Struct):
    cluster: dict[str, list[str]] = {}
    task: _Task = msgspec.field(default_factory=_Task)


def read_tf_config(text: str) -> tuple[int, list[str]] | None:
    """The rank of this process and the addresses of all workers; None: it names no cluster.

    Raises `ArgumentError` for what is no such text, and for a task that no worker has.
    """
    try:
        config = msgspec.json.decode(text, type=_Config)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArgumentError(f"TF_CONFIG is not the JSON of a cluster and a task: {error}") from None
    if not config.cluster:
        return None
    others: list[Any] = [role for role in config.cluster if role not in (*_ROLES, "evaluator")]
    if others:
        raise ArgumentError(
            f"TF_CONFIG has tasks of type {others[0]!r}: leave them out, because the job starts its own servers"
        )
    tasks = [(role, index) for role in _ROLES for index in range(len(config.cluster.get(role, [])))]
    mine = config.task.type, config.task.index
    if mine not in tasks:
        raise ArgumentError(f"TF_CONFIG: task {mine[1]} of type {mine[0]!r} is no worker of its cluster")
    return tasks.index(mine), [config.cluster[role][index] for role, index in tasks]
