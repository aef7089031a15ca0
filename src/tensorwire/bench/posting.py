"""``bench posting``: what the verbs device costs before the NIC has a request, on a NIC that does nothing.

Beside it the same work requests made and posted by hand with ``ibverbs``: less is not possible in Python.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from tensorwire.bench import nonic
from tensorwire.bench.compare import Samples, Settings, Workload, records
from tensorwire.bench.programs import OURS, Contender
from tensorwire.bench.records import Record, Target
from tensorwire.device import Channel, Device, RemoteView, VerbsDevice, View
from tensorwire.device.verbs import library
from tensorwire.observe import counters

NBYTES = 4096
BATCH = 64
_OPERATIONS = 512  # of a round
_BY_HAND = "ibverbs alone"
Round = Callable[[], float]  # seconds an operation


class Bench:
    """A channel between two devices of this process, on queue pairs that answer at once."""

    def __init__(self, device: Device, other: Device, channel: Channel) -> None:
        self.channel = channel
        self.queue_pair = nonic.QueuePair.made[0]  # the initiator makes its own first
        self.source, self.target = device.allocate(NBYTES), other.allocate(NBYTES + 64)
        remote = self.target.remote()
        self.payload: tuple[View, RemoteView] = self.source.view(), remote.view(0, NBYTES)
        self.small: tuple[View, RemoteView] = self.source.view(0, 8), remote.view(0, 8)
        self.word = remote.view(NBYTES, 8)

    def posted(self) -> float:
        """From the call of ``write``, with a signal, to the queue pair."""
        taken = []
        for value in range(1, _OPERATIONS + 1):
            start = time.perf_counter_ns()
            done = self.channel.write(*self.payload, (self.word, value))
            taken.append(self.queue_pair.posted - start)
            done.wait()
        return statistics.median(taken) * 1e-9

    def posted_by_hand(self) -> float:
        """The same two work requests."""
        ib, pair = library.load(), self.queue_pair
        place, (_, there) = self.source.address, self.payload
        address, key, taken = there.region.address, there.region.key, []
        for value in range(1, _OPERATIONS + 1):
            start = time.perf_counter_ns()
            requests: list[Any] = [
                ib.SendWR(value, [ib.SGE(place, NBYTES, lkey=1)], 0, 0, address, key),
                ib.SendWR(value, [ib.SGE(place, 8, lkey=1)], 0, 8, address + NBYTES, key),
            ]
            pair.post_send(requests)
            taken.append(pair.posted - start)
        return statistics.median(taken) * 1e-9

    def one_by_one(self) -> float:
        """Small writes, each posted alone."""
        start = time.perf_counter()
        for _ in range(_OPERATIONS // BATCH):
            for _ in range(BATCH):
                done = self.channel.write(*self.small)
            done.wait()
        return (time.perf_counter() - start) / _OPERATIONS

    def batched(self) -> float:
        """The same, posted together."""
        start = time.perf_counter()
        for _ in range(_OPERATIONS // BATCH):
            with self.channel.batch():
                for _ in range(BATCH):
                    done = self.channel.write(*self.small)
            done.wait()
        return (time.perf_counter() - start) / _OPERATIONS


def measure(settings: Settings) -> list[Record]:
    """In this process, on the first core. Raises `VerbsUnavailable` without the package ``ibverbs``."""
    os.sched_setaffinity(0, settings.cores[:1])
    nonic.install()
    with VerbsDevice() as device, VerbsDevice() as other, device.connect(other.address) as channel:
        bench = Bench(device, other, channel)
        rows: list[tuple[str, int, str, dict[str, Round], Target | None]] = [
            ("write + signal to the queue pair", NBYTES, "posted", _beside(bench), Target(3e-6)),
            ("writes of 8 B", 8, "one-by-one", {OURS: bench.one_by_one}, None),
            (f"writes of 8 B, {BATCH} at a time", 8, "batched", {OURS: bench.batched}, None),
        ]
        samples = [{name: Samples() for name in rounds} for *_, rounds, _ in rows]
        for number in range(settings.rounds + 1):
            for (*_, rounds, _), measured in zip(rows, samples, strict=True):
                for name, repeat in rounds.items():
                    before = counters.snapshot()
                    seconds = repeat()
                    if number:  # the first one warms up
                        measured[name].seconds.append(seconds)
                        since = counters.since(before)
                        measured[name].counts = {
                            "copies": since.copies,
                            "rpcs": 0,
                            "registrations": since.registrations,
                        }
    made: list[Record] = []
    for (title, nbytes, mode, rounds, target), measured in zip(rows, samples, strict=True):
        contenders = tuple(Contender(name, ()) for name in rounds)
        workload = Workload("posting", "verbs", title, nbytes, mode, contenders, (_BY_HAND,), target)
        made += records(workload, measured, {name: name for name in rounds})
    return made


def _beside(bench: Bench) -> dict[str, Round]:
    return {OURS: bench.posted, _BY_HAND: bench.posted_by_hand}
