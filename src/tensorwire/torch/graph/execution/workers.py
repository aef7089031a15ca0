"""The party of this process's job."""

from __future__ import annotations

import weakref

from tensorwire.control.settings import step_timeout
from tensorwire.graph.party import Party
from tensorwire.launch.job import Job

_parties: weakref.WeakKeyDictionary[Job, Party] = weakref.WeakKeyDictionary()


def party_of(job: Job) -> Party:
    """Of ``job``; made once, closed with it."""
    if job not in _parties:
        _parties[job] = party = Party(job.member, job.num_workers, step_timeout())
        job.at_close(party.leave)
        job.at_close(party.close)
    return _parties[job]
