"""A process that has imported the peers' modules and forks on request, so that a peer costs milliseconds.

It never makes a device itself, so its children inherit no half-alive part of the library.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tensorwire.launch.start import module_command

_MOST_SPEC = 4096


class ForkServer:
    """The test's side; the process ends when this does."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        # The tests' own path, so that a device of theirs is found; no threads of a numeric library, which fork badly.
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            command = module_command(__name__, theirs.fileno())
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def fork(self, spec: str, fd: int) -> tuple[int, int]:
        """A process that serves ``fd`` with the device ``spec``; its pid, and a pidfd that is the caller's to close."""
        socket.send_fds(self._socket, [spec.encode()], [fd])
        data, fds, _, _ = socket.recv_fds(self._socket, 8, 1)
        if not fds:
            raise RuntimeError("the process that forks the peers has died; its message is above")
        return int.from_bytes(data, "little"), fds[0]

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.shutdown(socket.SHUT_RDWR)  # a child of a test may have inherited it
        self._socket.close()
        self._process.wait()


@functools.cache
def forkserver() -> ForkServer:
    """The one of this process."""
    return ForkServer()


def main() -> None:
    """Runs in the forkserver, and in everything that it forks."""
    from tensorwire.testing import peer

    sock = socket.socket(fileno=int(sys.argv[1]))
    while True:
        spec, fds, _, _ = socket.recv_fds(sock, _MOST_SPEC, 1)
        if not fds:
            return
        while reap():
            pass
        pid = os.fork()
        if pid == 0:
            sock.close()
            peer.serve(spec.decode(), fds[0])
            return
        os.close(fds[0])
        pidfd = os.pidfd_open(pid)  # nobody but us can reap it, so it is there
        socket.send_fds(sock, [pid.to_bytes(8, "little")], [pidfd])
        os.close(pidfd)


def reap() -> bool:
    """Takes note of one child that ended; whether there was one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    # A user's Ctrl-C goes to the whole group; peers have Python's own handler, and the tests send it to them by pid.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        pass
