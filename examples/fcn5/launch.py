"""What every run of the demo begins with: the data, and ``tensorwire run`` with the right environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import data
from rich.console import Console

from tensorwire.bench.machine import MALLOC
from tensorwire.errors import ArgumentError
from tensorwire.launch.start import module_command


def start(launcher: list[str], script: list[str], folder: str, **more: str) -> int:
    """Runs the job, with ``more`` in its environment; the trace comes into ``folder``. Returns the exit status."""
    environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "TENSORWIRE_TRACE": folder, **more}
    # --no-prefix: worker 0 draws its own progress on our terminal.
    run = module_command("tensorwire.cli", "run", "--no-prefix", *launcher)
    command = [*run, "--", sys.executable, *script]
    # In a session of its own, so that Ctrl-C reaches it once: from here.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in numbers}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(images: data.Data, workers: int, batch: int) -> None:
    """Refuses what could not train. Raises `ArgumentError`."""
    if workers * batch > len(images.train_labels):
        raise ArgumentError(
            f"{workers} x {batch} images a step are more than the {len(images.train_labels)} there are: "
            "use a smaller --batch"
        )


def prepare(options: dict[str, Any]) -> tuple[data.Data, list[str]]:
    """The data, and the launcher's options. Raises `ArgumentError`."""
    with Console().status("loading the data"):
        images = data.load(options["data"])
    check(images, options["workers"], options["batch"])
    print(f"data: {images}", flush=True)
    return images, given(options, "workers", "servers", "device")


def given(options: dict[str, Any], *names: str) -> list[str]:
    """Those of our own options as options of a command."""
    return [f"--{name}={options[name]}" for name in names if options[name] is not None]
