"""The process that forks peers."""

from __future__ import annotations

import os
import signal

import pytest

from tensorwire.testing.forkserver import ForkServer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: of a fork beside threads
def test_it_ends_although_a_child_of_a_test_is_still_there() -> None:
    forkserver = ForkServer()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    try:
        forkserver.close()
        forkserver.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
