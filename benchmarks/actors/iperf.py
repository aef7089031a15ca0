"""iperf3 as a contender: ``target|initiator NBYTES HOST``. A round sends COUNT times NBYTES by cubic, one way.

Word: ``bidir``, both ways at once; the slower one counts.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tensorwire.bench.actors.lines import Lines


def serve(lines: Lines, interface: str) -> None:
    """The server runs until the benchmark ends it."""
    command = ["iperf3", "--server", "--bind", interface, "--forceflush"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    _await(server)
    lines.hello(interface)
    for _ in lines.runs():
        _await(server)  # it takes one client at a time, and is not done when that one is
        lines.answer()


def _await(server: subprocess.Popen[str]) -> None:
    """Until the server listens, which it says before each client."""
    assert server.stdout is not None
    for line in server.stdout:
        if "listening" in line:
            return


def send(lines: Lines, nbytes: int) -> None:
    """A client a round; the time is what it reports of the bytes that were received."""
    interface = lines.hello()
    for run in lines.runs():
        total = nbytes * run.count
        command = ["iperf3", "--client", interface, "--bytes", str(total), "--congestion", "cubic", "--json"]
        if run.word:
            command.append(f"--{run.word}")
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        told = json.loads(done.stdout)
        if "error" in told:
            raise SystemExit(told["error"])
        received = [way for key, way in told["end"].items() if key.startswith("sum_received")]
        lines.answer(max(way["seconds"] * total / max(1, way["bytes"]) for way in received))


def main(role: str, nbytes: str, interface: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    if role == "target":
        serve(lines, interface)
    else:
        send(lines, int(nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
