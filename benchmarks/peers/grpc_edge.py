"""gRPC with the ends of ``bench edge``: ``target|initiator DEVICE NBYTES credits|flow``; the initiator produces.

A stream of messages of raw bytes, a tensor each, without protocol buffers, which would copy once more. ``credits``: a
byte is answered for each, and two are on their way at most, as with everybody. ``flow``: HTTP/2's flow control is all
that holds the producer back, so that many small tensors are on their way; an empty message behind them is answered.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import grpc
import torch
from grpc_store import OPTIONS, SWITCH_SECONDS, start

from tensorwire.bench.actors.edge_work import Summands, Sums
from tensorwire.bench.actors.lines import Lines, check, pattern, timed

DEPTH = 2


class Service(grpc.GenericRpcHandler):
    """Consumes what comes; keeps the latest message."""

    def __init__(self, nbytes: int, *, credits: bool) -> None:
        self.sums = Sums(nbytes // 4)
        self.latest = b""
        self._credits = credits

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        consume = self.keep if details.method == "/edge/transfer" else self.sum_up

        def receive(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            torch.set_num_threads(1)
            for message in messages:
                if message:
                    consume(message)
                if self._credits or not message:
                    yield b"\1"

        return grpc.stream_stream_rpc_method_handler(receive)

    def keep(self, message: bytes) -> None:
        self.latest = message

    def sum_up(self, message: bytes) -> None:
        self.latest = message
        self.sums.take(torch.frombuffer(message, dtype=torch.float32))


def serve(lines: Lines, nbytes: int, *, credits: bool) -> None:
    service = Service(nbytes, credits=credits)
    server = start(lines, service, 2, "127.0.0.1")
    for run in lines.runs():
        if run.word == "transfer":
            check(service.latest, run.round)
        else:
            service.sums.check(run.round, run.warm + run.count, service.latest)
        lines.answer()
    server.stop(None)


class Stream:
    """A stream of messages, and what is answered."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        self._parts: SimpleQueue[Iterable[bytes]] = SimpleQueue()
        self._answers = channel.stream_stream(method)(self._messages())

    def _messages(self) -> Iterator[bytes]:
        torch.set_num_threads(1)
        while True:
            yield from self._parts.get()

    def with_credits(self, produce: Callable[[], bytes], count: int) -> None:
        """Messages are made here: in gRPC's thread, which would wait for credits, they took longer."""
        for i in range(count):
            message = produce()
            if i >= DEPTH:
                next(self._answers)
            self._parts.put((message,))
        for _ in range(min(count, DEPTH)):
            next(self._answers)

    def by_flow(self, produce: Callable[[], bytes], count: int) -> None:
        """Messages are made in gRPC's thread, whenever it can send one."""
        self._parts.put(produce() for _ in range(count))
        self._parts.put((b"",))
        next(self._answers)


def send(lines: Lines, nbytes: int, *, credits: bool) -> None:
    channel = grpc.insecure_channel(lines.hello(), options=OPTIONS)
    streams = {word: Stream(channel, f"/edge/{word}") for word in ("transfer", "whole")}
    summands, out = Summands(nbytes // 4), torch.zeros(nbytes // 4)
    step = 0

    def produce() -> bytes:
        nonlocal step
        step += 1
        summands.add(step, out)
        return out.numpy().tobytes()

    for run in lines.runs():
        step = 0
        part = produce
        if run.word == "transfer":
            part = functools.partial(bytes, pattern(run.round, nbytes).tobytes())  # the same object, no copy
        else:
            summands.prepare(run.round)
        stream = streams[run.word]
        repeat = stream.with_credits if credits else stream.by_flow
        lines.answer(timed(run, functools.partial(repeat, part)))


def main(role: str, device: str, nbytes: str, mode: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a message is read-only, and only read
    sys.setswitchinterval(SWITCH_SECONDS)
    (serve if role == "target" else send)(Lines(), int(nbytes), credits=mode == "credits")


if __name__ == "__main__":
    main(*sys.argv[1:])
