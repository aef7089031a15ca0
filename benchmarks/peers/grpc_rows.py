"""A table on gRPC, to which rows are added: ``server|worker 0 ROWS``. Messages are raw bytes, each row once."""

from __future__ import annotations

import sys

import grpc
import numpy as np
from grpc_store import OPTIONS, start

from benchmarks.actors.table_rows import BATCH, WIDTH, Batches
from tensorwire.bench.actors.lines import Lines, timed

_ROW = 4 + 4 * WIDTH  # bytes of a number and its row


class Table(grpc.GenericRpcHandler):
    """Rows, and the two calls."""

    def __init__(self, rows: int) -> None:
        self._rows = np.zeros((rows, WIDTH), np.float32)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.pull if details.method.endswith("pull") else self.push)

    def pull(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        return self._rows[np.frombuffer(message, np.uint32)].tobytes()

    def push(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        count = len(message) // _ROW
        rows = np.frombuffer(message, np.float32, offset=4 * count).reshape(count, WIDTH)
        self._rows[np.frombuffer(message, np.uint32, count)] += rows
        return b""


def work(lines: Lines, rows: int) -> None:
    """Pulls batches of random rows and pushes ones to them, as Tensorwire's program does."""
    channel = grpc.insecure_channel(lines.hello().split()[0], options=OPTIONS)
    pull, push = channel.unary_unary("/store/pull"), channel.unary_unary("/store/push")
    batches, ones = Batches(rows), np.ones((BATCH, WIDTH), np.float32).tobytes()

    def pulled(indices: np.ndarray) -> np.ndarray:
        return np.frombuffer(pull(indices.astype(np.uint32).tobytes()), np.float32).reshape(-1, WIDTH)

    def exchange(count: int) -> None:
        for _ in range(count):
            indices = batches.next()
            pulled(indices)
            push(indices.astype(np.uint32).tobytes() + ones)

    for run in lines.runs():
        seconds = timed(run, exchange)
        batches.check(pulled)
        lines.answer(seconds)


def main(role: str, index: str, rows: str, *_: str) -> None:
    lines = Lines()
    if role == "worker":
        work(lines, int(rows))
        return
    server = start(lines, Table(int(rows)), 2, "127.0.0.1")
    for _ in lines.runs():
        lines.answer()
    server.stop(None)


if __name__ == "__main__":
    main(*sys.argv[1:])
