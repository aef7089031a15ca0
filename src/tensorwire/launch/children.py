"""Child processes of a job: servers, and the coordinator if no launcher runs one.

The parent holds a pipe to each child's standard input. The pipe, and so the child, ends with the parent, however that
dies.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Mapping

from tensorwire._native import close_on_fork, forget_fd
from tensorwire.errors import ControlError
from tensorwire.launch.place import Place, worker_environment
from tensorwire.launch.start import module_command
from tensorwire.launch.stops import is_stopped

# What a child may take to leave after the job has ended.
LEAVE_SECONDS = 20.0


class Child:
    """A process on a leash."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        own: bool = False,
    ) -> None:
        self.process = subprocess.Popen(
            module_command(module, *arguments),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=own,
        )
        assert self.process.stdin is not None
        close_on_fork(self.process.stdin.fileno())  # else a data loader would hold the leash when we are gone

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Waits ``seconds`` for it to leave, then kills it; at once if it is stopped, and cannot. Idempotent."""
        try:
            self.process.wait(0.0 if is_stopped(self.process.pid) else seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None and not self.process.stdin.closed:
            forget_fd(self.process.stdin.fileno())
            self.process.stdin.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def on_parent_death(call: Callable[[], None]) -> None:
    """In a child on a leash: ``call()``, from a thread, when the parent is gone. Nothing for a process on none."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        call()

    threading.Thread(target=wait, name="tensorwire-leash", daemon=True).start()


def start_server(
    index: int,
    coordinator: str,
    secret: str,
    environment: Mapping[str, str] | None = None,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    own: bool = False,
) -> Child:
    """Server ``index`` of the job at ``coordinator``; ``own``: in a process group of its own."""
    base = environment if environment is not None else os.environ
    values = worker_environment(base, coordinator=coordinator, secret=secret, index=index)
    values.setdefault("OMP_NUM_THREADS", "1")
    return Child("tensorwire.launch.server_process", environment=values, stdout=stdout, stderr=stderr, own=own)


def start_coordinator(secret: str, place: Place, interface: str, port: int) -> tuple[Child, str]:
    """A coordinator as a process of its own, and its address. Raises `ControlError` if it cannot listen."""
    environment = worker_environment(os.environ, secret=secret)
    module, arguments = (
        "tensorwire.launch.coordinator_process",
        (place.workers, place.servers, interface, port, place.min_workers),
    )
    child = Child(module, *arguments, environment=environment, stdout=subprocess.PIPE)
    assert child.process.stdout is not None
    line = child.process.stdout.readline().decode().strip()
    if not line.startswith("listening "):
        child.close()
        raise ControlError(line or "the coordinator did not start")
    return child, line.removeprefix("listening ")
