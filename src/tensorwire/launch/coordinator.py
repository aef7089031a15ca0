"""``python -m tensorwire.launch.coordinator WORKERS SERVERS HOST PORT``: the coordinator as a process of its own."""

from __future__ import annotations

import os
import signal
import sys

from tensorwire.control import Coordinator
from tensorwire.errors import TensorwireError

# Members that do not leave after the end lose the connection, and end by that.
LEAVE_SECONDS = 15.0
JOIN_SECONDS = 300.0


def main(arguments: list[str]) -> int:
    """Runs until the job has ended and everybody has left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group: the workers say what it means
    workers, servers, host, port = int(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    secret = os.environ.pop("TENSORWIRE_SECRET").encode()
    try:
        coordinator = Coordinator(secret, workers=workers, servers=servers, host=host, port=port)
    except TensorwireError as error:
        print(error, flush=True)
        return 1
    print(f"listening {coordinator.address}", flush=True)
    while not coordinator.ended.wait(JOIN_SECONDS):
        if not coordinator.members:
            break
    coordinator.empty.wait(LEAVE_SECONDS)
    coordinator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
