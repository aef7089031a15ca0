"""torch RPC (TensorPipe) with the ends of ``bench edge``: ``target|initiator DEVICE NBYTES``; the initiator produces.

A call a tensor, which is its argument; two calls are on their way.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
import torch.distributed.rpc as rpc
from meeting import meet_by_rpc

from tensorwire.bench.actors.edge_work import Summands, Sums
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
    if target:
        received["sums"] = Sums(int(nbytes) // 4)
    meet_by_rpc(lines, target=target)
    if target:
        serve(lines)
    else:
        send(lines, int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
