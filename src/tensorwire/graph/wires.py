"""The memory of one plan on this host, and the words by which hosts tell each other what lies in it.

What crosses is born in, or copied to, the *outbox* of the host that makes it: one bank a run. A host that maps it reads
it in place: then a signal is all that is sent. To others it is written, into an *inbox* bank that they have granted.

Words, all 8 bytes and growing:

- ``arrival``, one an edge and target, in the target's memory: the run whose value is there, and in the low 8 bits the
  outbox bank;
- ``credit``, one a target and outbox bank, in the source's memory: the last run of that bank that the target let go of;
- ``grant``, one a target that does not map, in the source's memory: the run that may be written, and in the low 8 bits
  the inbox bank;
- ``begun``, one a target, in the source's memory: the run that the target began while it still held an earlier one.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from tensorwire.control import Member
from tensorwire.device import Channel, Completion, Device, Region, RemoteRegion
from tensorwire.errors import DeviceError, OutOfMemory, WaitTimeout
from tensorwire.graph.bank import MOST_BANKS, Bank, Held
from tensorwire.graph.plan import Edge, Plan
from tensorwire.observe import counters

LINE = 64  # bytes between words: each has its cache line
BANKS = 2  # to begin with: a run may start while the last one's tensors are alive
_POLL = 0.005  # seconds between looks at two words at once


class Door(msgspec.Struct, frozen=True):
    """What a host tells one other about a plan: its words, its first banks, and whether it maps the other's outbox."""

    words: bytes
    banks: list[bytes]
    maps: bool


def _pack(run: int, bank: int) -> int:
    return run << 8 | bank


class Source:
    """A host whose values we receive."""

    def __init__(self, wires: Wires, host: str, edges: list[int], nbytes: int) -> None:
        self.wires, self.host, self.nbytes = wires, host, nbytes
        self.channel = wires.channel(host)
        self.maps = self.channel.device.capabilities.maps
        self.place = {edge: LINE * at for at, edge in enumerate(edges)}
        self.words = self.channel.device.allocate(max(LINE, LINE * len(edges)))
        self.banks: list[Bank] = []
        self.regions: list[Region] = []
        self.granted = 0
        self.grants: dict[int, Bank] = {}
        self.now: Held | None = None
        if not self.maps:
            for _ in range(BANKS):
                self._new_inbox()

    def door(self) -> Door:
        banks = [region.remote("write").pack() for region in self.regions]
        return Door(self.words.remote("write").pack(), banks, self.maps)

    def open(self, door: Door) -> None:
        self.back = RemoteRegion.unpack(door.words)
        if self.maps:
            for packed in door.banks:
                self._map(packed)
        else:
            self._grant(1)

    def _map(self, packed: bytes) -> None:
        memory = self.channel.map(RemoteRegion.unpack(packed).view())
        assert memory is not None
        self.banks.append(Bank(len(self.banks), memoryview(memory)))

    def _new_inbox(self) -> Bank:
        if len(self.banks) == MOST_BANKS:
            raise _too_many(self.wires.plan, MOST_BANKS)
        region = self.channel.device.allocate(self.nbytes)
        self.regions.append(region)
        self.banks.append(Bank(len(self.banks), memoryview(region)))
        return self.banks[-1]

    def _grant(self, run: int) -> None:
        """Lets the source write its values of ``run`` into a bank that nobody holds."""
        if self.granted >= run:
            return
        bank = next((bank for bank in self.banks if not bank.held), None)
        if bank is None:
            bank = self._new_inbox()
            self.wires.publish_bank("in", self.host, bank.number, self.regions[-1].remote("write").pack())
        self.granted, self.grants[run] = run, bank
        bank.held = True
        self.channel.signal(self.back.view(0, 8), _pack(run, bank.number))

    def begin(self, run: int) -> None:
        self.now = None
        if not self.maps:
            self._grant(run)
        elif any(bank.held for bank in self.banks):
            self.channel.signal(self.back.view(LINE, 8), run)

    def receive(self, edge: int, run: int, timeout: float) -> Held:
        offset = self.place[edge]
        self.words.wait(offset, run << 8, timeout, self.channel)
        if self.now is None:
            number = self.words.load(offset) & 255
            self.now = self._hold(number, run)
        return self.now

    def _hold(self, number: int, run: int) -> Held:
        if not self.maps:
            return self.grants.pop(run).hold(run)
        while number >= len(self.banks):
            self._map(self.wires.find_bank("out", self.host, len(self.banks)))
        return self.banks[number].hold(run, self._credit)

    def _credit(self, bank: Bank) -> None:
        with contextlib.suppress(DeviceError):  # of a peer that is gone, or a channel that was closed
            self.channel.signal(self.back.view(LINE * (2 + bank.number), 8), bank.run)

    def end(self, run: int) -> None:
        self.now = None
        if not self.maps and any(not bank.held for bank in self.banks):
            self._grant(run + 1)


