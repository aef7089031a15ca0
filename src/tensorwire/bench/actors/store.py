"""Tensorwire's store: ``server|worker INDEX WORKLOAD RULE DEVICE WORKERS SERVERS HOST``.

Server 0 holds the coordinator. Words: ``copied``, gradients are copied from private memory into their slots; ``born``,
they lie there already. ``push`` and ``pull`` time worker 0 alone, whose gradients are born: the server answers when the
last worker has pushed, so while the others wait for worker 0, only its push is on its way, and then only its pull.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

import msgspec
import torch

from tensorwire.bench.actors.expected_values import (
    LEARNING_RATE,
    Expected,
    check_gradient,
    digest,
    flat,
    put,
    put_start,
    sgd,
)
from tensorwire.bench.actors.lines import Lines, Run, timed
from tensorwire.bench.actors.store_job import join_as_server
from tensorwire.bench.actors.transfer import SECONDS, counts, since
from tensorwire.control import Member
from tensorwire.models import Model, find
from tensorwire.observe import counters
from tensorwire.store.admission import versions
from tensorwire.store.server import StoreServer
from tensorwire.store.sharding import BUCKET_BYTES, Bucket
from tensorwire.store.step_header import StepOperation
from tensorwire.store.store_client import StoreClient, agree
from tensorwire.store.store_layout import StoreSpec

_NAME = "store/0"
_NUMERIC = [(0, "lr", -1)]


def spec_of(model: Model, rule: str) -> StoreSpec:
    """The store of a model."""
    options = sgd([torch.nn.Parameter(torch.zeros(1))]).defaults
    return StoreSpec(versions(), list(model.tensors), rule, [dict(options)], _NUMERIC, BUCKET_BYTES, False)


class Server:
    """Serves in a thread of its own; a store that fails ends the process."""

    def __init__(self, member: Member, servers: int) -> None:
        self._member, self._servers = member, servers
        self._store: StoreServer | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        try:
            spec = msgspec.msgpack.decode(self._member.client.lookup(_NAME, SECONDS), type=StoreSpec)
            self._store = StoreServer(self._member, _NAME, spec, self._servers, self._member.index)
            self._store.run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def check(self, round: int) -> None:
        """Raises `SystemExit` unless the round's gradients lie in the slots."""
        assert self._store is not None
        shard = self._store.shard
        for worker in shard.workers.values():
            for bucket, slot in zip(shard.plan.buckets[shard.index], worker.slots, strict=True):
                for piece in bucket.pieces:
                    values = flat(slot, piece.stop - piece.start, piece.offset)
                    check_gradient(values, piece.tensor, worker.index, round)


class Gradients:
    """One worker's gradients: private ones, and the views of the slots that they are copied to or born in."""

    def __init__(self, client: StoreClient, worker: int) -> None:
        self._client, self._worker = client, worker
        self._private = [torch.zeros(t.elements) for t in client.plan.tensors]
        self._slots = [self._views(b) for b in client.order]

    def _views(self, bucket: Bucket) -> list[torch.Tensor]:
        memory = self._client.memory(bucket)
        return [flat(memory, p.stop - p.start, p.offset) for p in bucket.pieces]

    def assign(self) -> None:
        """The store's parameters become those that training begins with."""
        for i, tensor in enumerate(self._private):
            put_start(tensor, i)
        self._client.begin(StepOperation.ASSIGN, [0.0])
        if self._worker == 0:
            self._push(copied=True)
        self._client.wait()

    def prepare(self, round: int, word: str) -> None:
        """Puts the round's gradients where they are to be."""
        for i, tensor in enumerate(self._private):
            put(tensor, i, self._worker, round)
        if word != "copied":
            for bucket, slots in zip(self._client.order, self._slots, strict=True):
                for piece, slot in zip(bucket.pieces, slots, strict=True):
                    slot.copy_(self._private[piece.tensor][piece.start : piece.stop])

    def push(self, *, copied: bool) -> None:
        """Opens a step and sends every bucket."""
        self._client.begin(StepOperation.UPDATE, [LEARNING_RATE])
        self._push(copied=copied)

    def _push(self, *, copied: bool) -> None:
        client = self._client
        for bucket in client.order:
            client.slot(bucket)
            for number, piece in enumerate(bucket.pieces) if copied else ():
                client.copy(bucket, number, self._private[piece.tensor][piece.start : piece.stop])
            client.push(bucket)


