"""``--link RATE``: a cable of a known rate, made of two network namespaces, a veth pair and a token bucket at each end.

Against iperf3 on the same cable, in the same run. Both use cubic, so that the congestion control is not what differs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import ACTORS
from tensorwire.bench.compare import Workload
from tensorwire.bench.programs import OURS, Contender, Place, actor, uninterrupted
from tensorwire.bench.records import Record, Target, size_text
from tensorwire.bench.show import Notes
from tensorwire.errors import Unsupported

# Settings of the token bucket at which the rate is stable.
RATES = {
    "100mbit": ("rate", "100mbit", "burst", "32kb", "limit", "256kb"),
    "1gbit": ("rate", "1gbit", "burst", "128kb", "limit", "1mb"),
    "10gbit": ("rate", "10gbit", "burst", "1mb", "limit", "4mb"),
}
BOTH_WAYS = {"100mbit": 0.95, "1gbit": 0.95, "10gbit": 0.90}
ADDRESSES = ("10.213.8.1", "10.213.8.2")
NBYTES = 16 * 2**20  # of a write
Places = tuple[Place, ...]


@contextlib.contextmanager
def cable(rate: str) -> Iterator[Places]:
    """Two network namespaces with such a cable between them; gone at the end, whatever happens.

    Raises `Unsupported` where it cannot be made.
    """
    if os.geteuid() != 0:
        raise Unsupported("network namespaces need root")
    for program in ("ip", "tc", "iperf3"):
        if shutil.which(program) is None:
            raise Unsupported(f"needs {program}: apt install iproute2 iperf3")
    tag = secrets.token_hex(3)
    names = (f"tw-bench-{tag}-0", f"tw-bench-{tag}-1")
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _do("ip", "-n", name, "link", "set", device, "up")
            _do("tc", "-n", name, "qdisc", "add", "dev", "cable", "root", "tbf", *RATES[rate])
        with _cubic_allowed():
            for name in names:
                setting = "echo cubic > /proc/sys/net/ipv4/tcp_congestion_control"
                _do("ip", "netns", "exec", name, "sh", "-c", setting)
        yield tuple((("ip", "netns", "exec", name), host) for name, host in zip(names, ADDRESSES, strict=True))
    finally:
        with uninterrupted():
            for name in names:
                # Out of reach of a second Ctrl-C, too.
                command = ["ip", "netns", "del", name]
                subprocess.run(command, capture_output=True, check=False, start_new_session=True)


@contextlib.contextmanager
def _cubic_allowed() -> Iterator[None]:
    """A namespace may only choose from the machine's list; so cubic is put on it for this moment."""
    path = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    allowed = path.read_text().split()
    if "cubic" in allowed:
        yield
        return
    try:
        path.write_text(" ".join([*allowed, "cubic"]))
    except OSError as error:
        raise Unsupported(f"this kernel has no congestion control cubic: {error.strerror}") from None
    try:
        yield
    finally:
        path.write_text(" ".join(allowed))


def over_each(rates: Sequence[str], notes: Notes, measure: Callable[[str, Places], list[Record]]) -> list[Record]:
    """What is measured over a cable of each rate; one that cannot be made is skipped with a note."""
    found: list[Record] = []
    for rate in rates:
        try:
            with cable(rate) as places:
                found += measure(rate, places)
        except Unsupported as error:
            notes.skip(f"--link {rate}: {error}")
    return found


def workloads(rate: str, places: Places) -> list[Workload]:
    """Writes one way, and both ways at once; each against one-way iperf3."""
    made = []
    for mode, share in (("one-way", 0.97), ("both-ways", BOTH_WAYS[rate])):
        ours = Contender(OURS, across(places, actor("transfer"), "tcp", NBYTES, mode))
        theirs = iperf(places, NBYTES, both_ways=mode == "both-ways")
        title = f"tcp over a link of {rate}, writes of {size_text(NBYTES)}, {mode}"
        target = Target(shares={"iperf3": share})
        made.append(Workload("device", "tcp", title, NBYTES, mode, (ours, *theirs), ("iperf3",), target))
    return made


def iperf(places: Places, nbytes: int, *, both_ways: bool) -> tuple[Contender, ...]:
    """iperf3 one way, and what it does ``both_ways`` itself: what the processors allow there."""
    commands = across(places, actor("iperf", ACTORS), nbytes)
    alone = Contender("iperf3", commands)
    return (alone, Contender("iperf3 --bidir", commands, word="bidir")) if both_ways else (alone,)


def across(places: Places, program: tuple[str, ...], *arguments: object) -> tuple[tuple[str, ...], ...]:
    """The commands of a target at the first end and an initiator at the second; each gets its address at the end."""
    ends = zip(("target", "initiator"), places, strict=True)
    return tuple((*prefix, *program, role, *map(str, arguments), host) for role, (prefix, host) in ends)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unsupported(f"{' '.join(command[:3])}: {done.stderr.strip() or done.returncode}")
