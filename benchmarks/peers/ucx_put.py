"""UCX by its own ``ucx_perftest``: ``target|initiator DEVICE NBYTES``.

A put that the other side sees, half of a ping-pong. Both ends poll. It checks no values.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from lines import Lines

TRIES = 200


def main(role: str, device: str, nbytes: str) -> None:
    lines = Lines()
    port = "-"
    if role == "target":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
    theirs_at = lines.hello(port)
    environment = {**os.environ, "UCX_TLS": "tcp,self" if device == "tcp" else "posix,self", "UCX_LOG_LEVEL": "fatal"}
    server = ["ucx_perftest", "-t", "ucp_put_lat", "-s", nbytes, "-p", port if role == "target" else theirs_at]
    for run in lines.runs():
        command = [*server, "-n", str(run.count), "-w", str(run.warm)]
        if role == "target":
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
            lines.answer()
            continue
        for _ in range(TRIES):  # until the other one listens
            client = [command[0], "127.0.0.1", *command[1:], "-f", "-v"]
            done = subprocess.run(
                client, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                break
            time.sleep(0.02)
        else:
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        names, figures = (line.split(",") for line in done.stdout.strip().splitlines()[-2:])
        lines.answer(float(dict(zip(names, figures, strict=True))["overall_lat"]) * 1e-6 * run.count)


if __name__ == "__main__":
    main(*sys.argv[1:])