class Target:
    """A host that we send to."""

    def __init__(self, wires: Wires, host: str, edges: list[int]) -> None:
        self.wires, self.host = wires, host
        self.channel = wires.channel(host)
        self.place = {edge: LINE * at for at, edge in enumerate(edges)}
        self.words = self.channel.device.allocate(LINE * (2 + MOST_BANKS))
        self.inboxes: list[RemoteRegion] = []
        self.sent: list[Completion] = []
        self.granted = 0

    def open(self, door: Door) -> None:
        self.arrivals = RemoteRegion.unpack(door.words)
        self.maps = door.maps
        self.inboxes = [RemoteRegion.unpack(packed) for packed in door.banks]

    def let_go(self, bank: Bank) -> bool:
        """Whether the target holds nothing of the bank's last run."""
        return not self.maps or self.words.load(self.credit(bank)) >= bank.run

    def credit(self, bank: Bank) -> int:
        """Where the credit word of ``bank`` is."""
        return LINE * (2 + bank.number)

    def has_begun(self, run: int) -> bool:
        return not self.maps or self.words.load(LINE) >= run

    def inbox(self, run: int, timeout: float) -> RemoteRegion:
        """Where the values of ``run`` go to."""
        if self.granted < run << 8:
            self.words.wait(0, run << 8, timeout, self.channel)
            self.granted = self.words.load(0)
        number = self.granted & 255
        while number >= len(self.inboxes):
            self.inboxes.append(RemoteRegion.unpack(self.wires.find_bank("in", self.host, len(self.inboxes))))
        return self.inboxes[number]

    def send(self, edge: int, run: int, bank: Bank, source: Region, at: int, nbytes: int, timeout: float) -> None:
        word = self.arrivals.view(self.place[edge], 8)
        value = _pack(run, bank.number)
        if self.maps:
            self.channel.signal(word, value)
            counters.mapped(nbytes)
        else:
            target = self.inbox(run, timeout).view(at, nbytes)
            self.sent.append(self.channel.write(source.view(at, nbytes), target, (word, value)))

    def flush(self, timeout: float) -> None:
        sent, self.sent = self.sent, []
        for completion in sent:
            completion.wait(timeout)


