"""One server's share of one store: waits for the workers' rounds, applies the rule, publishes the new version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tensorwire._native import available_bytes
from tensorwire.control import Member
from tensorwire.device import Channel, Device, Region, RemoteRegion
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import OutOfMemory, PlanMismatch, ProtocolError, WaitTimeout
from tensorwire.observe import spans
from tensorwire.observe.spans import clock
from tensorwire.store.consensus import agreed
from tensorwire.store.ready_queue import ReadyQueue
from tensorwire.store.rules import make_rule, versions
from tensorwire.store.sameness import Sameness
from tensorwire.store.server_state import take_state
from tensorwire.store.sharding import StorePlan
from tensorwire.store.step_header import (
    LEFT_OUT,
    NORM,
    STEPS,
    StepHeader,
    StepOperation,
    clipping,
    header_bytes,
    unpack_header,
)
from tensorwire.store.store_layout import Inbox, Outbox, ServerEndpoint, StoreSpec, WorkerEndpoint, inbox

_PATIENCE = 60.0  # between looks at the job while workers compute


class _Worker:
    """What this server shares with one worker: its inbox here, its version words there."""

    def __init__(self, server: StoreServer, index: int) -> None:
        self.index = index
        self.name = f"worker {index}"
        self.channel = server.member.channel("worker", index)
        self.layout: Inbox = inbox(server.plan, server.index, len(server.spec.numeric))
        self.inbox = self.channel.device.allocate(self.layout.nbytes)
        self.memory = memoryview(self.inbox)
        buckets = server.plan.buckets[server.index]
        gradients = self.memory[self.layout.slots :]
        self.slots = [gradients[b.shard : b.shard + b.nbytes] for b in buckets]
        self.present = [self.memory[start : start + nbytes] for start, nbytes in self.layout.present]
        self.head = self._consumer(self.layout.head_word, self.layout.head, header_bytes(len(server.spec.numeric)))
        self.norm = self._consumer(self.layout.norm_word, self.layout.norm, NORM.size)
        self.pushes = [Consumer(self._word(self.layout.word(b.index)), slots=[self.slots[b.index]]) for b in buckets]
        self.pulls: list[Producer] = []
        self.norm_back: Producer
        self.together: Producer

    def _word(self, offset: int) -> Word:
        return Word(self.inbox, offset, self.channel)

    def _consumer(self, word: int, offset: int, nbytes: int) -> Consumer:
        return Consumer(self._word(word), slots=[self.memory[offset : offset + nbytes]])

    def open(self, server: StoreServer, endpoint: WorkerEndpoint) -> None:
        """Makes the way back: a version word a bucket, and the bytes too where the worker cannot look at ours."""
        words = RemoteRegion.unpack(endpoint.versions)
        buckets = server.plan.buckets[server.index]
        layout = Outbox(len(buckets))
        target = None if endpoint.parameters is None else RemoteRegion.unpack(endpoint.parameters)
        source = None if target is None else server.source_on(self.channel)
        shard, space = server.plan.shard_bytes[server.index], server.plan.space_bytes
        for b in buckets:
            arrival = words.view(layout.word(b.index), 8)
            if target is None or source is None:
                self.pulls.append(Producer(self.channel, arrival))
                continue
            buffers = range(server.spec.buffers)
            slots = [target.view(i * space + b.space, b.nbytes) for i in buffers]
            views = [source.view(i * shard + b.shard, b.nbytes) for i in buffers]
            label = f"{self.name}, bucket {b.index}"
            self.pulls.append(Producer(self.channel, arrival, slots=slots, source=views, label=label))
        if not buckets:
            self.pulls.append(Producer(self.channel, words.view(layout.word(0), 8)))
        self.together = Producer(self.channel, words.view(layout.together_word, 8))
        # Where the worker's memory cannot be mapped, our part of the norm leaves from where its own arrives.
        maps = self.channel.device.capabilities.maps
        self.norm_back = Producer(
            self.channel,
            words.view(layout.norm_word, 8),
            slots=[words.view(layout.norm, NORM.size)],
            source=[] if maps else [self.inbox.view(self.layout.norm, NORM.size)],
        )


class StoreServer:
    """Serves its shard of the store ``name`` to all workers until they finish."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, workers: int, servers: int) -> None:
        self.member, self.name, self.spec, self.index = member, name, spec, member.index
        if spec.versions != versions():
            raise PlanMismatch(
                f"the workers run {spec.versions}, server {self.index} {versions()}: install one everywhere"
            )
        self.plan: StorePlan = spec.plan(servers)
        registered = self.plan.registered_bytes(self.index, workers, spec.buffers)
        check_memory(registered, f"server {self.index}")
        self._regions: dict[str, Region] = {}
        self.parameters = self._allocate_parameters(workers)
        self.workers = [_Worker(self, w) for w in range(workers)]
        for worker in self.workers:
            shown = self.parameters.remote("read").pack() if worker.channel.device is self.parameters.device else b""
            endpoint = ServerEndpoint(worker.inbox.remote("write").pack(), shown)
            member.client.publish(
                f"{name}/server {self.index}/worker {worker.index}",
                msgspec.msgpack.encode(endpoint),
                to=[f"worker {worker.index}"],
            )
        for worker in self.workers:
            key = f"{name}/worker {worker.index}/server {self.index}"
            worker.open(self, msgspec.msgpack.decode(member.client.lookup(key, timeout=600.0), type=WorkerEndpoint))
        self.rule = make_rule(spec, self.plan, self.index, memoryview(self.parameters), workers)
        self._ready_queue = ReadyQueue(self.plan.buckets[self.index], overlap=spec.buffers > 1)
        self._active = list(self.workers)  # who takes part in rounds
        self._sameness = Sameness(workers if self.index == 0 else 1)
        self.step = 0  # rounds begun
        self.updates = 0  # rounds that were steps of the training

    def _allocate_parameters(self, workers: int) -> Region:
        """On a device whose memory workers can map, if any worker is reached that way."""
        devices: list[Device] = [self.member.channel("worker", w).device for w in range(workers)]
        best = next((d for d in devices if d.capabilities.maps), devices[0])
        return best.allocate(self.plan.shard_bytes[self.index] * self.spec.buffers)

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
        while True:
            self.step += 1
            heads = self._take_part()
            operation = self._agree(heads) if heads else StepOperation.IDLE
            if operation is StepOperation.FINISH:
                return
            if operation is StepOperation.UPDATE:
                self._update(heads[self._active[0].index])
            elif operation is StepOperation.ASSIGN:
                self._assign()
            else:
                self._stay(operation)
                if operation is StepOperation.SKIP:
                    self._send_norm(LEFT_OUT, [self.workers[w] for w, head in heads.items() if head.max_norm])
            if not self.plan.buckets[self.index]:
                self._publish(0)
            self.updates += operation in STEPS

    def _head(self, worker: _Worker) -> StepHeader:
        head = unpack_header(self._receive(worker.head), len(self.spec.numeric))
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

    def _take_part(self) -> dict[int, StepHeader]:
        """The heads of the workers that take part in this round: those that are not idle."""
        heads = {w.index: self._head(w) for w in self._active}
        self._active = [w for w in self._active if heads[w.index].operation is not StepOperation.IDLE]
        return {w.index: heads[w.index] for w in self._active}

    def _agree(self, heads: Mapping[int, StepHeader]) -> StepOperation:
        idle = [w.index for w in self.workers if w.index not in heads]
        return agreed({w: head.operation for w, head in heads.items()}, idle, self.updates)

    def _stay(self, operation: StepOperation) -> None:
        """A round that leaves parameters as they are: state is loaded, a step skipped, or all are idle and go on."""
        if operation is StepOperation.LOAD:
            take_state(self.member, self.name, self.step, self.rule)
        for bucket in range(len(self.plan.buckets[self.index])):
            self.rule.carry(bucket, self.step)
            self._publish(bucket)
        if operation is StepOperation.IDLE:
            self._active = list(self.workers)
            for worker in self.workers:
                worker.together.send(self.step)

    def _assign(self) -> None:
        for bucket, push in enumerate(self.workers[0].pushes):
            self.rule.assign(bucket, self._receive(push), self.step)
            self._publish(bucket)

    def _update(self, head: StepHeader) -> None:
        self.rule.set_options(head.options)
        later = head.max_norm > 0 or self.rule.together
        kept: list[int] = []
        for bucket in self._arriving():
            ready = clock()
            slots, present = [w.slots[bucket] for w in self.workers], self._present(bucket)
            if self._sameness.watching:
                self._sameness.compare(slots, present)
            self.rule.reduce(bucket, slots, present, keep=later)
            if later:
                spans.add("update", self.step, ready, clock())
                kept.append(bucket)
                continue
            self._apply(bucket, ready)
        if later:
            self._update_kept(kept, head.max_norm)
        if self._sameness.watching and self._sameness.end_round():
            self._sameness.warn()

    def _update_kept(self, buckets: list[int], max_norm: float) -> None:
        """All gradients are there, and the norm of all is known: one update."""
        total = self._norm2() if max_norm else 0.0
        if total == LEFT_OUT:
            for bucket in buckets:
                self.rule.carry(bucket, self.step)
                self._publish(bucket)
            return
        scale = clipping(math.sqrt(total), max_norm) if max_norm else 1.0
        if not self.rule.together:
            for bucket in buckets:
                self._apply(bucket, clock(), scale)
            return
        start = clock()
        self.rule.apply_all(self.step, scale)
        spans.add("update", self.step, start, clock())
        for bucket in buckets:
            self._publish(bucket)

    def _apply(self, bucket: int, start: float, scale: float = 1.0) -> None:
        self.rule.apply(bucket, self.step, scale)
        spans.add("update", self.step, start, clock())
        self._publish(bucket)

    def _present(self, bucket: int) -> list[bytes]:
        """A byte a piece from each worker; an idle one has no gradients."""
        return [bytes(w.present[bucket]) if w in self._active else bytes(len(w.present[bucket])) for w in self.workers]

    def _arriving(self) -> Iterator[int]:
        """The buckets, as all workers' gradients for them have come."""
        for bucket in self._ready_queue.of_round(self._is_there, self._poll):
            for worker in self._active:
                self._receive(worker.pushes[bucket])
            yield bucket

    def _is_there(self, bucket: int) -> bool:
        return all(worker.pushes[bucket].ready(self.step) for worker in self._active)

    def _poll(self, bucket: int, seconds: float) -> None:
        """Waits for all workers' gradients of a bucket, but no longer."""
        try:
            for worker in self._active:
                worker.pushes[bucket].receive(self.step, seconds)
        except WaitTimeout:
            self.member.check()

    def _norm2(self) -> float:
        """The sum of squares over all servers: workers add up the parts, and tell the sum, or to leave the step out."""
        self._send_norm(sum(self.rule.norm2(b) for b in range(len(self.plan.buckets[self.index]))), self._active)
        (total,) = NORM.unpack(self._receive(self._active[0].norm))
        return float(total)

    def _send_norm(self, part: float, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            worker.norm_back.slot(self.step)[:] = NORM.pack(part)
            worker.norm_back.send(self.step)

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
    available = available_bytes()
    if nbytes > available:
        raise OutOfMemory(
            f"{who} would register {nbytes / 2**20:.0f} MiB, and this machine has {available / 2**20:.0f} MiB free: "
            "use more servers on other machines, or fewer workers a server"
        )
