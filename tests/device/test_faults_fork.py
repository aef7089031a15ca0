"""A fork at any moment: no child inherits a socket of a device."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from wire import DEVICES

InThread = Callable[[Callable[[], object]], threading.Thread]
FORKS = 30


def sockets() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            link = str(fd.readlink())
        except OSError:  # the listing's own
            continue
        if link.startswith("socket:"):
            found.add(link)
    return found


def test_no_fork_comes_between_a_socket_and_its_registration(far_kind: str, in_thread: InThread) -> None:
    """Connections come and go in one thread while another forks; each child looks at what it has got."""
    before = sockets()
    stop = threading.Event()
    with DEVICES[far_kind]() as device, DEVICES[far_kind]() as other:

        def connect() -> None:
            while not stop.is_set():
                other.connect(device.address).close()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        threads = [in_thread(connect) for _ in range(2)]
        try:
            for _ in range(FORKS):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    child = os.fork()
                if child == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    os._exit(1 if sockets() - before else 0)
                try:
                    status = os.waitpid(child, 0)[1]
                except BaseException:  # the test has run out of time
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    raise
                assert status == 0, "a child has a socket of its parent"
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            for thread in threads:
                thread.join()
