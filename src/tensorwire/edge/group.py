"""A group of edges that share banks: what crosses between some processes, step after step.

What crosses is born in, or copied to, the *outbox* of the process that makes it: one bank per step. A process that maps
it reads it in place: then a signal is all that is sent. To others it is written, into a bank of an *inbox* of theirs.
Either way the consumer gives the bank back once it has released all that lies there. Parameters that cross are *lent*:
they live in registered memory of their own, and until a step ends they do not change.

A tensor that does not lie as planned is described: after the slots of a bank, each edge that relies on the plan has
room for a header, which names the step that it is of. In other steps nothing is written there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tensorwire._native import Hold
from tensorwire.device import Device, Region
from tensorwire.device.region import Access
from tensorwire.edge.bank import Bank, check_number, hold_all
from tensorwire.edge.header import HEADER, MOST_BYTES, Header, pack_tensor, step_of, unpack
from tensorwire.edge.incoming import Incoming
from tensorwire.edge.outgoing import Outgoing
from tensorwire.edge.peers import Peers
from tensorwire.edge.pool import Lease, Pool
from tensorwire.edge.tensor import Spec
from tensorwire.edge.words import POLL, PeerMemory
from tensorwire.errors import ProtocolError, WaitTimeout
from tensorwire.messages import decode_message
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock

BANKS = 2  # to begin with: a step may begin while the last one's tensors are alive
Memory = dict[str, Region]  # one piece of memory, by the device that it is registered with


class GroupEdge(Protocol):
    """What a group knows of one of its edges; a plan's edges are such."""

    @property
    def name(self) -> str:
        """As errors and traces call it."""

    @property
    def source(self) -> str:
        """The process that sends it."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The processes that receive it."""

    @property
    def slot(self) -> int | None:
        """Where its memory begins in a bank; None for what is lent."""

    @property
    def offset(self) -> int:
        """Bytes from there to the tensor's first element."""

    @property
    def nbytes(self) -> int | None:
        """Bytes of payload, at most; None for any size: then only headers lie in the slot, one per target."""

    @property
    def lent(self) -> bool:
        """Whether it lives in registered memory of its own, and does not change during a step."""

    @property
    def header(self) -> int | None:
        """Where in a bank its source describes a tensor that does not lie as planned."""


class _Payload(NamedTuple):
    """A payload of any size that ``targets`` may still read: that of ``step``, whose outbox is ``bank``."""

    step: int
    bank: Bank
    targets: tuple[str, ...]
    memory: list[Hold]  # kept until then


