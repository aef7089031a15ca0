"""The demo: trains FCN-5 on this machine with several workers and a parameter server, and shows where the time went.

::

    python examples/fcn5/demo.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import data
import table
from rich.console import Console

from tensorwire.bench.machine import MALLOC
from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.observe.parts import read_trace

HERE = Path(__file__).resolve().parent


def start(launcher: list[str], script: list[str], folder: str) -> int:
    """Runs the job; the trace comes into ``folder``. Returns the exit status."""
    environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "TENSORWIRE_TRACE": folder}
    command = [sys.executable, "-m", "tensorwire.cli", "run", *launcher, "--", sys.executable, *script]
    # In a session of its own, so that Ctrl-C reaches it once: from here.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: process.send_signal(n))
    return process.wait()


def check(images: data.Data, workers: int, batch: int) -> None:
    """Refuses what could not train. Raises `ArgumentError`."""
    if workers * batch > len(images.train_labels):
        raise ArgumentError(
            f"{workers} x {batch} images a step are more than the {len(images.train_labels)} there are: "
            "use a smaller --batch"
        )


def run(options: dict[str, Any], no_gate: bool, json_file: str | None) -> int:
    """The demo proper; returns the exit status."""
    with Console().status("loading the data"):
        images = data.load(options["data"])
    check(images, options["workers"], options["batch"])
    description, gate = str(images), None if no_gate else images.gate
    print(f"data: {description}", flush=True)
    print(f"starting the job: {_many(options, 'worker')}, {_many(options, 'server')}", flush=True)
    launcher = [f"--{k}={options[k]}" for k in ("workers", "servers", "device")]
    script = [f"--{k}={options[k]}" for k in ("data", "seconds", "batch", "width", "seed") if options[k] is not None]
    with tempfile.TemporaryDirectory(prefix="tensorwire-demo-") as folder:
        status = start(launcher, [str(HERE / "train.py"), *script], folder)
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
