"""Jobs of MXNet's processes: MXNet's own parameter server, ps-lite, and Tensorwire's store for MXNet.

MXNet has a Python of its own, which runs the programs ``peers/mxnet_*.py``: the same one for both stores.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.libraries import PROGRAMS, framework_python
from benchmarks.workers import ROOT
from tensorwire.bench import links
from tensorwire.bench.programs import OURS, Contender
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.errors import Unsupported

OWN = "mxnet"
STORES = {OURS: "dist_tensorwire_sync", OWN: "dist_sync"}


def find_python() -> str:
    """The Python that has MXNet. Raises `MissingPackage`."""
    return framework_python("MXNet 1.9.1", "TENSORWIRE_MXNET_PYTHON", ROOT / ".venv-mxnet")


@dataclass(frozen=True)
class Job:
    """One server, and workers. ``ends``: the network namespaces of a link; None: one machine.

    Over a link the server and worker 1 are at the first end, and worker 0 at the second.
    """

    python: str
    workers: int
    ends: tuple[str, str] | None = None

    def contender(self, peer: str, device: str, script: str, *arguments: object) -> Contender:
        """The programs of `OURS` over ``device``, or of `OWN`, which knows TCP alone."""
        commands = [self._command(0, peer, device, script, "server", 0, *arguments)]
        for index in reversed(range(self.workers)):
            commands.append(self._command(index + 1, peer, device, script, "worker", index, *arguments))
        secret = {"TENSORWIRE_SECRET": secrets.token_hex(32)}
        return Contender(peer, tuple(commands), servers=1, environment=secret)

    def _command(
        self, place: int, peer: str, device: str, script: str, role: str, index: int, *arguments: object
    ) -> tuple[str, ...]:
        host = links.ADDRESSES[place % 2] if self.ends else "127.0.0.1"
        inside = links.inside(self.ends[place % 2]) if self.ends else ()
        words = (role, index, STORES[peer], self.workers, device, host, *arguments)
        return (*inside, self.python, str(PROGRAMS / script), *map(str, words))

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.workers} worker{'s' * (self.workers > 1)}"


def everywhere(
    counts: Sequence[int], rates: Sequence[str], notes: Notes, measure: Callable[[Job, str], list[Record]]
) -> list[Record]:
    """Measures jobs by number of workers: on one machine, or over each link. Raises `MissingPackage`."""
    python = find_python()
    found: list[Record] = []
    for rate in rates:
        try:
            with links.cable(rate) as ends:
                for workers in counts:
                    found += measure(Job(python, workers, ends), rate)
        except Unsupported as error:
            notes.skip(f"--link {rate}: {error}")
    for workers in () if rates else counts:
        found += measure(Job(python, workers), "")
    return found
