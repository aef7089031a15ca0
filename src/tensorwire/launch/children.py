"""Child processes that belong to a job: servers, and the coordinator where no launcher has one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tensorwire.errors import ControlError
from tensorwire.launch.place import worker_environment


def start_server(
    index: int, coordinator: str, secret: str, environment: Mapping[str, str] | None = None, **options: object
) -> subprocess.Popen[bytes]:
    """Server ``index`` of the job at ``coordinator``."""
    values = worker_environment(
        environment if environment is not None else os.environ, coordinator=coordinator, secret=secret, index=index
    )
    values.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "tensorwire.launch.server"]
    return subprocess.Popen(command, env=values, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload,no-any-return]


def start_coordinator(secret: str, workers: int, servers: int, host: str, port: int) -> tuple[subprocess.Popen[bytes], str]:
    """A coordinator as a process of its own, and its address. Raises `ControlError` if it cannot listen."""
    environment = worker_environment(os.environ, secret=secret)
    command = [sys.executable, "-m", "tensorwire.launch.coordinator", str(workers), str(servers), host, str(port)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line.startswith("listening "):
        process.wait()
        raise ControlError(line or "the coordinator did not start")
    return process, line.removeprefix("listening ")
