"""torch RPC (TensorPipe) with the ends of ``bench edge``: ``target|initiator DEVICE NBYTES``; the initiator produces.

A call a tensor, which is its argument; two calls are on their way.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from typing import Any

import torch
import torch.distributed.rpc as rpc

from tensorwire.bench.actors.ends import Summands, Sums
from tensorwire.bench.actors.lines import Lines, check, fill, timed

DEPTH = 2
received: dict[str, Any] = {}


def transfer(tensor: torch.Tensor, step: int) -> None:
    """Runs in the target."""
    received["latest"] = tensor


def whole(tensor: torch.Tensor, step: int) -> None:
    """Runs in the target. Calls may overtake each other."""
    received["sums"].take(tensor)
    if step == 1 or step > received["step"]:
        received["latest"], received["step"] = tensor, step


def serve(lines: Lines) -> None:
    for run in lines.runs():
        latest = received.pop("latest").numpy()
        if run.word == "transfer":
            check(latest, run.round)
        else:
            received["sums"].found.sort()
            received["sums"].check(run.round, run.warm + run.count, latest)
        lines.answer()


def send(lines: Lines, nbytes: int) -> None:
    summands, outs = Summands(nbytes // 4), [torch.zeros(nbytes // 4) for _ in range(DEPTH)]
    for run in lines.runs():
        step = 0
        if run.word == "whole":
            summands.prepare(run.round)
        else:
            for out in outs:
                fill(out.numpy(), run.round)

        def repeat(count: int, word: str = run.word) -> None:
            nonlocal step
            open_calls: deque[Any] = deque()
            for _ in range(count):
                if len(open_calls) == DEPTH:
                    open_calls.popleft().wait()
                step += 1
                out = outs[step % DEPTH]
                if word == "whole":
                    summands.add(step, out)
                open_calls.append(rpc.rpc_async("target", whole if word == "whole" else transfer, args=(out, step)))
            while open_calls:
                open_calls.popleft().wait()

        lines.answer(timed(run, repeat))


def main(role: str, device: str, nbytes: str) -> None:
    torch.set_num_threads(1)
    lines = Lines()
    target = role == "target"
    ours = "-"
    if target:
        received["sums"] = Sums(int(nbytes) // 4)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ours = str(free.getsockname()[1])
    told = lines.hello(ours)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{ours if target else told}")
    rpc.init_rpc(role, rank=0 if target else 1, world_size=2, rpc_backend_options=options)
    if target:
        serve(lines)
    else:
        send(lines, int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
