"""``python -m benchmarks modes``: the demo in every training mode, its accuracy beside its gate, and its losses.

The trainings run one after the other, each by itself on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workers import ROOT
from tensorwire.bench.programs import ProgramFailed
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.charts.curves import Curve

FOLDERS = {"digits": "digits", "fashion": "/usr/share/datasets/fashion-mnist"}
DEMO = ROOT / "examples" / "fcn5" / "demo.py"


@dataclass
class Trainings:
    """What has been trained: records, and the curves by data and mode."""

    records: list[Record] = field(default_factory=list)
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)


def measure(
    datas: Sequence[str], modes: Sequence[str], device: str, *, seconds: float, width: int, notes: Notes
) -> Trainings:
    """Every mode on all data."""
    found = Trainings()
    for data in datas:
        if data != "digits" and not Path(FOLDERS[data]).is_dir():
            notes.skip(f"{data}: there is no {FOLDERS[data]}: apt install dataset-fashion-mnist")
            continue
        for mode in modes:
            notes.progress(f"FCN-5 of width {width} on {data}, {seconds:g} s: {mode}")
            trained = _train(mode, FOLDERS[data], device, seconds, width)
            found.records.append(_record(trained, data, device, width))
            found.curves.setdefault(data, {})[mode] = _curve(trained)
    return found


def _train(mode: str, data: str, device: str, seconds: float, width: int) -> dict[str, Any]:
    """The demo's own record. Raises `ProgramFailed`."""
    with tempfile.TemporaryDirectory(prefix="tensorwire-bench-") as folder:
        figures = Path(folder) / "figures.json"
        options = {"mode": mode, "data": data, "device": device, "seconds": seconds, "width": width, "json": figures}
        command = [sys.executable, str(DEMO), *(f"--{name}={value}" for name, value in options.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not figures.is_file():
            raise ProgramFailed(
                f"the demo in mode {mode} ended: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
            )
        (record,) = json.loads(figures.read_text())
        return dict(record)


def _curve(trained: dict[str, Any]) -> Curve:
    """Worker 0's losses, its steps as samples of all workers."""
    samples = trained["batch"] * sum(trained["steps_by_worker"]) / trained["steps"]
    return [(steps * samples, seconds, loss) for steps, seconds, loss in trained["curve"] if loss is not None]


def _record(trained: dict[str, Any], data: str, device: str, width: int) -> Record:
    seconds, gate = trained["training_seconds"], trained["gate"]
    return Record(
        bench="modes",
        device=trained["device"],
        peer=trained["mode"],
        mode="convergence",
        workload=f"FCN-5 of width {width} on {data}, {trained['workers']} workers",
        bytes=0,
        seconds=seconds,
        bytes_per_second=None,
        limit=None,
        limit_value=None,
        ratio=None,
        copies=None,
        rpcs=trained["rpcs"],
        registrations=trained["registrations"],
        low=seconds,
        high=seconds,
        rounds=1,
        target=f"accuracy >= {gate:.0%}",
        met=trained["accuracy"] >= gate,
        details={name: trained[name] for name in ("accuracy", "samples_per_second")},
    )
