"""One server's share of one store: waits for the workers' rounds, applies the rule, publishes the new version."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tensorwire.control import Member
from tensorwire.device import Channel, Device, Region, RemoteRegion
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import OutOfMemory, PlanMismatch, ProtocolError, WaitTimeout
from tensorwire.observe import spans
from tensorwire.observe.spans import clock
from tensorwire.store.agreement import agreed
from tensorwire.store.plan import Plan
from tensorwire.store.rounds import Head, Operation, head_bytes, unpack_head
from tensorwire.store.rules import OptimizerRule, versions
from tensorwire.store.state import answer_asks, take_state
from tensorwire.store.wiring import WORD, Inbox, ServerDoor, StoreSpec, WorkerDoor, inbox, together_word

_PATIENCE = 60.0  # between looks at the job while workers compute


class _Worker:
    """What this server shares with one worker: its inbox here, its version words there."""

    def __init__(self, server: StoreServer, index: int) -> None:
        self.index = index
        self.channel = server.member.channel("worker", index)
        self.layout: Inbox = inbox(server.plan, server.index, len(server.spec.numeric))
        self.inbox = self.channel.device.allocate(self.layout.nbytes)
        self.memory = memoryview(self.inbox)
        start = self.layout.slots
        buckets = server.plan.buckets[server.index]
        self.slots = [self.memory[start + b.shard : start + b.shard + b.nbytes] for b in buckets]
        size = head_bytes(len(server.spec.numeric), len(server.spec.tensors))
        head = self.memory[self.layout.head : self.layout.head + size]
        self.head = Consumer(self._word(self.layout.head_word), slots=[head])
        self.pushes = [Consumer(self._word(self.layout.word(b.index)), slots=[self.slots[b.index]]) for b in buckets]
        self.pulls: list[Producer] = []
        self.together: Producer

    def _word(self, offset: int) -> Word:
        return Word(self.inbox, offset, self.channel)

    def open(self, server: StoreServer, door: WorkerDoor) -> None:
        """Makes the way back: a version word a bucket, and the bytes too where the worker cannot look at ours."""
        versions = RemoteRegion.unpack(door.versions)
        target = None if door.parameters is None else RemoteRegion.unpack(door.parameters)
        source = None if target is None else server.source_on(self.channel)
        self.together = Producer(self.channel, versions.view(together_word(len(server.plan.buckets[server.index])), 8))
        for b in server.plan.buckets[server.index]:
            arrival = versions.view(WORD * b.index, 8)
            if target is None or source is None:
                self.pulls.append(Producer(self.channel, arrival))
            else:
                slots = [target.view(b.space, b.nbytes)]
                self.pulls.append(Producer(self.channel, arrival, slots=slots, source=[source.view(b.shard, b.nbytes)]))


class StoreServer:
    """Serves its shard of the store ``name`` to all workers until they finish."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, workers: int, servers: int) -> None:
        self.member, self.name, self.spec, self.index = member, name, spec, member.index
        if spec.versions != versions():
            raise PlanMismatch(
                f"the workers run {spec.versions}, server {self.index} {versions()}: install one everywhere"
            )
        self.plan: Plan = spec.plan(servers)
        check_memory(self.plan.registered_bytes(self.index, workers), f"server {self.index}")
        self._regions: dict[str, Region] = {}
        self.parameters = self._allocate_parameters(workers)
        self.workers = [_Worker(self, w) for w in range(workers)]
        for worker in self.workers:
            shown = self.parameters.remote("read").pack() if worker.channel.device is self.parameters.device else b""
            door = ServerDoor(worker.inbox.remote("write").pack(), shown)
            member.client.publish(
                f"{name}/server {self.index}/worker {worker.index}",
                msgspec.msgpack.encode(door),
                to=[f"worker {worker.index}"],
            )
        for worker in self.workers:
            key = f"{name}/worker {worker.index}/server {self.index}"
            worker.open(self, msgspec.msgpack.decode(member.client.lookup(key, timeout=600.0), type=WorkerDoor))
        self.rule = OptimizerRule(spec, self.plan, self.index, memoryview(self.parameters), workers)
        self._active = list(range(workers))  # who takes part in rounds
        self.step = 0  # rounds begun
        self.updates = 0  # rounds that were steps of the training

    def _allocate_parameters(self, workers: int) -> Region:
        """On a device whose memory workers can map, if any worker is reached that way."""
        devices: list[Device] = [self.member.channel("worker", w).device for w in range(workers)]
        best = next((d for d in devices if d.capabilities.maps), devices[0])
        return best.allocate(self.plan.shard_bytes[self.index])

    def source_on(self, channel: Channel) -> Region:
        """The parameters as a source for writes on that channel's device."""
        device = channel.device
        if device is self.parameters.device:
            return self.parameters
        if device.name not in self._regions:
            self._regions[device.name] = device.register(self.parameters)
        return self._regions[device.name]

    def run(self) -> None:
        """Round after round, until every worker has finished."""
        threading.Thread(target=answer_asks, args=(self,), name=f"{self.name} asks", daemon=True).start()
        while True:
            self.step += 1
            heads = self._take_part()
            if not heads:
                self._rejoin()
                continue
            operation = self._agree(heads)
            if operation is Operation.FINISH:
                return
            if operation is Operation.ASSIGN:
                self._assign()
            elif operation is Operation.LOAD:
                self._load()
            else:
                self._update(heads)
                self.updates += 1

    def _head(self, worker: _Worker) -> Head:
        block = self._receive(worker.head)
        head = unpack_head(block, len(self.spec.numeric), len(self.spec.tensors))
        if head.step != self.step:
            raise ProtocolError(f"worker {worker.index} sent the head of round {head.step} in round {self.step}")
        return head

    def _receive(self, edge: Consumer) -> memoryview:
        """Waits as long as the job lives: how long workers compute is theirs to say, and they have a timeout."""
        while True:
            try:
                slot = edge.receive(self.step, _PATIENCE)
            except WaitTimeout:
                self.member.check()
                continue
            assert slot is not None
            return slot

    def _take_part(self) -> dict[int, Head]:
        """The heads of the workers that take part in this round: those that are not idle."""
        heads = {w: self._head(self.workers[w]) for w in self._active}
        self._active = [w for w in self._active if heads[w].operation is not Operation.IDLE]
        return {w: heads[w] for w in self._active}

    def _agree(self, heads: Mapping[int, Head]) -> Operation:
        idle = [w.index for w in self.workers if w.index not in heads]
        return agreed({w: head.operation for w, head in heads.items()}, idle, self.updates)

    def _rejoin(self) -> None:
        """All are idle: this round moves nothing, and from the next on all take part again."""
        for bucket in range(len(self.plan.buckets[self.index])):
            self._publish(bucket)
        for worker in self.workers:
            worker.together.send(self.step)
        self._active = list(range(len(self.workers)))

    def _assign(self) -> None:
        for bucket, push in enumerate(self.workers[0].pushes):
            self.rule.assign(bucket, self._receive(push))
            self._publish(bucket)

    def _load(self) -> None:
        take_state(self)
        for bucket in range(len(self.plan.buckets[self.index])):
            self._publish(bucket)

    def _update(self, heads: Mapping[int, Head]) -> None:
        self.rule.set_options(heads[self._active[0]].options)
        nothing = bytes(len(self.spec.tensors))
        present = [heads[w.index].present if w.index in heads else nothing for w in self.workers]
        for bucket in range(len(self.plan.buckets[self.index])):
            for w in self._active:
                self._receive(self.workers[w].pushes[bucket])
            ready = clock()
            self.rule.update(bucket, [w.slots[bucket] for w in self.workers], present)
            spans.add("update", self.step, ready, clock())
            self._publish(bucket)

    def _publish(self, bucket: int) -> None:
        for worker in self.workers:
            pull = worker.pulls[bucket]
            if not pull.mapped:
                pull.slot(self.step)  # the last version's bytes have left
            pull.send(self.step)

    def close(self) -> None:
        """Frees the store's memory."""
        for worker in self.workers:
            worker.inbox.close()
        for region in self._regions.values():
            region.close()
        self.parameters.close()


def check_memory(nbytes: int, who: str) -> None:
    """Refuses a plan that does not fit the machine, before step 1. Raises `OutOfMemory`."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if nbytes > available:
                raise OutOfMemory(
                    f"{who} would register {nbytes / 2**20:.0f} MiB, and this machine has {available / 2**20:.0f} MiB "
                    "free: use more servers on other machines, or fewer workers a server"
                )