class Wires:
    """The wires of ``plan`` at host ``me``. All hosts make theirs in the same order; ``number`` tells them apart.

    Makes regions and tells the others of them, once: an RPC and a registration each. Raises `OutOfMemory`, `PeerLost`,
    `WaitTimeout` or `JobEnded`.
    """

    def __init__(self, plan: Plan, me: str, member: Member, number: int, timeout: float) -> None:
        self.plan, self.me, self.member, self.number = plan, me, member, number
        self.timeout = timeout
        self.run = 0
        self.bank: Bank | None = None
        self.own: Held | None = None
        incoming: dict[str, list[int]] = {}
        outgoing: dict[str, list[int]] = {}
        for index, edge in enumerate(plan.edges):
            if me in edge.targets:
                incoming.setdefault(edge.source, []).append(index)
            if edge.source == me:
                for target in edge.targets:
                    outgoing.setdefault(target, []).append(index)
        outboxes = dict(plan.outbox)
        self.nbytes = outboxes[me]
        self.sources = {host: Source(self, host, edges, outboxes[host]) for host, edges in incoming.items()}
        self.targets = {host: Target(self, host, edges) for host, edges in outgoing.items()}
        self.banks: list[Bank] = []
        self.regions: list[dict[str, Region]] = []  # of each bank, by device
        if self.targets:
            for _ in range(BANKS):
                self._new_bank()
        self._exchange()

    def channel(self, host: str) -> Channel:
        """To another host of the plan."""
        role, _, index = host.partition(":")
        return self.member.channel(role, int(index))

    # ---- set-up

    def _exchange(self) -> None:
        for host, source in self.sources.items():
            self._tell(f"sink/{host}", host, source.door())
        for host, target in self.targets.items():
            banks = []
            if target.channel.device.capabilities.maps:
                banks = [regions[target.channel.device.name].remote("write").pack() for regions in self.regions]
            self._tell(f"source/{host}", host, Door(target.words.remote("write").pack(), banks, False))
        for host, target in self.targets.items():
            target.open(self._hear(f"sink/{self.me}", host))
        for host, source in self.sources.items():
            source.open(self._hear(f"source/{self.me}", host))

    def _key(self, owner: str, what: str) -> str:
        return f"graph/{self.number}/{owner}/{what}"

    def _tell(self, what: str, host: str, door: Door) -> None:
        self.member.client.publish(self._key(self.me, what), msgspec.msgpack.encode(door), to=[host.replace(":", " ")])

    def _hear(self, what: str, host: str) -> Door:
        return msgspec.msgpack.decode(self.member.client.lookup(self._key(host, what), self.timeout), type=Door)

    def publish_bank(self, way: str, host: str, number: int, packed: bytes) -> None:
        """Tells ``host`` of another bank: rare, when earlier runs are held for long."""
        self.member.client.publish(self._key(self.me, f"{way}/{host}/{number}"), packed, to=[host.replace(":", " ")])

    def find_bank(self, way: str, host: str, number: int) -> bytes:
        """Another bank of ``host``."""
        return self.member.client.lookup(self._key(host, f"{way}/{self.me}/{number}"), self.timeout)

    def _new_bank(self) -> Bank:
        if len(self.banks) == MOST_BANKS:
            raise _too_many(self.plan, MOST_BANKS)
        devices: dict[str, Device] = {}
        for target in self.targets.values():
            devices[target.channel.device.name] = target.channel.device
        first = next((device for device in devices.values() if device.capabilities.maps), None)
        first = first or next(iter(devices.values()))
        region = first.allocate(self.nbytes)
        regions = {first.name: region}
        for name, device in devices.items():
            if name != first.name:
                regions[name] = device.register(memoryview(region))
        self.regions.append(regions)
        self.banks.append(Bank(len(self.banks), memoryview(region)))
        return self.banks[-1]

    # ---- one run

    def begin(self) -> None:
        """Starts the next run: takes a bank of the outbox that nobody holds."""
        self.run += 1
        for source in self.sources.values():
            source.begin(self.run)
        if self.targets:
            self.bank = self._free_bank()
            self.own = self.bank.hold(self.run)

    def _free_bank(self) -> Bank:
        targets = list(self.targets.values())
        end = time.monotonic() + self.timeout
        for target in targets:
            target.flush(self.timeout)
        while True:
            for bank in self.banks:
                if not bank.held and all(target.let_go(bank) for target in targets):
                    return bank
            if all(bank.held for bank in self.banks) or all(t.has_begun(self.run) for t in targets):
                return self._grow(targets)
            bank = next(bank for bank in self.banks if not bank.held)
            waiting = next(t for t in targets if not t.let_go(bank))
            with contextlib.suppress(WaitTimeout):
                waiting.words.wait(waiting.credit(bank), bank.run, min(_POLL, end - time.monotonic()), waiting.channel)
            if time.monotonic() >= end:
                raise WaitTimeout(f"{waiting.host} did not begin run {self.run} of graph {self.plan.name} in time")

    def _grow(self, targets: list[Target]) -> Bank:
        bank = self._new_bank()
        for target in targets:
            if target.maps:
                region = self.regions[-1][target.channel.device.name]
                self.publish_bank("out", target.host, bank.number, region.remote("write").pack())
        return bank

    def send(self, index: int, nbytes: int) -> None:
        """Makes edge ``index``, whose ``nbytes`` lie in the outbox, arrive at its targets."""
        edge, bank = self.plan.edges[index], self.bank
        assert bank is not None
        assert edge.slot is not None
        for host in edge.targets:
            target = self.targets[host]
            source = self.regions[bank.number][target.channel.device.name]
            target.send(index, self.run, bank, source, edge.slot + edge.offset, nbytes, self.timeout)

    def receive(self, index: int) -> Held:
        """Waits for edge ``index``; the bytes of its source's outbox, in which it lies where the plan says."""
        edge: Edge = self.plan.edges[index]
        return self.sources[edge.source].receive(index, self.run, self.timeout)

    def end(self) -> None:
        """Ends the run: what it left is held by its tensors alone."""
        self.own = None
        for source in self.sources.values():
            source.end(self.run)

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        for source in self.sources.values():
            for region in (source.words, *source.regions):
                region.close()
        for target in self.targets.values():
            target.words.close()
        for regions in self.regions:
            for region in regions.values():
                region.close()


def _too_many(plan: Plan, banks: int) -> OutOfMemory:
    return OutOfMemory(
        f"graph {plan.name}: tensors of {banks} earlier runs are still held, such as losses with their graphs in a "
        "list: detach() them"
    )


def same_as_others(plan: Plan, member: Member, number: int, parties: int, timeout: float) -> None:
    """Returns when all hosts have this plan. Raises `PlanMismatch`, which ends the job with what differs."""
    member.client.compare(f"graph {number}", plan.digest, plan.text, parties, timeout)
