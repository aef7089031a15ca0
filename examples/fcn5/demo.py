"""The demo: trains FCN-5 on this machine with several workers and a parameter server, and shows where the time went.

::

    python examples/fcn5/demo.py
    python examples/fcn5/demo.py --mode diloco
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import launch
import table
from modes import MODES

from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.trace.parts import read_trace

HERE = Path(__file__).resolve().parent


def run(options: dict[str, Any], no_gate: bool, json_file: str | None) -> int:
    """The demo proper; returns the exit status."""
    images, launcher = launch.prepare(options)
    description, gate = str(images), None if no_gate else images.gate
    print(f"starting the job: {_many(options, 'worker')}, {_many(options, 'server')}", flush=True)
    script = launch.given(options, "data", "seconds", "batch", "width", "seed", "mode")
    with tempfile.TemporaryDirectory(prefix="tensorwire-demo-") as folder:
        status = launch.start(launcher, [str(HERE / "train.py"), *script], folder)
        if status:
            return status if status > 0 else 128 - status
        outcome = table.outcome(read_trace(folder), description, gate)
    table.show(outcome)
    if json_file is not None:
        settings = {k: options[k] for k in ("workers", "servers", "batch", "width", "seed")}
        Path(json_file).write_text(json.dumps([table.record(outcome, **settings)], indent=1) + "\n")
    if not outcome.passed:
        print(f"tensorwire: the test accuracy {outcome.result['accuracy']:.1%} is below {gate:.0%}", file=sys.stderr)
        return 1
    return 0


def _many(options: dict[str, Any], what: str) -> str:
    n = options[f"{what}s"]
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--data", metavar="DIR|digits", help="A folder of IDX files (MNIST's format), or scikit-learn's digits.")
@click.option("--seconds", type=click.FloatRange(1), default=75.0, help="About how long to train.")
@click.option("--workers", type=click.IntRange(1), default=2)
@click.option("--servers", type=click.IntRange(1), default=1)
@click.option("--device", type=click.Choice(["auto", "shm", "tcp"]), default="auto", help="The transport.")
@click.option("--batch", type=click.IntRange(1), default=64, help="Images a worker and step.")
@click.option("--width", type=click.IntRange(1), default=4096, help="Of the hidden layers.")
@click.option("--seed", type=int, default=0)
@click.option("--mode", type=click.Choice(list(MODES)), default="sync", help="How the workers take turns.")
@click.option("--no-gate", is_flag=True, help="Any accuracy will do.")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures there, too.")
def main(no_gate: bool, json_file: str | None, **options: object) -> None:
    """Train FCN-5 with workers and parameter servers on this machine."""
    try:
        status = run(options, no_gate, json_file)
    except ArgumentError as error:
        print(f"tensorwire: {error}", file=sys.stderr)
        status = 2
    except TensorwireError as error:
        print(f"tensorwire: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
