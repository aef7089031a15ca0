"""How the two processes of a benchmark meet under torch.distributed; ``lines`` are those to the benchmark."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc


def meet_by_gloo(lines: Any, *, target: bool) -> None:
    """The target is rank 0, the initiator rank 1."""
    if target:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        lines.hello(str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(lines.hello()), 2)
    dist.init_process_group("gloo", store=store, rank=0 if target else 1, world_size=2)


def meet_by_rpc(lines: Any, *, target: bool) -> None:
    """They call each other ``target`` and ``initiator``."""
    ours = "-"
    if target:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ours = str(free.getsockname()[1])
    theirs_at = lines.hello(ours)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{ours if target else theirs_at}")
    name, rank = ("target", 0) if target else ("initiator", 1)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