class EdgeGroup:
    """The edges of a group, at process ``peers.me``. All processes make theirs in the same order.

    Makes regions and announces them to the others: an RPC and a registration each, once.

    Args:
        edges: The same everywhere; an edge is known by its place here.
        outboxes: Bytes of a bank, by process.
        peers: The other processes.
        pools: ``pools(device)``: where tensors of no known size lie.
        timeout: Seconds to wait for the others.
        borrowed: By owner and borrower, which still reads in a step what was lent through another group.
        depth: How many banks there are; None: two, and more where tensors of earlier steps are kept.
        access: What consumers may do to payloads of any size that they look at in place.
        traced: Whether what is sent and waited for in a step is recorded as spans.
        defers: ``defers()``: whether this is a bad moment to send a credit, on a device that maps nothing.

    Raises:
        OutOfMemory: There is no memory for it.
        PeerLost, WaitTimeout, JobEnded: The others did not come.
    """

    def __init__(
        self,
        edges: Sequence[GroupEdge],
        outboxes: Mapping[str, int],
        peers: Peers,
        *,
        pools: Callable[[Device], Pool],
        timeout: float,
        borrowed: Collection[tuple[str, str]] = (),
        depth: int | None = None,
        access: Access = "write",
        traced: bool = True,
        defers: Callable[[], bool] = lambda: True,
    ) -> None:
        self.edges, self.me, self._peers, self._timeout = edges, peers.me, peers, timeout
        self._outbox_nbytes = outboxes[peers.me]
        self._grows, self._depth, self._pools, self._access = depth is None, depth or BANKS, pools, access
        self._traced = traced
        self.labels = [f"{peers.name}, {edge.name}" for edge in edges]  # in spans
        self.step = 0
        self.bank: Bank | None = None  # of this step
        self.held: Hold | None = None  # all of its bytes
        self._sends = False  # whether anything was sent in this step
        self._borrowed = {*borrowed, *((e.source, target) for e in edges if e.lent for target in e.targets)}
        pairs = {*self._borrowed, *((edge.source, target) for edge in edges for target in edge.targets)}
        self._in = {one: self._incoming(one, outboxes[one], defers) for one, to in sorted(pairs) if to == self.me}
        self._out = {to: self._outgoing(to) for one, to in sorted(pairs) if one == self.me}
        self._targets = [[self._out[to] for to in edge.targets] if edge.source == self.me else [] for edge in edges]
        self._banks: list[Bank] = []
        self._lending: list[Pool] = []  # where payloads of any size lie that consumers look at or read
        self._payloads: list[_Payload] = []
        self._outboxes: list[Memory] = []
        self._loans: dict[int, tuple[Memory, Hold]] = {}
        try:
            self._allocate()
            self._introduce()
        except BaseException:
            self.close()
            raise

    def _edges(self, source: str, target: str) -> list[int]:
        edges = enumerate(self.edges)
        return [index for index, edge in edges if edge.source == source and target in edge.targets]

    def _incoming(self, peer: str, nbytes: int, defers: Callable[[], bool]) -> Incoming:
        edges = self._edges(peer, self.me)
        pool = self._pools(self._peers.channel(peer).device)
        depth, grows = self._depth, self._grows
        return Incoming(
            self._peers, peer, edges, self._loaned(edges), nbytes, pool, depth=depth, grows=grows, defers=defers
        )

    def _outgoing(self, peer: str) -> Outgoing:
        edges = self._edges(self.me, peer)
        return Outgoing(self._peers, peer, edges, self._loaned(edges), self._outbox_nbytes, self._depth)

    def _loaned(self, edges: list[int]) -> dict[int, int]:
        return {index: self.edges[index].nbytes or 0 for index in edges if self.edges[index].lent}

    # ---- set-up

    def _allocate(self) -> None:
        """The outbox, and memory for what is lent."""
        for index, edge in enumerate(self.edges):
            if edge.source == self.me and edge.lent:
                memory = self._memory(edge.nbytes or 0, edge.targets)
                self._loans[index] = memory, hold_all(next(iter(memory.values())))
        if self._outbox_nbytes:
            for _ in range(self._depth):
                self._new_bank()

    def _new_bank(self) -> Bank:
        check_number(len(self._banks), self._peers.name)
        memory = self._memory(self._outbox_nbytes, tuple(self._out))
        self._outboxes.append(memory)
        self._banks.append(Bank(len(self._banks), next(iter(memory.values()))))
        return self._banks[-1]

    def _memory(self, nbytes: int, targets: tuple[str, ...]) -> Memory:
        """Memory that all of ``targets`` can be sent from: allocated by a device that maps, if there is one."""
        devices: dict[str, Device] = {}
        for peer in sorted(targets, key=lambda peer: not self._out[peer].channel.device.capabilities.maps):
            device = self._out[peer].channel.device
            devices[device.name] = device
        (name, first), *others = devices.items()
        region = first.allocate(nbytes)
        return {name: region, **{name: device.register(memoryview(region)) for name, device in others}}

    def _introduce(self) -> None:
        publish = self._peers.publish
        for peer, incoming in self._in.items():
            publish("incoming", peer, msgspec.msgpack.encode(incoming.memory()))
        for peer, outgoing in self._out.items():
            publish("outgoing", peer, msgspec.msgpack.encode(self._shown_to(peer, outgoing)))
        for peer, outgoing in self._out.items():
            outgoing.open(self._lookup("incoming", peer))
        for peer, incoming in self._in.items():
            incoming.open(self._lookup("outgoing", peer))

    def _shown_to(self, peer: str, outgoing: Outgoing) -> PeerMemory:
        """What a consumer has to know; where it maps, of our memory too."""
        device, words = outgoing.channel.device, outgoing.words.remote().pack()
        if not device.capabilities.maps:
            return PeerMemory(words, [], {}, False)
        lent = {i: memory for i, (memory, _) in self._loans.items() if peer in self.edges[i].targets}
        loans = {index: memory[device.name].remote().pack() for index, memory in lent.items()}
        return PeerMemory(words, [memory[device.name].remote().pack() for memory in self._outboxes], loans, True)

    def _lookup(self, what: str, peer: str) -> PeerMemory:
        try:
            return decode_message(self._peers.lookup(what, peer), PeerMemory)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ProtocolError(f"{peer} describes its memory differently: does it run the same version?") from None

    def announce(self, number: int) -> None:
        """Sends all others a growing number, after all that was sent before; `Peers.gone_on` interprets it."""
        for incoming in self._in.values():
            incoming.announce(number)
        for outgoing in self._out.values():
            outgoing.announce(number)

    # ---- one step

    def begin(self, timeout: float | None = None, *, holds: bool = True) -> None:
        """Begins the next step: takes a bank of the outbox that nobody holds.

        ``holds``: whether this process looks into it until ``end``, and as long as it keeps ``held``.

        Raises `WaitTimeout`, after which you may try again, `PeerLost`, or what `Peers.gone_on` returns.
        """
        step, end = self.step + 1, clock() + (self._timeout if timeout is None else timeout)
        for incoming in self._in.values():
            incoming.begin(step)
        for outgoing in self._out.values():
            outgoing.flush(step, None, end)
        self.collect()
        if self._banks:
            bank = self._free_bank() or self._wait_for_bank(step, end)
            for outgoing in self._out.values():
                outgoing.flush(step, bank, end)
            self.bank, self.held = bank, bank.hold(step) if holds else None
            bank.step = step
        self.step, self._sends = step, False

    def _free_bank(self) -> Bank | None:
        """The next one in turn, which is likely the oldest, if nobody holds it."""
        bank = self._banks[0 if self.bank is None else (self.bank.number + 1) % len(self._banks)]
        if bank.held:
            return None
        for target in self._out.values():
            if not target.let_go(bank):
                return None
        return bank

    def _wait_for_bank(self, step: int, end: float) -> Bank:
        """Waits for one, the oldest first, but not for consumers that began this step and hold on to earlier ones."""
        targets, start = list(self._out.values()), clock()
        while True:
            ours = sorted([bank for bank in self._banks if not bank.held], key=_last_step)
            for bank in ours:
                if all(target.let_go(bank) for target in targets):
                    spans.add("wait", step, start, clock(), f"{self._peers.name}, the outbox")
                    return bank
            waiting = [target for target in targets if ours and not target.let_go(ours[0])]
            if ours and not waiting:
                continue  # released just now
            if self._grows and all(target.has_begun(step) for target in waiting):
                return self._grow()
            if clock() >= end:
                raise WaitTimeout(waiting[0].keeps(step))
            waiting[0].wait_for_one_of([(bank.number, bank.step) for bank in ours])

    def _grow(self) -> Bank:
        bank = self._new_bank()
        for peer, target in self._out.items():
            if target.maps:
                region = self._outboxes[-1][target.channel.device.name]
                self._peers.publish(f"outbox {bank.number}", peer, region.remote().pack())
        return bank

    def reserve(self, timeout: float) -> None:
        """Waits until every consumer has memory for what is sent in this step. Raises `PeerLost` or `WaitTimeout`."""
        for outgoing in self._out.values():
            outgoing.reserve(self.step, timeout)

    def describe(self, index: int, spec: Spec, at: int) -> None:
        """Says that edge ``index`` lies as ``spec`` in this step, at ``at`` in the bank, not as planned."""
        header, bank = self.edges[index].header, self.bank
        assert header is not None
        assert bank is not None
        pack_tensor(bank.memory, header, self.step, spec, offset=at)

    def described(self, index: int, held: Hold) -> Header | None:
        """How edge ``index``, which was received as ``held``, lies; None: as planned."""
        at = self.edges[index].header
        if at is None:
            return None
        memory = memoryview(held)
        return unpack(memory, at, held.nbytes, held.nbytes) if step_of(memory, at) == self.step else None

    def send(self, index: int, nbytes: int, at: int | None = None) -> None:
        """Makes edge ``index``, whose ``nbytes`` lie in the outbox, arrive at its targets.

        ``at``: where, if it was described: its header goes in front.
        """
        edge, bank, start = self.edges[index], self.bank, clock() if self._traced else 0.0
        assert bank is not None
        assert edge.slot is not None
        for target in self._targets[index]:
            self._sends = True
            if target.maps:
                target.signal(index, self.step, bank.number, nbytes)
                continue
            source = self._outboxes[bank.number][target.channel.device.name]
            if at is not None:
                assert edge.header is not None
                target.put(self.step, bank.number, source.view(edge.header, HEADER), self._timeout)
            where = edge.slot + edge.offset if at is None else at
            target.write(index, self.step, bank.number, source.view(where, nbytes), self._timeout)
        if self._traced:
            spans.add("push", self.step, start, clock(), self.labels[index])

    def receive(self, index: int, timeout: float | None = None) -> Hold:
        """Waits for edge ``index``; the bytes of its source's outbox, in which it lies where planned, or those that
        were lent. Raises `PeerLost` or `WaitTimeout`."""
        incoming = self._in[self.edges[index].source]
        timeout = self._timeout if timeout is None else timeout
        if not self._traced:
            return incoming.receive(index, self.step, timeout)
        start = clock()
        held = incoming.receive(index, self.step, timeout)
        spans.add("wait", self.step, start, clock(), self.labels[index])
        return held

    def ready(self, index: int, step: int) -> bool:
        """Whether edge ``index`` has arrived in ``step``."""
        return self._in[self.edges[index].source].ready(index, step)

    @property
    def all_held(self) -> bool:
        """Whether this process still looks into every bank of a producer, which can send nothing then."""
        return any(incoming.all_held for incoming in self._in.values())

    def end(self) -> None:
        """Ends the step: what it left is held by its tensors alone, and what was lent has been given back."""
        self.held = None
        for peer, incoming in self._in.items():
            incoming.end(self.step, (peer, self.me) in self._borrowed)
        for peer, outgoing in self._out.items():
            outgoing.end(self.step, (self.me, peer) in self._borrowed, self._timeout)

    def flush(self, timeout: float) -> None:
        """Returns when everything sent is in the memory of its consumers, or raises what became of it."""
        for outgoing in self._out.values():
            outgoing.flush_all(timeout)

    # ---- tensors of any size

    def room(self, index: int, nbytes: int) -> Lease:
        """Memory for edge ``index``, which is dynamic, to be born in. Raises `OutOfMemory`."""
        return self._pool_of(self._targets[index][0]).lease(nbytes)

    def _pool_of(self, target: Outgoing) -> Pool:
        pool = self._pools(target.channel.device)
        if pool not in self._lending:
            self._lending.append(pool)
            pool.keep(self)
        return pool

    def send_dynamic(self, index: int, lease: Lease, spec: Spec, step: int | None = None) -> None:
        """Makes edge ``index``, which lies in ``lease`` of ``room(index)`` as ``spec``, arrive at its targets.

        ``step``: what its header says; by default the step of the group.
        """
        edge, bank, start = self.edges[index], self.bank, clock() if self._traced else 0.0
        said = self.step if step is None else step
        assert bank is not None
        assert edge.slot is not None
        leases = {lease.slab.device.name: lease}
        try:
            self._send_leases(index, leases, spec, said)
        finally:
            if self._sends:
                memory = [one.hold for one in leases.values()]
                self._payloads.append(_Payload(self.step, bank, edge.targets, memory))
        if self._traced:
            spans.add("push", self.step, start, clock(), self.labels[index])

    def _send_leases(self, index: int, leases: dict[str, Lease], spec: Spec, said: int) -> None:
        """Sends what lies in one lease to targets on any device. ``leases``: by device; what is copied is added."""
        edge, bank, lease = self.edges[index], self.bank, next(iter(leases.values()))
        assert bank is not None
        assert edge.slot is not None
        for number, target in enumerate(self._targets[index]):
            device = target.channel.device.name
            if device not in leases:  # memory of one device is not another's
                leases[device] = other = self._pool_of(target).lease(lease.nbytes)
                other.memory[:] = memoryview(lease.hold)
                counters.add(copies=1, copied_bytes=lease.nbytes)
            region, at = leases[device].slab.shown(self._access), edge.slot + HEADER * number
            pack_tensor(bank.memory, at, said, spec, region=region, offset=leases[device].offset)
            self._sends = True
            if target.maps:
                target.signal(index, self.step, bank.number, HEADER)
            else:
                source = self._outboxes[bank.number][device].view(at, HEADER)
                target.write(index, self.step, bank.number, source, self._timeout)

    def payload(self, index: int, header: Header, held: Hold, timeout: float) -> Hold:
        """The payload that ``header`` leads to, which edge ``index`` brought in ``held``. Raises `ProtocolError`,
        `OutOfMemory`, `PeerLost` or `WaitTimeout`, after which you may wait again."""
        return self._in[self.edges[index].source].payload(header, held, timeout)

    def part(self, index: int, offset: int, nbytes: int, held: Hold) -> Hold:
        """A part of the bank that edge ``index`` arrived in, as ``held``."""
        return self._in[self.edges[index].source].part(offset, nbytes, held)

    def receive_dynamic(self, index: int) -> tuple[Hold, Spec]:
        """Waits for edge ``index``, which is dynamic. Raises `PeerLost`, `WaitTimeout` or `OutOfMemory`."""
        edge, start = self.edges[index], clock()
        assert edge.slot is not None
        incoming = self._in[edge.source]
        held = incoming.receive(index, self.step, self._timeout)
        header = unpack(memoryview(held), edge.slot + HEADER * edge.targets.index(self.me), MOST_BYTES)
        payload = incoming.payload(header, held, self._timeout)
        spans.add("wait", self.step, start, clock(), self.labels[index])
        assert header.spec is not None  # a region goes with a tensor
        return payload, header.spec

    def collect(self) -> None:
        """Lets go of payloads of any size that their targets have read. In any thread."""
        for one in [one for one in self._payloads if self._is_read(one)]:
            with contextlib.suppress(ValueError):  # another thread was faster
                self._payloads.remove(one)

    def _is_read(self, payload: _Payload) -> bool:
        return all(self._out[peer].has_read(payload.step, payload.bank.number) for peer in payload.targets)

    def wait_for_reader(self, timeout: float) -> bool:
        """Waits a moment for the oldest payload of any size to be released; False if there is none.

        Raises `PeerLost`, or `WaitTimeout` with a ``timeout`` of 0.
        """
        for one in self._payloads[:1]:
            try:
                for peer in one.targets:
                    self._out[peer].wait_until_read(one.step, one.bank.number, min(timeout, POLL))
            except WaitTimeout:
                if timeout <= 0:
                    raise
            self.collect()
            return True
        return False

    def drain(self, timeout: float) -> None:
        """Returns when nobody looks into memory of this process any more. Raises `PeerLost` or `WaitTimeout`."""
        end = time.monotonic() + timeout
        banks = [bank for bank in self._banks if self._sends or bank is not self.bank]
        read_in_place = [(one, bank) for one in self._out.values() if one.maps for bank in banks]
        read_across = [(self._out[peer], one) for one in self._payloads for peer in one.targets]
        for outgoing, bank in read_in_place:
            outgoing.wait_until_read(bank.step, bank.number, max(0.0, end - time.monotonic()))
        for outgoing, payload in read_across:
            outgoing.wait_until_read(payload.step, payload.bank.number, max(0.0, end - time.monotonic()))
        self.collect()

    # ---- loans

    def loan(self, index: int) -> Hold:
        """The memory that edge ``index``, which is lent, is to live in."""
        return self._loans[index][1]

    def loan_address(self, index: int) -> int:
        """Where that memory begins."""
        return next(iter(self._loans[index][0].values())).address

    def lend(self, index: int) -> None:
        """Makes edge ``index``, which lies in ``loan(index)``, arrive at its targets."""
        memory, start = self._loans[index][0], clock()
        for target in self._targets[index]:
            target.lend(index, self.step, memory[target.channel.device.name].view())
        spans.add("push", self.step, start, clock(), self.labels[index])

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        self._payloads.clear()
        for pool in self._lending:
            pool.forget(self)
            pool.trim()
        self._lending.clear()
        for incoming in self._in.values():
            incoming.close()
        for outgoing in self._out.values():
            outgoing.close()
        for memory in (*self._outboxes, *(memory for memory, _ in self._loans.values())):
            for region in memory.values():
                region.close()


def _last_step(bank: Bank) -> int:
    return bank.step
