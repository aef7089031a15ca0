"""The link of requests between a worker and a server, which all its stores of keys and rows share."""

from __future__ import annotations

import os
import struct
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import Async, KeyValue, Sync
from tensorwire.store.request_link import (
    ENTRY,
    MOST_NUMBERS,
    MOST_OPTIONS,
    RequestOperation,
    pack_request,
    unpack_request,
)
from tensorwire.trace.push_fates import problems, read_fates
from tests.harness.jobs import run_job

STORES = 60


def test_a_request_comes_as_it_was_sent() -> None:
    room = memoryview(bytearray(ENTRY))
    for numbers in ((), (7,), tuple(range(MOST_NUMBERS))):
        options = bytes(range(8)) * (MOST_OPTIONS if numbers else 0)
        size = pack_request(room, RequestOperation.PUSH, 5, 3, options, numbers)
        assert size <= ENTRY
        assert unpack_request(room) == (RequestOperation.PUSH, 5, 3, options, numbers)


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (0, "4s", b"TWRS"),
        (4, "<H", 2),
        (6, "<H", 0),
        (6, "<H", 77),
        (20, "<I", 8 * MOST_OPTIONS + 8),
        (24, "<I", MOST_NUMBERS + 1),
    ],
)
def test_a_malformed_request_is_refused(at: int, form: str, value: object) -> None:
    room = memoryview(bytearray(ENTRY))
    pack_request(room, RequestOperation.PULL, 1, 0, bytes(8), (1,))
    unpack_request(room)
    struct.pack_into(form, room, at, value)
    with pytest.raises(errors.ProtocolError, match="malformed"):
        unpack_request(room)


# ---- many stores


def note_process(folder: str) -> None:
    Path(folder, "server").write_text(str(os.getpid()))


def make_many(job: tw.Job, folder: str) -> tuple[int, int]:
    """Threads of the server when it has a store of keys and one of rows, and when it has many."""
    seen = []
    stores = []
    for _ in range(STORES):
        kv = KeyValue(rule="sum")
        kv.init("a", np.ones(2, "f4"))
        kv.init_rows("t", (4, 2))
        kv.row_sparse_push("t", [1], np.ones((1, 2), "f4")).wait()
        assert kv.pushpull("a", np.ones(2, "f4")).wait()[0] == 1 + job.num_workers
        stores.append(kv)
        job.barrier()
        process = Path(folder, "server").read_text()
        seen.append(len(list(Path(f"/proc/{process}/task").iterdir())))
        job.barrier()
    for kv in stores:
        kv.close()
    return seen[0], seen[-1]


def test_stores_take_no_threads_of_a_server(tmp_path: Path) -> None:
    prepare = partial(note_process, str(tmp_path))
    for first, last in run_job(make_many, str(tmp_path), workers=2, prepare=prepare).ok():
        assert first == last


def wait_in_one(job: tw.Job) -> float:
    """While a push of one store waits for the other worker, requests of another store are done."""
    together, alone = KeyValue(Sync(), "sum"), KeyValue(Async(), "sum")
    for kv in (together, alone):
        kv.init("a", np.zeros(3, "f4"))
        kv.init_rows("t", (8, 2))
    if job.rank == 0:
        waiting = [
            together.row_sparse_push("t", [1], np.ones((1, 2), "f4")),
            together.row_sparse_pull("t", [1]),
            together.pushpull("a", np.ones(3, "f4")),
        ]
        for _ in range(100):  # more than a ring has places
            alone.row_sparse_push("t", [1], np.ones((1, 2), "f4")).wait()
            alone.pushpull("a", np.ones(3, "f4")).wait()
        assert not any(handle.done for handle in waiting)
        job.barrier()
        results = [handle.wait() for handle in waiting]
        np.testing.assert_array_equal(results[1], np.full((1, 2), 2))
        np.testing.assert_array_equal(results[2], np.full(3, 2))
    else:
        job.barrier()
        together.row_sparse_push("t", [1], np.ones((1, 2), "f4"))
        together.push("a", np.ones(3, "f4")).wait()
    job.barrier()
    return float(alone.pull("a").wait()[0])


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_store_that_waits_holds_no_other_up(device: str) -> None:
    assert run_job(wait_in_one, device=device).ok() == [100, 100]


# ---- a request that is interrupted


class Stop(Exception):
    """What a signal's handler may raise."""


def interrupt_one(job: tw.Job, at: str) -> None:
    """Of two stores on the same links one is interrupted in the middle of a request; the other goes on."""
    broken, whole = KeyValue(Async(), "sum"), KeyValue(Async(), "sum")
    for kv in (broken, whole):
        kv.init("a", np.zeros(3, "f4"))
    whole.pushpull("a", np.ones(3, "f4")).wait()

    def stop(*arguments: object, **more: object) -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"tensorwire.store.request_link.{at}", stop)
        with pytest.raises(Stop):
            broken.push("a", np.ones(3, "f4"))
    with pytest.raises(errors.StepInterrupted):
        broken.push("a", np.ones(3, "f4"))
    assert [float(whole.pushpull("a", np.ones(3, "f4")).wait()[0]) for _ in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("at", ["pack_request", "Producer.send"])
def test_an_interrupted_request_leaves_the_link_to_other_stores(at: str) -> None:
    ended = run_job(interrupt_one, at, workers=1, device="shm")
    assert "StepInterrupted: a push of keys was interrupted by Stop" in ended.errors[0].splitlines()[-1]


def ended_late() -> None:
    """A server is slow to end a store, when the worker that has finished it may already leave."""
    from tensorwire.store.request_server import RequestServer

    finish = RequestServer._finish

    def later(self: RequestServer, number: int, worker: int) -> None:
        if self._member.client.ended.wait(1.0):
            threading.Event().wait(1.0)  # this server's other threads end meanwhile
        finish(self, number, worker)

    RequestServer._finish = later  # type: ignore[method-assign]


def push_and_leave(job: tw.Job) -> None:
    kv = KeyValue(Async(), "sum")
    kv.init("w", np.zeros(3))
    kv.push("w", np.ones(3))


def test_a_server_ends_its_record_before_the_last_worker_leaves(tmp_path: Path) -> None:
    run_job(push_and_leave, workers=1, servers=1, fates=tmp_path, prepare=ended_late).ok()
    assert problems(read_fates([tmp_path])) == []
