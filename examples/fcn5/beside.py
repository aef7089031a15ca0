"""``--compare grpc``: the same training with Tensorwire's store and with one on gRPC, and both beside each other."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch
import table

from tensorwire.bench.machine import MALLOC
from tensorwire.bench.programs import HANG_SECONDS, Program
from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.trace.parts import ProcessTrace, parts_of_trace, read_trace, typical

SCRIPT = Path(__file__).resolve().parent / "compare.py"
GRPC = SCRIPT.parents[2] / "benchmarks" / "peers"  # the store on gRPC
SAME_LOSS = 1e-4  # of it: sums in another order round differently


def run(options: dict[str, Any], json_file: str | None) -> int:
    """Both runs; returns the exit status. Raises `ArgumentError` where there is no gRPC."""
    if importlib.util.find_spec("grpc") is None:
        raise ArgumentError("--compare grpc needs grpcio: .venv/bin/pip install grpcio")
    _, launcher = launch.prepare(options)
    script = [str(SCRIPT), *launch.given(options, "data", "steps", "batch", "width", "seed")]
    columns = []
    with tempfile.TemporaryDirectory(prefix="tensorwire-demo-") as folder:
        for name in ("tensorwire", "gRPC"):
            own = Path(folder) / name
            print(f"{options['steps']} steps with the parameters in a store of {name}", flush=True)
            with _servers(options, own) if name == "gRPC" else contextlib.nullcontext([]) as extra:
                more = {"PYTHONPATH": os.pathsep.join([str(GRPC), os.environ.get("PYTHONPATH", "")])}
                status = launch.start(launcher, [*script, *extra], str(own), **more)
            if status:
                return status if status > 0 else 128 - status
            columns.append(_column(name, own))
    table.show_beside(columns)
    if json_file is not None:
        Path(json_file).write_text(json.dumps(columns, indent=1) + "\n")
    return _verdict(columns)


@contextlib.contextmanager
def _servers(options: dict[str, Any], folder: Path) -> Iterator[list[str]]:
    """The servers of the store on gRPC; what the script is told of them. Their trace lies in a folder of its own."""
    environment = {**MALLOC, "OMP_NUM_THREADS": "1", "TENSORWIRE_TRACE": str(folder / "servers")}
    command = (sys.executable, str(GRPC / "grpc_train.py"), "server")
    programs: list[Program] = []
    try:
        for index in range(options["servers"]):
            ends = (str(index), str(options["workers"]), "127.0.0.1")
            programs.append(Program((*command, *ends), environment))
        yield [f"--grpc={','.join(program.receive() for program in programs)}"]
        for program in programs:
            program.send("leave")
            program.process.wait(HANG_SECONDS)
    finally:
        for program in programs:
            program.close()


def _column(name: str, folder: Path) -> dict[str, Any]:
    """What one run showed: seconds, and counts of its settings."""
    trace: dict[str, ProcessTrace] = read_trace(folder)
    with contextlib.suppress(TensorwireError):
        trace |= read_trace(folder / "servers")  # those of the job itself have had nothing to do
    parts = typical(parts_of_trace(trace))
    result: Any = trace["worker-0"].facts["result"]
    shown = {part: getattr(parts, part) for part in table.PARTS if hasattr(parts, part)}
    device = trace["worker-0"].facts.get("device", "tcp")
    return {"store": name, "device": device, **result, "seconds": parts.seconds, **shown}


def _verdict(columns: list[dict[str, Any]]) -> int:
    ours, theirs = (column["loss"] for column in columns)
    if abs(ours - theirs) <= SAME_LOSS * abs(ours):
        return 0
    print(f"tensorwire: the loss is {ours:.6f} with ours and {theirs:.6f} with gRPC", file=sys.stderr)
    return 1