class StoreWorker:
    """Pushes and pulls in rounds."""

    def __init__(self, member: Member, model: Model, rule: str, workers: int, servers: int) -> None:
        self._member, self._workers = member, workers
        spec = spec_of(model, rule)
        plan = spec.plan(servers)
        agree(member, _NAME, spec, plan, workers)
        self._client = client = StoreClient(member, _NAME, spec, plan)
        self._gradients = Gradients(client, member.index)
        self._gradients.assign()
        window = memoryview(client.windows[0])
        tensors, offsets = client.plan.tensors, client.plan.offsets
        self._parameters = [flat(window, t.elements, o) for t, o in zip(tensors, offsets, strict=True)]
        self._expected = Expected(model, workers, rule)
        self._met = 0
        self._moves = 0 if member.channel("server 0").device.capabilities.maps else model.nbytes

    def run(self, run: Run) -> float:
        """One round; returns its seconds, or 0 for a worker whose time does not count."""
        self._gradients.prepare(run.round, run.word)
        before = counters.snapshot()
        seconds = self._seconds(run)
        steps = run.warm + run.count
        if counters.since(before).bytes < self._moves * steps:
            raise SystemExit("not every gradient was sent")
        self._expected.went(run.round, steps)
        self._expected.check(self._parameters)
        return seconds

    def values(self) -> int:
        """What tells these parameters from others."""
        return digest(self._parameters)

    def _seconds(self, run: Run) -> float:
        if run.word not in ("push", "pull"):
            return timed(run, lambda count: self._steps(count, copied=run.word == "copied"))
        step = self._alone if self._member.index == 0 else self._behind
        for _ in range(run.warm):
            step()
        return sum(step()[run.word] for _ in range(run.count))

    def _steps(self, count: int, *, copied: bool) -> None:
        for _ in range(count):
            self._gradients.push(copied=copied)
            self._client.wait()

    def _alone(self) -> dict[str, float]:
        """Pushes while no other does, then pulls when all others have pushed."""
        start = time.perf_counter()
        self._gradients.push(copied=False)
        self._client.flush(SECONDS)
        pushed = time.perf_counter()
        self._meet()
        begun = time.perf_counter()
        self._client.wait()
        return {"push": pushed - start, "pull": time.perf_counter() - begun}

    def _behind(self) -> dict[str, float]:
        """The others' part of it."""
        self._meet()
        self._gradients.push(copied=False)
        self._client.wait()
        return {"push": 0.0, "pull": 0.0}

    def _meet(self) -> None:
        self._met += 1
        self._member.client.barrier(f"met/{self._met}", self._workers, SECONDS)


def serve(lines: Lines, index: int, device: str, workers: int, servers: int, interface: str) -> None:
    """A server's rounds; it is asked about each when the workers have answered."""
    member = join_as_server(lines, index, device, workers, servers, interface)
    server = Server(member, servers)
    before = counts()
    for run in lines.runs():
        server.check(run.round)
        lines.answer(**since(before))
        before = counts()


def work(
    lines: Lines, index: int, model: Model, rule: str, device: str, workers: int, servers: int, interface: str
) -> None:
    """A worker's rounds."""
    secret, address = os.environ["TENSORWIRE_SECRET"].encode(), lines.hello().split()[0]
    member = Member(address, secret, "worker", index, device=device, interface=interface)
    worker = StoreWorker(member, model, rule, workers, servers)
    for run in lines.runs():
        before = counts()
        seconds = worker.run(run)
        lines.answer(seconds, values=worker.values(), **since(before))


def main(
    role: str, index: str, workload: str, rule: str, device: str, workers: str, servers: str, interface: str
) -> None:
    """Runs until its input ends."""
    torch.set_num_threads(1)
    lines, job = Lines(), (device, int(workers), int(servers), interface)
    if role == "server":
        serve(lines, int(index), *job)
    else:
        work(lines, int(index), find(workload), rule, *job)


if __name__ == "__main__":
    main(*sys.argv[1:])
