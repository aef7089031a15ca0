"""Two guests on one cable, which is a pair of sockets between their emulators."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.rdma.kernel import Image
from tests.rdma.machine import Job, Machine, Output

Line = Callable[[str, str], None]  # a guest's name, and a line it wrote


@contextlib.contextmanager
def started(image: Image, jobs: Sequence[Job], line: Line) -> Iterator[list[Machine]]:
    """Both guests, booting; they are gone at the end. Every line that one writes goes to ``line``."""
    with contextlib.ExitStack() as stack:
        ends = socket.socketpair()
        for end in ends:
            stack.callback(end.close)
        machines = []
        for job, end in zip(jobs, ends, strict=True):
            wired = replace(job, wire=end.fileno())
            machines.append(stack.enter_context(Machine(image, wired, _by_lines(job.name, line))))
        for end in ends:
            end.close()
        yield machines


def run(image: Image, jobs: Sequence[Job], seconds: float) -> int:
    """Runs both to their end, and shows what they write; the first status that is not 0."""
    with started(image, jobs, show) as machines:
        statuses = [machine.wait(seconds) for machine in machines]
    return next((status for status in statuses if status), 0)


def show(name: str, line: str) -> None:
    """A line of a guest, with its name before it."""
    os.write(1, f"{name} | {line}\n".encode())


def _by_lines(name: str, line: Line) -> Output:
    """Cuts both streams of a guest into lines."""
    rest: dict[str, bytes] = {}
    lock = threading.Lock()

    def output(stream: str, data: bytes) -> None:
        with lock:
            *whole, rest[stream] = (rest.get(stream, b"") + data).split(b"\n")
            for each in whole:
                line(name, each.decode(errors="replace"))

    return output
