"""A table on gRPC, to which rows are added: ``server|worker ROWS HOST``.

A call for rows sends their numbers and gets the rows; a push sends numbers and rows, and is answered when the server
has added them. Messages are raw bytes, each row once, as ours.
"""

from __future__ import annotations

import sys

import grpc
import numpy as np
from grpc_store import OPTIONS, start

from tensorwire.bench.actors.lines import Lines, timed
from tensorwire.bench.actors.table_rows import BATCH, WIDTH, Batches

_ROW = 4 + 4 * WIDTH  # bytes of a number and its row


class Service(grpc.GenericRpcHandler):
    """The table, and two calls."""

    def __init__(self, rows: int) -> None:
        self._table = np.zeros((rows, WIDTH), np.float32)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.pull if details.method.endswith("pull") else self.push)

    def pull(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        return self._table[np.frombuffer(message, np.uint32)].tobytes()

    def push(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        count = len(message) // _ROW
        rows = np.frombuffer(message, np.float32, offset=4 * count).reshape(count, WIDTH)
        self._table[np.frombuffer(message, np.uint32, count)] += rows
        return b""


def serve(lines: Lines, rows: int, interface: str) -> None:
    server = start(lines, Service(rows), 2, interface)
    for _ in lines.runs():
        lines.answer()
    server.stop(None)


class Worker:
    """Pulls batches of random rows and pushes ones to them, as ours."""

    def __init__(self, rows: int, address: str) -> None:
        channel = grpc.insecure_channel(address, options=OPTIONS)
        self._pull, self._push = channel.unary_unary("/store/pull"), channel.unary_unary("/store/push")
        self.batches = Batches(rows)
        self._ones = np.ones((BATCH, WIDTH), np.float32)

    def pull(self, indices: np.ndarray) -> np.ndarray:
        found = self._pull(indices.astype(np.uint32).tobytes())
        return np.frombuffer(found, np.float32).reshape(-1, WIDTH)

    def run(self, count: int) -> None:
        for _ in range(count):
            indices = self.batches.next()
            self.pull(indices)
            self._push(b"".join((indices.astype(np.uint32).tobytes(), self._ones.data.cast("B"))))


def main(role: str, rows: str, interface: str) -> None:
    lines = Lines()
    if role == "server":
        serve(lines, int(rows), interface)
        return
    worker = Worker(int(rows), lines.hello().split()[0])
    for run in lines.runs():
        seconds = timed(run, worker.run)
        worker.batches.check(worker.pull)
        lines.answer(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
