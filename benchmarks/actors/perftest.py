"""perftest as a contender: ``target|initiator TOOL NBYTES WHOLE HOST``. A round is one run of its tool.

``TOOL`` is ``ib_write_bw`` (a stream of writes of ``NBYTES``; an operation is ``WHOLE`` bytes of it) or
``ib_write_lat`` (a ping-pong). ``HOST``: this end's own address; the RDMA port is the one that Tensorwire would take.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from tensorwire.bench.actors.lines import Lines, Run
from tensorwire.device.verbs.port_selection import select_port
from tensorwire.device.verbs.ports import scan_ports

_LEAST = 5  # iterations that the tools do
_SECONDS = 60.0  # for the other end to listen


@dataclass(frozen=True)
class Work:
    """What a round repeats: ``tool`` with messages of ``nbytes``; ``whole`` bytes count as one operation."""

    tool: str
    nbytes: int
    whole: int

    def messages(self, run: Run) -> int:
        """Of a round; both ends come to the same number."""
        return max(_LEAST, run.count * self.whole // self.nbytes)


def command(work: Work, run: Run, interface: str, port: int) -> list[str]:
    """The tool on the port that Tensorwire takes."""
    choice = select_port(scan_ports(), near=interface)
    device = ["-d", choice.port.device, "-i", str(choice.port.number), "-x", str(choice.gid.index)]
    return [work.tool, *device, "-s", str(work.nbytes), "-n", str(work.messages(run)), "-p", str(port), "-F"]


def serve(lines: Lines, work: Work, interface: str) -> None:
    """A server a round, on a port that was free before the first one."""
    with socket.create_server((interface, 0), family=socket.AF_INET6 if ":" in interface else socket.AF_INET) as free:
        port = free.getsockname()[1]
    lines.hello(f"{interface} {port}")
    for run in lines.runs():
        _run(command(work, run, interface, port))
        lines.answer()


def send(lines: Lines, work: Work, interface: str) -> None:
    """A client a round; the seconds are those that it reports."""
    there, port = lines.hello().split()
    for run in lines.runs():
        text = _insist([*command(work, run, interface, int(port)), there])
        lines.answer(run.count * seconds(work, text))


def seconds(work: Work, text: str) -> float:
    """Of one operation, from the tool's table: its last line that begins with the size."""
    rows = [line.split() for line in text.splitlines()]
    (*_, row) = [row for row in rows if row[:1] == [str(work.nbytes)]]
    if work.tool == "ib_write_bw":
        if not float(row[3]):  # it counts cycles of the processor; seen where an emulator's went astray
            raise SystemExit(f"{work.tool}: it reports a rate of {row[3]}; run it again")
        return work.whole / (float(row[3]) * 2**20)  # the average, in MiB a second
    return 2 * float(row[4]) * 1e-6  # microseconds of half a round trip, the typical one


def _insist(arguments: list[str]) -> str:
    """Nothing tells when the other end listens: it is asked until it does."""
    end = time.monotonic() + _SECONDS
    while True:
        try:
            return _run(arguments)
        except SystemExit:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments[0]}: {(done.stderr or done.stdout).strip()[-300:] or done.returncode}")
    return done.stdout


def main(role: str, tool: str, nbytes: str, whole: str, interface: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    (serve if role == "target" else send)(lines, Work(tool, int(nbytes), int(whole)), interface)


if __name__ == "__main__":
    main(*sys.argv[1:])
