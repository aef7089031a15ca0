"""The party of this process's job."""

from __future__ import annotations

import weakref

from tensorwire.control.settings import step_timeout
from tensorwire.graph.party import Party
from tensorwire.launch import Worker

_parties: weakref.WeakKeyDictionary[Worker, Party] = weakref.WeakKeyDictionary()


def party_of(worker: Worker) -> Party:
    """Of the job of ``worker``; made once, closed with it."""
    if worker not in _parties:
        _parties[worker] = party = Party(worker.member, worker.num_workers, step_timeout())
        worker.at_close(party.leave)
        worker.at_close(party.close)
    return _parties[worker]
