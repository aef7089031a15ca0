"""The launcher's views of a job: output lines, table, metrics, trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tensorwire.control import Coordinator
from tensorwire.control.coordinator import Report
from tensorwire.control.names import describe_exit
from tensorwire.launch.output import ProcessOutput
from tensorwire.launch.table import STATS_SECONDS, JobTable


class Trace(Protocol):
    """Gathers what the processes record of their time: `tensorwire.trace.collect.TraceFile`, which is above us."""

    def folder(self, environment: Mapping[str, str]) -> str:
        """Where each process leaves its records."""

    def finish(self) -> str:
        """All processes have ended: gathers their records, and says in words how that went."""


class Watch:
    """One launcher's view. ``members``: all of the job, by name, with the node each runs on; ``node``: ours.

    ``output``: of the processes, and of the launcher itself.

    Raises `ArgumentError` for a port that cannot be had.
    """

    def __init__(
        self, members: Mapping[str, int], node: int, *, prefix: bool, metrics: str | None, trace: Trace | None
    ) -> None:
        self._members = members
        self._coordinator: Coordinator | None = None
        self._trace = trace
        self._metrics = None
        if metrics is not None:
            from tensorwire.launch.metrics import MetricsServer, parse_metrics_address

            self._metrics = MetricsServer(*parse_metrics_address(metrics))
        self._table = JobTable(list(members), self._stats)
        here = [name for name, where in members.items() if where == node]
        # Only node 0 hears of all processes.
        self.output = ProcessOutput(here, prefix=prefix, picture=self._table if node == 0 else None)
        if self._metrics is not None:
            self.output.print_line(f"tensorwire: metrics are at {self._metrics.address}")

    @property
    def stats_every(self) -> float:
        """Seconds between the members' reports of themselves; 0: nobody would look at them."""
        return STATS_SECONDS if self._metrics is not None or self.output.watched else 0.0

    def attend(self, coordinator: Coordinator) -> None:
        """The members report to ``coordinator``."""
        self._coordinator = coordinator
        if self._metrics is not None:
            from tensorwire.launch.metrics import JobCollector

            self._metrics.serve(JobCollector(self._stats, self._members))

    def _stats(self) -> Mapping[str, Report]:
        return {} if self._coordinator is None else self._coordinator.stats

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` for the job's processes."""
        added = {} if self._trace is None else {"TENSORWIRE_TRACE": self._trace.folder(base)}
        return {**base, **added}

    def left(self, name: str, status: int) -> None:
        """How a process ended."""
        if status:
            self._table.leave(name, describe_exit(status))

    def settle(self) -> None:
        """All processes have ended: what they recorded is written."""
        if self._metrics is not None:
            self._metrics.close()
        if self._trace is not None:
            self.output.print_line(f"tensorwire: {self._trace.finish()}")


def job_members(workers: int, servers: int, nodes: int) -> dict[str, int]:
    """The members of a job by name, workers first; ``workers`` and ``servers`` are per node, as the values say."""
    counts: Sequence[tuple[str, int]] = (("worker", workers), ("server", servers))
    return {f"{role} {index}": index // count for role, count in counts for index in range(count * nodes)}
