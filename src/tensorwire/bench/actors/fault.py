"""A victim that is killed or stopped, and a waiter that must learn of it.

Arguments: ``target|initiator DEVICE MIB CHILDREN HEARTBEAT LOST_AFTER``; the target is the victim. It may hold MIB of
touched memory, and CHILDREN that it forked and that outlive it, as a data loader's workers do. The waiter's answer is
the moment of its `PeerLost` on the machine's monotonic clock.
"""

from __future__ import annotations

import os
import select
import sys
import time

from tensorwire.bench.actors.lines import Lines
from tensorwire.bench.actors.transfer import SECONDS, TransferEnd, make_device
from tensorwire.errors import PeerLost


def fork_child() -> None:
    """A child that does nothing and ends with the benchmark."""
    if os.fork() == 0:
        end = select.poll()
        end.register(0, 0)  # a hang-up is always told
        end.poll()
        os._exit(0)


def main(role: str, kind: str, mib: str, children: str, heartbeat: str, lost_after: str) -> None:
    """The target is the victim; it ends when it is killed."""
    lines = Lines()
    with make_device(kind, heartbeat=float(heartbeat), lost_after=float(lost_after)) as device:
        end = TransferEnd(lines, device, 64)
        held = bytearray()
        if role == "target":
            held = bytearray(int(mib) << 20)
            held[::4096] = b"\1" * len(held[::4096])
            for _ in range(int(children)):
                fork_child()
        for _ in lines.runs():
            lines.answer()  # from here on a victim may die at any moment
            try:
                end.inbox.wait(end.word, 1, SECONDS, end.channel)
            except PeerLost:
                lines.answer(time.monotonic())


if __name__ == "__main__":
    main(*sys.argv[1:])
