"""The ground that the other tests stand on: two devices, and packets between them that are really there."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.rdma.counters import rxe_packets, wire_bytes
from tests.rdma.wire import ADDRESSES

ROUNDS, SIZE = 100, 4096


def pingpong(*, server: str, client: str, address: str) -> None:
    """perftest's little sister, between two devices."""
    common = ("-g", "1", "-n", str(ROUNDS), "-s", str(SIZE), "-m", "4096")
    command = ["ibv_rc_pingpong", *common]
    with subprocess.Popen([*command, "-d", server], stdout=subprocess.DEVNULL) as listening:
        # Nothing tells that it listens, so the client asks until it does.
        while subprocess.run([*command, "-d", client, address], capture_output=True).returncode:
            assert listening.poll() is None
        assert listening.wait(60) == 0


def test_what_one_device_sends_the_other_crosses_the_cable() -> None:
    packets, sent = rxe_packets("rxa"), wire_bytes("va")
    pingpong(server="rxa", client="rxb", address=ADDRESSES[0])
    assert rxe_packets("rxa").sent - packets.sent >= ROUNDS
    assert wire_bytes("va").sent - sent.sent >= ROUNDS * SIZE


def test_memory_may_be_locked_without_a_limit() -> None:
    (line,) = [each for each in Path("/proc/self/limits").read_text().splitlines() if "locked memory" in each]
    assert line.split()[3:5] == ["unlimited", "unlimited"]
