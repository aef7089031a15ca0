"""NIXL over UCX: a one-sided write, polled until it is done: ``target|initiator DEVICE NBYTES``."""

from __future__ import annotations

import os
import sys

os.environ["UCX_TLS"] = "tcp,self" if sys.argv[2] == "tcp" else "sm,tcp,self"

import numpy as np
from lines import Lines, check, pattern, timed
from nixl_cu12._api import nixl_agent, nixl_agent_config


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    size = int(nbytes)
    memory = np.zeros(size, np.uint8)
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    here = [(memory.ctypes.data, size, 0)]
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    ours = agent.get_xfer_descs(here, "DRAM")
    theirs_at = lines.hello(f"{agent.get_agent_metadata().hex()} {agent.get_serialized_descs(ours).hex()}").split()
    partner = agent.add_remote_agent(bytes.fromhex(theirs_at[0]))
    theirs = agent.deserialize_descs(bytes.fromhex(theirs_at[1]))

    def repeat(count: int) -> None:
        for _ in range(count):
            state = agent.transfer(transfer)
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise SystemExit(f"a transfer ended as {state}")

    if role == "initiator":
        transfer = agent.initialize_xfer("WRITE", ours, theirs, partner)
    for run in lines.runs():
        if role == "target":
            check(memory, run.round)
            lines.answer()
        else:
            memory[:] = pattern(run.round, size)
            lines.answer(timed(run, repeat))


if __name__ == "__main__":
    main(*sys.argv[1:])
