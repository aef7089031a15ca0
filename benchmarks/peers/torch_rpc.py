"""torch RPC (TensorPipe): a call with a tensor as its argument: ``target|initiator DEVICE NBYTES``."""

from __future__ import annotations

import sys

import torch
import torch.distributed.rpc as rpc
from lines import Lines, check, pattern, timed
from meeting import meet_by_rpc

received: list[torch.Tensor] = []


def receive(tensor: torch.Tensor) -> None:
    """Runs in the target."""
    received[:] = [tensor]


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    target = role == "target"
    meet_by_rpc(lines, target=target)
    for run in lines.runs():
        if target:
            check(received[0].numpy(), run.round)
            lines.answer()
            continue
        tensor = torch.from_numpy(pattern(run.round, int(nbytes)))

        def repeat(count: int, tensor: torch.Tensor = tensor) -> None:
            for _ in range(count):
                rpc.rpc_sync("target", receive, args=(tensor,))

        lines.answer(timed(run, repeat))


if __name__ == "__main__":
    main(*sys.argv[1:])
