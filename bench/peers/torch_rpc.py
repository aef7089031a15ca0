"""torch RPC (TensorPipe): a call with a tensor as its argument: ``target|initiator DEVICE NBYTES``."""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed.rpc as rpc
from lines import Lines, check, pattern, timed

received: list[torch.Tensor] = []


def receive(tensor: torch.Tensor) -> None:
    """Runs in the target."""
    received[:] = [tensor]


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    target = role == "target"
    ours = "-"
    if target:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ours = str(free.getsockname()[1])
    told = lines.hello(ours)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{ours if target else told}")
    rpc.init_rpc(role, rank=0 if target else 1, world_size=2, rpc_backend_options=options)
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
