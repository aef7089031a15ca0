"""torch.distributed's gloo: send and receive, and one byte back: ``target|initiator DEVICE NBYTES``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from lines import Lines, check, pattern, timed
from meeting import meet_by_gloo


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    target = role == "target"
    meet_by_gloo(lines, target=target)
    tensor, back = torch.zeros(int(nbytes), dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)

    def receive(count: int) -> None:
        for _ in range(count):
            dist.recv(tensor, 1)
            dist.send(back, 1)

    def send(count: int) -> None:
        for _ in range(count):
            dist.send(tensor, 0)
            dist.recv(back, 0)

    for run in lines.runs():
        if target:
            receive(run.warm + run.count)
            check(tensor.numpy(), run.round)
            lines.answer()
        else:
            tensor[:] = torch.from_numpy(pattern(run.round, int(nbytes)))
            lines.answer(timed(run, send))


if __name__ == "__main__":
    main(*sys.argv[1:])
