"""Versions for readers that ask for them, and beside iperf3: arguments are those of ``bench.actors.version``.

More states of the worker: ``asked`` makes a version whenever the reader asks. More of what readers do: ``new`` asks for
a version and reads it; ``new-module`` asks for one, and stages and commits it; ``iperf`` has iperf3 send as many bytes.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import tensorwire as tw
from tensorwire.bench.actors import store_job, version
from tensorwire.bench.actors.job_folder import FolderReader
from tensorwire.bench.actors.lines import Lines, Run
from tensorwire.bench.actors.version import Trainer, clocked

_LOCAL = "127.0.0.1"
_WORD = 8  # bytes of a version's counter
_TRIES = 100  # to reach an iperf3 that may still be busy with the client before


def serve(trainer: Trainer, listener: socket.socket) -> None:
    """Makes a version whenever the reader asks for one."""
    asking, _ = listener.accept()
    asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asking.recv(1):
        asking.sendall(trainer.publish().to_bytes(_WORD, "little"))


class AskingReader(FolderReader):
    """It also asks for versions. ``trainer``: where; ``host``: where iperf3 listens."""

    def __init__(self, address: str, trainer: str, host: str) -> None:
        super().__init__(address, "")
        self._host, self._nbytes = host, sum(tensor.nbytes for tensor in self.mine.values())
        self._pauses: list[float] = []
        where, port = trainer.split(":")
        self._asking = socket.create_connection((where, int(port)))
        self._asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, run: Run, what: str) -> dict[str, float]:
        """A round; ``pause``: how long an operation changes the tensors."""
        self._pauses.clear()
        told = super().run(run, what)
        return {**told, "pause": statistics.mean(self._pauses or [told["seconds"] / run.count])}

    def operation(self, what: str) -> Callable[[], float]:
        """See above."""
        kinds = {"new": self._new, "new-module": self._new_module}
        if what == "iperf":
            return self._iperf
        return (lambda: clocked(kinds[what])) if what in kinds else super().operation(what)

    def _ask(self) -> int:
        self._asking.sendall(b"?")
        return int.from_bytes(self._asking.recv(_WORD, socket.MSG_WAITALL), "little")

    def _new(self) -> None:
        counter = self._ask()
        self._pauses.append(clocked(lambda: self.reader.pull(counter, into=self.mine)))

    def _new_module(self) -> None:
        self.reader.load_into(self.module, self._ask())
        self._pauses.append(self.reader.seconds["pause"])

    def _iperf(self) -> float:
        told: dict[str, Any] = {}
        options = ["--reverse", "--bytes", str(self._nbytes), "--congestion", "cubic", "--json"]
        for _ in range(_TRIES):
            command = ["iperf3", "--client", self._host, *options]
            told = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
            if "error" not in told:
                received = told["end"]["sum_received"]
                return float(received["seconds"] * self._nbytes / max(1, received["bytes"]))
        raise SystemExit(str(told["error"]))


def main(role: str, index: str, device: str, nbytes: str, tensors: str, readers: str, host: str) -> None:
    """Runs until its input ends."""
    if role == "server":
        version.main(role, index, device, nbytes, tensors, readers, host)
    torch.set_num_threads(1)
    lines = Lines()
    if role == "worker":
        listener = socket.create_server((host, 0))
        store_job.join(lines, 0, "auto", 1, 1, f"{host}:{listener.getsockname()[1]}")
        trainer = Trainer(tw.init(), int(nbytes), int(tensors))
        threading.Thread(target=serve, args=(trainer, listener), daemon=True).start()
        if host != _LOCAL:
            subprocess.Popen(["iperf3", "--server", "--bind", host], stdin=subprocess.DEVNULL, stdout=2)
        for run in lines.runs():
            lines.answer(**trainer.meanwhile(lines, run.word.split(":")[0]))
    else:
        os.environ["TENSORWIRE_DEVICE"] = device
        address, trainer_address, *_ = lines.hello().split()
        reader = AskingReader(address, trainer_address, host)
        for run in lines.runs():
            lines.answer(**reader.run(run, run.word.split(":")[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
