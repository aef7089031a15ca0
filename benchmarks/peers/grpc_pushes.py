"""Small pushes to a store on gRPC: ``server|worker KEYS NBYTES HOST``. The server adds each to the array of its key.

One stream of raw bytes: a message is an operation, the first key, and one or more arrays for it and the keys after it.
One in 256 messages is answered, so that a worker is not ahead by more.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from queue import SimpleQueue

import grpc
import numpy as np
from grpc_store import OPTIONS, start

from tensorwire.bench.actors.lines import Lines, timed

PUSH, FLUSH, PULL = range(3)
_HEAD = struct.Struct("<II")
_LIST = 64
_AHEAD = 256  # messages between two answers


class Service(grpc.GenericRpcHandler):
    """The arrays, and one stream at a time."""

    def __init__(self, keys: int, nbytes: int) -> None:
        self._values = np.zeros((keys, nbytes // 4), np.float32)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self.apply)

    def apply(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        width = self._values.shape[1]
        for message in messages:
            operation, first = _HEAD.unpack_from(message)
            if operation == PUSH:
                pushed = np.frombuffer(message, np.float32, offset=_HEAD.size).reshape(-1, width)
                self._values[first : first + len(pushed)] += pushed
            else:
                yield self._values.tobytes() if operation == PULL else b"\1"


def serve(lines: Lines, keys: int, nbytes: int, interface: str) -> None:
    server = start(lines, Service(keys, nbytes), 2, interface)
    for _ in lines.runs():
        lines.answer()
    server.stop(None)


class Worker:
    """Pushes ones, and knows how many each key has got."""

    def __init__(self, keys: int, nbytes: int, address: str) -> None:
        self._outgoing: SimpleQueue[bytes] = SimpleQueue()
        channel = grpc.insecure_channel(address, options=OPTIONS)
        self._answers = channel.stream_stream("/store/push")(iter(self._outgoing.get, None))
        self._array = np.ones(nbytes // 4, np.float32)
        self._pushed = np.zeros(keys, np.float32)
        self._next = 0

    def run(self, count: int, word: str) -> None:
        """``list``: ``count`` lists, each a message; ``split``: a message per array of them; ``one``: arrays."""
        self._push(count * _LIST if word == "split" else count, _LIST if word == "list" else 1)

    def _push(self, count: int, at_once: int) -> None:
        """``count`` messages of so many arrays, each copied as it is pushed; returns when all have been applied."""
        arrays = [self._array.data.cast("B")] * at_once
        for number in range(1, count + 1):
            self._outgoing.put(b"".join((_HEAD.pack(PUSH, self._next), *arrays)))
            self._pushed[self._next : self._next + at_once] += 1
            self._next = (self._next + at_once) % len(self._pushed)
            if number % _AHEAD == 0 or number == count:
                self._ask(FLUSH)

    def check(self) -> None:
        """Raises `SystemExit` unless every push is in the values, once."""
        values = np.frombuffer(self._ask(PULL), np.float32).reshape(len(self._pushed), -1)
        if not np.array_equal(values, np.broadcast_to(self._pushed[:, None], values.shape)):
            raise SystemExit("the values that arrived are wrong")

    def _ask(self, operation: int) -> bytes:
        self._outgoing.put(_HEAD.pack(operation, 0))
        return next(self._answers)


def main(role: str, keys: str, nbytes: str, interface: str) -> None:
    lines = Lines()
    if role == "server":
        serve(lines, int(keys), int(nbytes), interface)
        return
    worker = Worker(int(keys), int(nbytes), lines.hello().split()[0])
    for run in lines.runs():
        seconds = timed(run, lambda count, word=run.word: worker.run(count, word))
        worker.check()
        lines.answer(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
