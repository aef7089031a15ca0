"""``python -m tests.rdma.two.reaching ADDRESS SECRET INDEX``: joins a job as that worker, with what ``auto`` takes,
writes to the other one, and prints by which device, and why."""

from __future__ import annotations

import sys

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import RemoteRegion
from tensorwire.device.verbs.ports import scan_ports
from tests.rdma.wire import FAR

SECONDS = 60.0


def reach(address: str, secret: str, index: int) -> str:
    """The route, once both ends have heard from each other."""
    scan_ports()  # what a machine's first member loads, before anything is timed
    member = Member(address, secret.encode(), "worker", index, interface=FAR[index])
    try:
        channel = member.channel(member_name("worker", 1 - index))
        word = channel.device.allocate(8)
        member.client.publish(f"word {index}", word.remote().pack())
        there = RemoteRegion.unpack(member.client.lookup(f"word {1 - index}", SECONDS))
        channel.signal(there.view(), 7).wait(SECONDS)
        word.wait(0, 7, SECONDS, channel)
        member.client.barrier("done", 2, SECONDS)
        return str(member.routes[f"worker {1 - index}"])
    finally:
        member.close()


if __name__ == "__main__":
    print(reach(sys.argv[1], sys.argv[2], int(sys.argv[3])))
