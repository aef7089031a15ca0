"""``python -m benchmarks tensorflow``: tensors that cross between two workers, by TensorFlow's own runtime and by ours.

One chain of additions runs on both, each on the other worker than the one before it. The figure is the time of one
crossing and one addition: within a call of many crossings, and of a call of its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.libraries import PROGRAMS
from benchmarks.workers import ROOT
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import OURS, Contender
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.errors import MissingPackage
from tensorwire.sizes import size_text

OWN = "grpc"
MIB = 2**20
SIZES = (64, 65536, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (64, MIB)
# Least ratios to TensorFlow's own runtime, by device: up to so many bytes.
TARGETS = {"shm": ((65536, 3.0), (MIB, 4.0), (64 * MIB, 6.0)), "tcp": ((MIB, 1.5), (256 * MIB, 2.0))}
_PYTHON = "TENSORWIRE_TENSORFLOW_PYTHON"


def find_python() -> str:
    """The Python that has TensorFlow. Raises `MissingPackage`."""
    named = os.environ.get(_PYTHON)
    python = Path(named or ROOT / ".venv-tensorflow" / "bin" / "python")
    if not os.access(python, os.X_OK):
        where = f"{python}, which {_PYTHON} names" if named else python.relative_to(ROOT)
        raise MissingPackage(f"TensorFlow has no Python at {where}: make setup-tensorflow")
    return str(python)


def measure(
    devices: Sequence[str], sizes: Sequence[int], settings: Settings, notes: Notes, *, quick: bool
) -> list[Record]:
    """All sizes over each device. Raises `MissingPackage`."""
    return compare_all(list(workloads(find_python(), devices, sizes, quick=quick)), settings, notes)


def workloads(python: str, devices: Sequence[str], sizes: Sequence[int], *, quick: bool) -> Iterator[Workload]:
    """Each size within a call of many crossings, and in a call of its own."""
    for nbytes in sizes:
        for many in (True, False):
            crossings = (10 if quick or nbytes > 4 * MIB else 50) if many else 2
            mode = "crossing-in-a-call" if many else "crossing-per-call"
            for device in devices:
                title = f"{device}, TensorFlow, a tensor of {size_text(nbytes)}, {crossings} crossings in a call"
                word = f"{nbytes}x{crossings}"
                pair = (_contender(python, OURS, device, word, nbytes), _contender(python, OWN, device, word, nbytes))
                target = _target(device, nbytes) if many else None
                yield Workload(
                    "tensorflow", device, title, nbytes, mode, pair, (OWN,), target, per=crossings, stage="tensorflow"
                )


def _target(device: str, nbytes: int) -> Target | None:
    least = next((ratio for most, ratio in TARGETS[device] if nbytes <= most), None)
    return None if least is None else Target(shares={OWN: least})


def _contender(python: str, peer: str, device: str, word: str, nbytes: int) -> Contender:
    """The programs of worker 1 and worker 0."""
    where = device if peer == OURS else "tcp"
    commands = tuple((python, str(PROGRAMS / "tensorflow_crossing.py"), str(i), peer, where) for i in (1, 0))
    secret = {"TENSORWIRE_SECRET": secrets.token_hex(32)}
    return Contender(peer, commands, environment=secret, word=word, memory=20 * nbytes)
