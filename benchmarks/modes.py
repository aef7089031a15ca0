"""``python -m benchmarks modes``: the demo in every training mode, its accuracy beside its gate, and its losses.

The trainings run one after the other, each by itself on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.options import Options
from tensorwire.bench.compare import Settings
from tensorwire.bench.programs import ProgramFailed
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.charts.curves import Curve

FOLDERS = {"digits": "digits", "fashion": "/usr/share/datasets/fashion-mnist"}
DEMO = ROOT / "examples" / "fcn5" / "demo.py"
Curves = dict[str, dict[str, Curve]]  # by data and mode


def measure(options: Options, settings: Settings, notes: Notes, curves: Curves) -> list[Record]:
    """Every mode on all data; adds to ``curves``."""
    found = []
    device, seconds = options.devices[0], 3.0 if options.quick else options.seconds
    for data in options.datas:
        if data != "digits" and not Path(FOLDERS[data]).is_dir():
            notes.skip(f"{data}: there is no {FOLDERS[data]}: apt install dataset-fashion-mnist")
            continue
        for mode in options.modes:
            notes.progress(f"FCN-5 of width {options.width} on {data}, {seconds:g} s: {mode}")
            trained = _train(mode, FOLDERS[data], device, seconds, options.width)
            found.append(_record(trained, data, options.width))
            curves.setdefault(data, {})[mode] = _curve(trained)
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


def _record(trained: dict[str, Any], data: str, width: int) -> Record:
    seconds, gate = trained["training_seconds"], trained["gate"]
    return Record(
        bench="modes",
        device=trained["device"],
        peer=trained["mode"],
        mode="convergence",
        workload=f"FCN-5 of width {width} on {data}, {trained['workers']} workers",
        bytes=0,
        seconds=seconds,
        low=seconds,
        high=seconds,
        rounds=1,
        rpcs=trained["rpcs"],
        registrations=trained["registrations"],
        target=f"accuracy >= {gate:.0%}",
        met=trained["accuracy"] >= gate,
        details={name: trained[name] for name in ("accuracy", "samples_per_second")},
    )
