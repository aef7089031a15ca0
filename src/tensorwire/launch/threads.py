"""The total number of threads of one machine's workers, and a warning if it exceeds the cores."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping

from tensorwire.launch.place import Place

# If one of these is set, the user has decided.
_SET_BY_PEOPLE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Where other launchers say how many of the processes are on this machine. Slurm's is such as ``2(x3),1``.
_COUNTS = ("LOCAL_WORLD_SIZE", "SLURM_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_log = logging.getLogger("tensorwire")


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def shared_cores(environment: Mapping[str, str], workers: int) -> dict[str, str]:
    """What ``tensorwire run`` adds to the environment of ``workers`` on one machine: their share of its cores each.

    Nothing for a single worker, and nothing where people have set a number of threads.
    """
    if workers < 2 or any(environment.get(name) for name in _SET_BY_PEOPLE):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores() // workers))}


def warn_if_crowded(place: Place, environment: Mapping[str, str]) -> bool:
    """Warns where the workers of this machine compute with more threads than it has cores.

    Returns whether that is settled: not before PyTorch is imported. Only worker 0 says it.
    """
    torch = sys.modules.get("torch")
    if place.rank or any(environment.get(name) for name in _SET_BY_PEOPLE):
        return True
    threads = getattr(torch, "get_num_threads", None)
    if threads is None:
        return False
    workers, each, available = _neighbours(place, environment), threads(), cores()
    share = max(1, available // workers)
    if workers > 1 and each > share:
        _log.warning(
            "%d workers with %d threads each share %d cores, which slows all of them down: set OMP_NUM_THREADS=%d",
            workers,
            each,
            available,
            share,
        )
    return True


def _neighbours(place: Place, environment: Mapping[str, str]) -> int:
    """How many workers are on this machine, if that is known without asking them; otherwise 1."""
    if not place.several_machines:
        return place.workers
    counts = (re.match(r"\d+", environment.get(name, "")) for name in _COUNTS)
    return next((int(count[0]) for count in counts if count), 1)
