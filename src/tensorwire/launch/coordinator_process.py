"""``python -m tensorwire.launch.coordinator_process WORKERS SERVERS HOST PORT MIN``: the coordinator as a process."""

from __future__ import annotations

import os
import signal
import sys

from tensorwire.control import Cause, Coordinator
from tensorwire.control.coordinator import SETTLE_SECONDS
from tensorwire.control.names import GONE
from tensorwire.control.settings import failure_times
from tensorwire.errors import TensorwireError
from tensorwire.launch.children import on_parent_death
from tensorwire.launch.scarce import as_out_of_memory
from tensorwire.store.versions.version_files import remove_left

# Members that do not leave after the end lose the connection, and end by that.
LEAVE_SECONDS = 15.0


def main(arguments: list[str]) -> int:
    """Runs until the job has ended and everybody has left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group: the workers say what it means
    workers, servers, interface, port = int(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    min_workers = int(arguments[4])
    secret = os.environ.pop("TENSORWIRE_SECRET").encode()
    try:
        beat, _, lost_after = failure_times(os.environ)
        with as_out_of_memory():
            coordinator = Coordinator(
                secret,
                workers=workers,
                servers=servers,
                interface=interface,
                port=port,
                beat=beat,
                lost_after=lost_after,
                min_workers=min_workers,
                on_loss=lambda loss: print(f"tensorwire: {loss}", file=sys.stderr, flush=True),
            )
    except TensorwireError as error:
        print(error, flush=True)
        return 1
    # Rank 0 started this process. If it dies before it joined, only the leash shows it.
    on_parent_death(lambda: coordinator.end(Cause("worker 0", GONE, settle=SETTLE_SECONDS)))
    print(f"listening {coordinator.address}", flush=True)
    coordinator.ended.wait()
    coordinator.empty.wait(LEAVE_SECONDS)
    coordinator.close()
    remove_left(coordinator.job)  # where a server was killed
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
