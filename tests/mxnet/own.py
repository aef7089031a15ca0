"""MXNet's own store, as processes: a scheduler, a server and workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.testing.patience import patient

_SERVE = "import numpy; vars(numpy)['bool'] = bool; import mxnet"


def train_on_its_own(folder: Path, settings: dict[str, Any], workers: int = 2) -> list[list[Any]]:
    """What `training.train` returns in each worker of a job on MXNet's own ``dist_sync``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": "1",
    }
    serve = [sys.executable, "-c", _SERVE]
    program = str(Path(__file__).with_name("training.py"))
    work = [sys.executable, program, "dist_sync", f"{folder}/own", json.dumps(settings)]
    processes = [
        subprocess.Popen(
            words,
            env={**os.environ, **shared, "DMLC_ROLE": role},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role, words in [("scheduler", serve), ("server", serve), *[("worker", work)] * workers]
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=patient(120.0))
            assert process.returncode == 0, said
    finally:
        for process in processes:  # what still runs
            process.kill()
            process.communicate()
    found = []
    for rank in range(workers):
        with np.load(folder / f"own{rank}.npz") as arrays:
            found.append([arrays[name] for name in arrays.files])
    return found
