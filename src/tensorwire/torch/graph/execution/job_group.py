"""The workers of this process's job, as graphs see them."""

from __future__ import annotations

import weakref

from tensorwire.control.settings import step_timeout
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.launch import Worker

_groups: weakref.WeakKeyDictionary[Worker, WorkerGroup] = weakref.WeakKeyDictionary()


def group_of(worker: Worker) -> WorkerGroup:
    """Of the job of ``worker``; made once, closed with it. Raises `Unsupported` where workers come and go."""
    worker.refuse_to_change("a model that is cut over workers")
    if worker not in _groups:
        _groups[worker] = group = WorkerGroup(worker.member, worker.num_workers, step_timeout())
        worker.at_close(group.leave)
        worker.at_close(group.close)
    return _groups[worker]
