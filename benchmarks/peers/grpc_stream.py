"""gRPC: a stream of messages of bytes, one byte back for each: ``target|initiator DEVICE NBYTES``.

Python's gRPC without protocol buffers, which would copy once more; the benchmark tunes its malloc.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from lines import Lines, check, pattern, timed

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Service(grpc.GenericRpcHandler):
    """Keeps the latest message."""

    latest = b""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self.receive)

    def receive(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            self.latest = message
            yield b"\1"


def serve(lines: Lines) -> None:
    service = Service()
    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    lines.hello(str(port))
    for run in lines.runs():
        check(service.latest, run.round)
        lines.answer()


def send(lines: Lines, nbytes: int) -> None:
    channel = grpc.insecure_channel(f"127.0.0.1:{lines.hello()}", options=OPTIONS)
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers = channel.stream_stream("/bench/send")(iter(outgoing.get, None))
    for run in lines.runs():
        source = pattern(run.round, nbytes).tobytes()

        def repeat(count: int, source: bytes = source) -> None:
            for _ in range(count):
                outgoing.put(source)
                next(answers)

        lines.answer(timed(run, repeat))


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    if role == "target":
        serve(lines)
    else:
        send(lines, int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
