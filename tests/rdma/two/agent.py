"""The second guest: does what the tests in the first one tell it, one call at a time.

Both are one test's own, and trust each other, which is why multiprocessing's connections will do between them.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

from tensorwire.testing.peer import Peer
from tensorwire.testing.spec import DeviceSpec
from tests.rdma.two.roles import Roles, warm
from tests.rdma.wire import FAR

PORT = 29700
KEY = b"of one test"
AGAIN_SECONDS = 0.2


class Agent:
    """What the second guest can be told to do; each method is a call."""

    def __init__(self) -> None:
        self._roles = Roles()
        self._peers: list[Peer] = []

    def warm(self) -> None:
        """Imports what workers need, once."""
        warm()

    def start_worker(self, *arguments: Any) -> None:
        """One worker of a job; see ``Roles``."""
        self._roles.start_worker(*arguments)

    def worker_ended(self, index: int = 0) -> int | None:
        """Waits for its end; its exit code."""
        return self._roles.ended(index)

    def worker_results(self) -> list[tuple[str, Any]]:
        """Each worker's error, and what it returned."""
        return self._roles.results()

    def start_peer(self, spec: str) -> bytes:
        """A process with a device; its address."""
        self._peers.append(Peer(DeviceSpec(spec)))
        return self._peers[-1].address

    def call_peer(self, command: str, *arguments: Any) -> Any:
        """What that process is to do; see ``tensorwire.testing.peer``."""
        return self._peers[-1].call(command, *arguments)

    def kill_peer(self) -> None:
        """SIGKILL; it has ended when this returns."""
        self._peers[-1].kill()

    def close_peer(self) -> None:
        """Ends it, if it is still there."""
        self._peers.pop().close()

    def run(self, *command: str) -> str:
        """A program's output."""
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def serve(pipe: Connection) -> None:
    """Until the other end closes."""
    agent = Agent()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, name, arguments = pipe.recv()
            try:
                answer = (number, "returned", getattr(agent, name)(*arguments))
            except Exception as error:
                answer = (number, "raised", f"{error!r} in the second guest\n{traceback.format_exc()}")
            pipe.send(answer)


def main() -> None:
    """The first guest may boot later, so this asks until it is there."""
    while True:
        try:
            pipe = Client((FAR[0], PORT), authkey=KEY)
        except OSError:
            select.select([], [], [], AGAIN_SECONDS)
        else:
            return serve(pipe)


if __name__ == "__main__":
    main()
