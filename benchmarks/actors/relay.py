"""Stands for a program of another machine: ``target WHERE NAME ARGUMENTS...``. Lines go there and back."""

from __future__ import annotations

import os
import sys
import threading

from benchmarks.remote import call, pump


def main(role: str, where: str, *request: str) -> None:
    """Runs until either side ends."""
    with call(where, list(request)) as sock:
        thread = threading.Thread(target=pump, args=(0, sock.fileno(), sock), daemon=True)
        thread.start()
        pump(sock.fileno(), 1)
    os._exit(0)  # the thread may wait for a line that nobody will say


if __name__ == "__main__":
    main(*sys.argv[1:])
