"""The memory of one plan on this worker, and the words by which workers tell each other what lies in it.

What crosses is born in, or copied to, the *outbox* of the worker that makes it: one bank per run. A worker that maps it
reads it in place: then a signal is all that is sent. To others it is written, into a bank of an *inbox* of theirs.
Either way the worker that reads gives the bank back once it has let go of all that lies there. Parameters that cross
are *lent*: they live in registered memory of their own, and until a run ends they do not change.

Words, all 8 bytes and growing:

- ``arrival``, a ring of them per edge and target, in the target's memory: the run whose value is there, and in the low
  8 bits the bank;
- ``credit``, one per target and bank, in the source's memory: the last run of that bank that the target let go of;
- ``begun``, one per target, in the source's memory: the run that the target began while it still held an earlier one;
- ``returned``, one per target, in the source's memory: the run after which it does not read what was lent.

A tensor that does not lie as the plan says is described: behind the slots of a bank, each edge that relies on the plan
has room for a header, which names the run that it is of. In other runs nothing is written there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from tensorwire._native import Hold
from tensorwire.control import Member
from tensorwire.device import Channel, Device, Region
from tensorwire.edge import Lease, Pool, Spec
from tensorwire.edge.header import HEADER, MOST_BYTES, Header, pack_tensor, step_of, unpack
from tensorwire.errors import WaitTimeout
from tensorwire.graph.bank import Bank, Held, Ledger, hold, too_many
from tensorwire.graph.inflow import BANKS, POLL, Door, Inflow
from tensorwire.graph.outflow import Outflow
from tensorwire.graph.plan import Plan
from tensorwire.observe import counters, spans
from tensorwire.observe.edge_names import edge_of
from tensorwire.observe.spans import clock

MOST_DYNAMIC = 1 << 40  # bytes of a pool: as much as there is memory
Memory = dict[str, Region]  # one piece of memory, by the device that it is registered with


def make_pool(device: Device) -> Pool:
    """The memory of ``device`` for tensors of no known size."""
    return Pool(device, limit=MOST_DYNAMIC)


@dataclass(frozen=True, slots=True)
class _Payload:
    """A payload of any size that ``targets`` may still read: that of ``run``, whose outbox is ``bank``."""

    run: int
    bank: int
    targets: tuple[str, ...]
    memory: list[Hold]


class Wires:
    """The wires of ``plan`` at worker ``me``. All workers make theirs in the same order; ``number`` tells them apart.

    ``borrowed``: by lender and borrower, who still reads during this plan what was lent by an earlier one (a backward
    graph, what its forward graph saved). ``plans()``: how many plans this worker has made. ``pools(device)``: where
    tensors of no known size lie. Makes regions and tells the others of them, once: an RPC and a registration each.
    Raises `OutOfMemory`, `PeerLost`, `WaitTimeout` or `JobEnded`.
    """

    def __init__(
        self,
        plan: Plan,
        me: str,
        member: Member,
        number: int,
        timeout: float,
        borrowed: Collection[tuple[str, str]] = (),
        plans: Callable[[], int] = int,
        pools: Callable[[Device], Pool] = make_pool,
    ) -> None:
        self.plan, self.me, self._timeout = plan, me, timeout
        self._member, self._number, self._pools = member, number, pools
        self.what = [edge_of(plan.name, edge.name) for edge in plan.edges]  # in spans
        self.run = 0
        self.bank: Bank | None = None  # of this run
        self.held: Held | None = None  # its bytes
        self._borrowed = {*borrowed, *plan.loans}
        ledger = Ledger(plan.name, self._publish, self._find, plans)
        self._in = {worker: self._inflow(worker, ledger) for worker in plan.workers if self._wants(worker, me)}
        self._out = {worker: self._outflow(worker, ledger) for worker in plan.workers if self._wants(me, worker)}
        self._banks: list[Bank] = []
        self._lending: list[Pool] = []  # where payloads of any size lie that targets look at or read
        self._payloads: list[_Payload] = []
        self._outboxes: list[Memory] = []
        self._loans: dict[int, tuple[Memory, Held]] = {}
        self._allocate()
        self._exchange()

    def _wants(self, source: str, target: str) -> bool:
        return bool(self._edges(source, target)) or (source, target) in self._borrowed

    def _edges(self, source: str, target: str) -> list[int]:
        edges = enumerate(self.plan.edges)
        return [index for index, edge in edges if edge.source == source and target in edge.targets]

    def _inflow(self, worker: str, ledger: Ledger) -> Inflow:
        edges = self._edges(worker, self.me)
        loans = {index: self.plan.edges[index].nbytes or 0 for index in edges if self.plan.edges[index].lent}
        channel = self._channel(worker)
        nbytes = dict(self.plan.outbox)[worker]
        return Inflow(worker, channel, edges, loans, nbytes, self._pools(channel.device), ledger)

    def _outflow(self, worker: str, ledger: Ledger) -> Outflow:
        edges = self._edges(self.me, worker)
        banks = any(self.plan.edges[index].slot is not None for index in edges)
        return Outflow(worker, self._channel(worker), edges, banks, ledger)

    def _channel(self, worker: str) -> Channel:
        role, _, index = worker.partition(" ")
        return self._member.channel(role, int(index))

    # ---- set-up

    def _allocate(self) -> None:
        """The outbox, and memory for what is lent."""
        for index, edge in enumerate(self.plan.edges):
            if edge.source != self.me or not edge.lent:
                continue
            memory = self._memory(edge.nbytes or 0, edge.targets)
            self._loans[index] = memory, hold(memoryview(next(iter(memory.values()))))
        if dict(self.plan.outbox)[self.me]:
            for _ in range(BANKS):
                self._new_bank()

    def _new_bank(self) -> Bank:
        too_many(len(self._banks), self.plan.name)
        memory = self._memory(dict(self.plan.outbox)[self.me], tuple(self._out))
        self._outboxes.append(memory)
        self._banks.append(Bank(len(self._banks), memoryview(next(iter(memory.values())))))
        return self._banks[-1]

    def _memory(self, nbytes: int, targets: tuple[str, ...]) -> Memory:
        """Memory that all of ``targets`` can be sent from: allocated by a device that maps, if there is one."""
        devices: dict[str, Device] = {}
        for worker in sorted(targets, key=lambda worker: not self._out[worker].channel.device.capabilities.maps):
            device = self._out[worker].channel.device
            devices[device.name] = device
        (name, first), *others = devices.items()
        region = first.allocate(nbytes)
        return {name: region, **{name: device.register(memoryview(region)) for name, device in others}}

    def _exchange(self) -> None:
        for worker, inflow in self._in.items():
            self._tell(f"in/{worker}", worker, inflow.door())
        for worker, outflow in self._out.items():
            device = outflow.channel.device.name
            maps = outflow.channel.device.capabilities.maps
            banks = [memory[device].remote("write").pack() for memory in self._outboxes] if maps else []
            loans = {
                index: memory[device].remote("write").pack()
                for index, (memory, _) in self._loans.items()
                if maps and worker in self.plan.edges[index].targets
            }
            words = outflow.words.remote("write").pack()
            self._tell(f"out/{worker}", worker, Door(words, banks, loans, maps))
        for worker, outflow in self._out.items():
            outflow.open(self._hear(f"in/{self.me}", worker))
        for worker, inflow in self._in.items():
            inflow.open(self._hear(f"out/{self.me}", worker))

    def _tell(self, what: str, worker: str, door: Door) -> None:
        key = f"graph/{self._number}/{self.me}/{what}"
        self._member.client.publish(key, msgspec.msgpack.encode(door), to=[worker])

    def _hear(self, what: str, worker: str) -> Door:
        return msgspec.msgpack.decode(
            self._member.client.lookup(f"graph/{self._number}/{worker}/{what}", self._timeout), type=Door
        )

    def _publish(self, way: str, worker: str, bank: int, packed: bytes) -> None:
        key = f"graph/{self._number}/{self.me}/{way}/{worker}/{bank}"
        self._member.client.publish(key, packed, to=[worker])

    def _find(self, way: str, worker: str, bank: int) -> bytes:
        return self._member.client.lookup(f"graph/{self._number}/{worker}/{way}/{self.me}/{bank}", self._timeout)

    def plan_another(self, number: int) -> None:
        """Tells the other workers that this one plans its ``number``-th graph, counted from 1. If they wait for
        something of this one, they will not get it."""
        for inflow in self._in.values():
            inflow.plan_another(number)
        for outflow in self._out.values():
            outflow.plan_another(number)

    # ---- one run

    def begin(self) -> None:
        """Starts the next run: takes a bank of the outbox that nobody holds."""
        self.run += 1
        for inflow in self._in.values():
            inflow.begin(self.run)
        for outflow in self._out.values():
            outflow.flush(self.run, self._timeout)
        self.collect()
        if self._banks:
            start = clock()
            self.bank = self._free_bank()
            self.held = self.bank.hold(self.run)
            spans.add("wait", self.run, start, clock(), edge_of(self.plan.name, "the outbox"))

    def _free_bank(self) -> Bank:
        """Waits for one, but not for workers that began this run and hold on to the earlier ones."""
        targets = list(self._out.values())
        end = time.monotonic() + self._timeout
        while True:
            ours = [bank for bank in self._banks if not bank.held]
            for bank in ours:
                if all(target.let_go(bank) for target in targets):
                    return bank
            waiting = [target for target in targets if ours and not target.let_go(ours[0])]
            if ours and not waiting:
                continue  # let go just now
            if all(target.has_begun(self.run) for target in waiting):
                return self._grow()
            if time.monotonic() >= end:
                raise WaitTimeout(f"{waiting[0].worker} did not begin run {self.run} of graph {self.plan.name} in time")
            with contextlib.suppress(WaitTimeout):
                waiting[0].wait_for_credit(ours[0], POLL)

    def _grow(self) -> Bank:
        bank = self._new_bank()
        for worker, target in self._out.items():
            if target.maps:
                region = self._outboxes[-1][target.channel.device.name]
                self._publish("out", worker, bank.number, region.remote("write").pack())
        return bank

    def describe(self, index: int, spec: Spec, at: int) -> None:
        """Says that edge ``index`` lies as ``spec`` in this run, at ``at`` in the bank, not as the plan says."""
        header, bank = self.plan.edges[index].header, self.bank
        assert header is not None
        assert bank is not None
        pack_tensor(bank.memory, header, self.run, spec, offset=at)

    def described(self, index: int, held: Held) -> Header | None:
        """How edge ``index``, which was received as ``held``, lies; None: as the plan says."""
        at = self.plan.edges[index].header
        if at is None or step_of(held.data, at) != self.run:
            return None
        return unpack(held.data, at, held.nbytes, held.nbytes)

    def send(self, index: int, nbytes: int, at: int | None = None) -> None:
        """Makes edge ``index``, whose ``nbytes`` lie in the outbox, arrive at its targets. ``at``: where, if it was
        described: its header goes in front."""
        edge, bank, start = self.plan.edges[index], self.bank, clock()
        assert bank is not None
        assert edge.slot is not None
        for worker in edge.targets:
            target = self._out[worker]
            source = self._outboxes[bank.number][target.channel.device.name]
            if at is not None:
                assert edge.header is not None
                target.put(self.run, source.view(edge.header, HEADER), self._timeout)
            where = edge.slot + edge.offset if at is None else at
            target.send(index, self.run, bank, source.view(where, nbytes), self._timeout)
        spans.add("push", self.run, start, clock(), self.what[index])

    def room(self, index: int, nbytes: int) -> Lease:
        """Memory for edge ``index``, which is dynamic, to be born in. Raises `OutOfMemory`."""
        return self._pool_of(self.plan.edges[index].targets[0]).lease(nbytes)

    def _pool_of(self, target: str) -> Pool:
        pool = self._pools(self._out[target].channel.device)
        if pool not in self._lending:
            self._lending.append(pool)
            pool.keep(self)
        return pool

    def send_dynamic(self, index: int, lease: Lease, spec: Spec) -> None:
        """Makes edge ``index``, which lies in ``lease`` of ``room(index)`` as ``spec``, arrive at its targets."""
        edge, bank, start = self.plan.edges[index], self.bank, clock()
        assert bank is not None
        assert edge.slot is not None
        leases = {lease.slab.device.name: lease}
        for number, worker in enumerate(edge.targets):
            device = self._out[worker].channel.device.name
            if device not in leases:  # memory of one device is not another's
                leases[device] = other = self._pool_of(worker).lease(lease.nbytes)
                other.memory[:] = memoryview(lease.hold)
                counters.add(copies=1, copied_bytes=lease.nbytes)
            region, at = leases[device].slab.shown("write"), edge.slot + HEADER * number
            pack_tensor(bank.memory, at, self.run, spec, region=region, offset=leases[device].offset)
            source = self._outboxes[bank.number][device].view(at, HEADER)
            self._out[worker].send(index, self.run, bank, source, self._timeout)
        self._payloads.append(_Payload(self.run, bank.number, edge.targets, [one.hold for one in leases.values()]))
        spans.add("push", self.run, start, clock(), self.what[index])

    def collect(self) -> None:
        """Lets go of payloads of any size that their targets have read."""
        self._payloads = [one for one in self._payloads if not self._is_read(one)]

    def _is_read(self, payload: _Payload) -> bool:
        return all(self._out[worker].has_read(payload.run, payload.bank) for worker in payload.targets)

    def receive_dynamic(self, index: int) -> tuple[Hold | Held, Spec]:
        """Waits for edge ``index``, which is dynamic. Raises `PeerLost`, `WaitTimeout` or `OutOfMemory`."""
        edge, source, start = self.plan.edges[index], self._in[self.plan.edges[index].source], clock()
        assert edge.slot is not None
        held = source.receive(index, self.run, self._timeout)
        header = unpack(held.data, edge.slot + HEADER * edge.targets.index(self.me), MOST_BYTES)
        payload = source.payload(header, held, self._timeout)
        spans.add("wait", self.run, start, clock(), self.what[index])
        assert header.spec is not None  # a region goes with a tensor
        return payload, header.spec

    def loan(self, index: int) -> Held:
        """The memory that edge ``index``, which is lent, is to live in."""
        return self._loans[index][1]

    def lend(self, index: int) -> None:
        """Makes edge ``index``, which lies in ``loan(index)``, arrive at its targets."""
        memory, start = self._loans[index][0], clock()
        for worker in self.plan.edges[index].targets:
            target = self._out[worker]
            target.lend(index, self.run, memory[target.channel.device.name].view())
        spans.add("push", self.run, start, clock(), self.what[index])

    def receive(self, index: int) -> Held:
        """Waits for edge ``index``; the bytes of its source's outbox, in which it lies where the plan says, or those
        that were lent. Raises `PeerLost` or `WaitTimeout`."""
        edge, start = self.plan.edges[index], clock()
        held = self._in[edge.source].receive(index, self.run, self._timeout)
        spans.add("wait", self.run, start, clock(), self.what[index])
        return held

    def end(self) -> None:
        """Ends the run: what it left is held by its tensors alone, and what was lent has been given back."""
        self.held = None
        for worker, inflow in self._in.items():
            inflow.end(self.run, (worker, self.me) in self._borrowed)
        for worker, outflow in self._out.items():
            outflow.end(self.run, (self.me, worker) in self._borrowed, self._timeout)

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        self._payloads.clear()
        for inflow in self._in.values():
            inflow.close()
        for outflow in self._out.values():
            outflow.close()
        for memory in (*self._outboxes, *(memory for memory, _ in self._loans.values())):
            for region in memory.values():
                region.close()
