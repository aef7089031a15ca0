"""The workers of this process's job, as graphs see them."""

from __future__ import annotations

import weakref

from tensorwire.control.settings import step_timeout
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.launch.job import Job

_groups: weakref.WeakKeyDictionary[Job, WorkerGroup] = weakref.WeakKeyDictionary()


def group_of(job: Job) -> WorkerGroup:
    """Of ``job``; made once, closed with it."""
    if job not in _groups:
        _groups[job] = group = WorkerGroup(job.member, job.num_workers, step_timeout())
        job.at_close(group.leave)
        job.at_close(group.close)
    return _groups[job]
