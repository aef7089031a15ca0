"""Mooncake's transfer engine over tcp: a synchronous write: ``target|initiator DEVICE NBYTES``."""

from __future__ import annotations

import sys

import numpy as np
from lines import Lines, check, pattern, timed
from mooncake.engine import TransferEngine


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    size = int(nbytes)
    memory = np.zeros(size, np.uint8)
    address = memory.ctypes.data
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(address, size):
        raise SystemExit("the engine does not start")
    port, there = map(int, lines.hello(f"{engine.get_rpc_port()} {address}").split())

    def repeat(count: int) -> None:
        for _ in range(count):
            if engine.transfer_sync_write(f"127.0.0.1:{port}", address, there, size):
                raise SystemExit("a write failed")

    for run in lines.runs():
        if role == "target":
            check(memory, run.round)
            lines.answer()
        else:
            memory[:] = pattern(run.round, size)
            lines.answer(timed(run, repeat))


if __name__ == "__main__":
    main(*sys.argv[1:])
