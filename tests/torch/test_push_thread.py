"""The thread that takes gradients away."""

from __future__ import annotations

import gc
import threading

import pytest

from tensorwire.errors import PeerLost, WaitTimeout
from tensorwire.testing.patience import patient
from tensorwire.torch.push_thread import PushThread


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tensorwire-push"]


def test_jobs_are_done_in_order_on_another_thread_that_ends() -> None:
    push_thread = PushThread()
    push_thread.drain(0)
    assert not threads()
    done: list[tuple[int, bool]] = []
    here = threading.get_ident()
    for i in range(100):
        push_thread.submit(lambda i=i: done.append((i, threading.get_ident() == here)))
    push_thread.drain(30)
    assert done == [(i, False) for i in range(100)]
    push_thread.close(30)
    push_thread.close(30)
    assert not threads()


def test_an_error_comes_out_as_it_is_and_stops_what_follows() -> None:
    push_thread = PushThread()
    done: list[int] = []
    begin = threading.Event()
    push_thread.submit(begin.wait)
    push_thread.submit(lambda: (_ for _ in ()).throw(PeerLost("server 0 is gone")))
    push_thread.submit(lambda: done.append(1))
    begin.set()
    for _ in range(2):
        with pytest.raises(PeerLost, match="server 0 is gone"):
            push_thread.drain(30)
        with pytest.raises(PeerLost):
            push_thread.submit(lambda: done.append(2))
    push_thread.close(30)
    assert done == []
    assert not threads()


def test_a_job_that_hangs_is_reported() -> None:
    push_thread = PushThread()
    release = threading.Event()
    push_thread.submit(release.wait)
    with pytest.raises(WaitTimeout):
        push_thread.drain(0)
    release.set()
    push_thread.drain(30)
    push_thread.close(30)


def test_a_thread_that_nobody_ends_ends_with_its_push_thread() -> None:
    push_thread = PushThread()
    push_thread.submit(lambda: None)
    (thread,) = threads()
    del push_thread
    gc.collect()
    thread.join(patient(30))
    assert not thread.is_alive()
