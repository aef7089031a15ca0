"""The threads that move gradients and values."""

from __future__ import annotations

import gc
import threading

import pytest

from tensorwire.errors import PeerLost, WaitTimeout
from tensorwire.testing.patience import patient
from tensorwire.torch.transfer_thread import TransferThread


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tensorwire-push"]


def test_jobs_are_done_in_order_on_another_thread_that_ends() -> None:
    thread = TransferThread("tensorwire-push")
    thread.drain(0)
    assert not threads()
    done: list[tuple[int, bool]] = []
    here = threading.get_ident()
    for i in range(100):
        thread.submit(lambda i=i: done.append((i, threading.get_ident() == here)))
    thread.drain(30)
    assert done == [(i, False) for i in range(100)]
    thread.close(30)
    thread.close(30)
    assert not threads()


def test_an_error_comes_out_as_it_is_and_stops_what_follows() -> None:
    thread = TransferThread("tensorwire-push")
    done: list[int] = []
    begin = threading.Event()
    thread.submit(begin.wait)
    thread.submit(lambda: (_ for _ in ()).throw(PeerLost("server 0 is gone")))
    thread.submit(lambda: done.append(1))
    begin.set()
    for _ in range(2):
        with pytest.raises(PeerLost, match="server 0 is gone"):
            thread.drain(30)
        with pytest.raises(PeerLost):
            thread.submit(lambda: done.append(2))
    thread.close(30)
    assert done == []
    assert not threads()


def test_a_job_that_hangs_is_reported() -> None:
    thread = TransferThread("tensorwire-push")
    release = threading.Event()
    thread.submit(release.wait)
    with pytest.raises(WaitTimeout):
        thread.drain(0)
    release.set()
    thread.drain(30)
    thread.close(30)


def test_a_thread_that_nobody_ends_ends_with_its_thread() -> None:
    thread = TransferThread("tensorwire-push")
    thread.submit(lambda: None)
    (its,) = threads()
    del thread
    gc.collect()
    its.join(patient(30))
    assert not its.is_alive()
