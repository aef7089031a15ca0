"""Which of a launcher's processes are stopped. Before a process joins its job, no heartbeat shows that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path


class Stops:
    """Counts for how long processes are stopped: in looks, one a ``beat`` (seconds), so that time counts only while the
    launcher runs itself."""

    def __init__(self, beat: float, lost_after: float) -> None:
        self._beat, self._lost_after = beat, lost_after
        self._looks: dict[str, int] = {}

    def scan(self, processes: Mapping[str, int]) -> dict[str, float]:
        """Looks once.

        Args:
            processes: Pids by the names of the processes to look at.

        Returns:
            For those that were stopped in every look for ``lost_after`` seconds: their names, and for how long.
        """
        self._looks = {name: self._looks.get(name, 0) + 1 for name, pid in processes.items() if is_stopped(pid)}
        seconds = {name: looks * self._beat for name, looks in self._looks.items()}
        return {name: long for name, long in seconds.items() if long >= self._lost_after}


def is_stopped(pid: int) -> bool:
    """Whether the process, or one that it has started (a shell's Python), was stopped by a signal."""
    return any(_state(one) == "T" for one in _tree(pid))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended, or the kernel does not say
        return
    for child in children:
        yield from _tree(int(child))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
