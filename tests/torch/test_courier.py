"""The thread that takes gradients away."""

from __future__ import annotations

import gc
import threading

import pytest

from tensorwire.errors import PeerLost, WaitTimeout
from tensorwire.testing.patience import patient
from tensorwire.torch.courier import Courier


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tensorwire-push"]


def test_jobs_are_done_in_order_on_another_thread_that_ends() -> None:
    courier = Courier()
    courier.drain(0)
    assert not threads()
    done: list[tuple[int, bool]] = []
    here = threading.get_ident()
    for i in range(100):
        courier.take(lambda i=i: done.append((i, threading.get_ident() == here)))
    courier.drain(30)
    assert done == [(i, False) for i in range(100)]
    courier.close(30)
    courier.close(30)
    assert not threads()


def test_an_error_comes_out_as_it_is_and_stops_what_follows() -> None:
    courier = Courier()
    done: list[int] = []
    begin = threading.Event()
    courier.take(begin.wait)
    courier.take(lambda: (_ for _ in ()).throw(PeerLost("server 0 is gone")))
    courier.take(lambda: done.append(1))
    begin.set()
    for _ in range(2):
        with pytest.raises(PeerLost, match="server 0 is gone"):
            courier.drain(30)
        with pytest.raises(PeerLost):
            courier.take(lambda: done.append(2))
    courier.close(30)
    assert done == []
    assert not threads()


def test_a_job_that_hangs_is_told() -> None:
    courier = Courier()
    release = threading.Event()
    courier.take(release.wait)
    with pytest.raises(WaitTimeout):
        courier.drain(0)
    release.set()
    courier.drain(30)
    courier.close(30)


def test_a_thread_that_nobody_ends_ends_with_its_courier() -> None:
    courier = Courier()
    courier.take(lambda: None)
    (thread,) = threads()
    del courier
    gc.collect()
    thread.join(patient(30))
    assert not thread.is_alive()
