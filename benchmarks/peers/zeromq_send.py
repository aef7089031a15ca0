"""ZeroMQ: a message from a DEALER to a ROUTER, and one byte back: ``target|initiator DEVICE NBYTES``."""

from __future__ import annotations

import sys

import zmq
from lines import Lines, check, pattern, timed


def serve(lines: Lines, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """What arrives stays in ZeroMQ's own buffer, as a user of it would leave it."""
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    lines.hello(str(port))
    for run in lines.runs():
        for _ in range(run.warm + run.count):
            who, frame = router.recv_multipart(copy=False)
            router.send_multipart([who, b"\1"], copy=False)
        check(frame.buffer, run.round)
        lines.answer()


def send(lines: Lines, context: zmq.Context[zmq.Socket[bytes]], nbytes: int) -> None:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{lines.hello()}")
    small = nbytes < 65536
    for run in lines.runs():
        source = pattern(run.round, nbytes)

        def repeat(count: int, source: object = source) -> None:
            for _ in range(count):
                dealer.send(source, copy=small)
                dealer.recv()

        lines.answer(timed(run, repeat))


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    context = zmq.Context()
    if role == "target":
        serve(lines, context)
    else:
        send(lines, context, int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
