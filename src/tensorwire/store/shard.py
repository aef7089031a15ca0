"""A server's side of a shard: the memory that it shares with each worker, the parameters, and their rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import Channel, Device, Region, RemoteRegion
from tensorwire.device.mapped import unmap
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import ProtocolError
from tensorwire.observe import failpoints
from tensorwire.store.admission import check_memory, check_versions
from tensorwire.store.arithmetic_rules import make_rule
from tensorwire.store.bucket_code import decoders
from tensorwire.store.endpoints import find, show
from tensorwire.store.fates import Fates
from tensorwire.store.modes import Sync
from tensorwire.store.pushes import Push, source_of
from tensorwire.store.server_state import take_state
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.step_header import NORM, StepHeader, header_bytes, unpack_header
from tensorwire.store.store_layout import Inbox, Outbox, StoreSpec, inbox
from tensorwire.store.versions.cuts import CUT_BYTES
from tensorwire.store.versions.publisher import Publisher
from tensorwire.store.versions.snapshots import Moments, ShardValues, Snapshots


class WorkerLink:
    """What a shard shares with one worker: its inbox here, its version words there.

    Attributes:
        incarnation: Of the worker.
    """

    def __init__(self, server: Shard, index: int, incarnation: int) -> None:
        self.index, self.incarnation = index, incarnation
        self._source = source_of(index, incarnation)
        self.name = member_name("worker", index)
        self.channel = server.member.channel(self.name)
        self.layout: Inbox = inbox(server.plan, server.index, len(server.spec.numeric))
        self.inbox = self.channel.device.allocate(self.layout.nbytes)
        self.memory = memoryview(self.inbox)
        buckets = server.plan.buckets[server.index]
        gradients = self.memory[self.layout.slots :]
        self._arriving = [gradients[b.shard : b.shard + b.nbytes] for b in buckets]
        self.decoders = decoders(server.spec, buckets)
        # What the rule sees of a push: what has arrived, or what comes of decoding it.
        self.slots = [slot if d is None else d.memory for slot, d in zip(self._arriving, self.decoders, strict=True)]
        self.present = [self.memory[start : start + nbytes] for start, nbytes in self.layout.present]
        self.head = self._consumer(self.layout.head_word, self.layout.head, header_bytes(len(server.spec.numeric)))
        self.norm = self._consumer(self.layout.norm_word, self.layout.norm, NORM.size)
        self.cuts = self._consumer(self.layout.cut_word, self.layout.cut, CUT_BYTES)
        self.pushes = [
            Consumer(self._word(self.layout.word(b.index)), slots=[self._arriving[b.index]]) for b in buckets
        ]
        self.join = self._word(self.layout.join_word)
        self._maps = self.channel.device.capabilities.maps
        self._theirs: list[RemoteRegion] = []
        self.pulls: list[Producer] = []
        self.norm_back: Producer
        self.together: Producer
        self.grant: Producer
        self.asked: Producer
        self.first: Producer
        self.updates: Producer

    def _word(self, offset: int) -> Word:
        return Word(self.inbox, offset, self.channel)

    def _consumer(self, word: int, offset: int, nbytes: int) -> Consumer:
        return Consumer(self._word(word), slots=[self.memory[offset : offset + nbytes]])

    def push(self, bucket: int, present: bytes, weight: float = 1.0) -> Push:
        """What the worker has pushed, which is decoded once if it is coded."""
        decoder = self.decoders[bucket]
        if decoder is not None and any(present):
            decoder.decode(self._arriving[bucket])
        return Push(self._source, self.slots[bucket], present, weight)

    def open(self, server: Shard) -> None:
        """Makes the way back: a version word a bucket, and the bytes too where the worker cannot look at ours."""
        words, target = find(server.member, f"{server.name}/{server.index}", self.name)
        buckets = server.plan.buckets[server.index]
        layout = Outbox(len(buckets))
        self._theirs = [words, *([] if target is None else [target])]
        own = not isinstance(server.spec.mode, Sync)  # this worker's copy is its own, wherever it lies
        source = None if target is None or own else server.source_on(self.channel)
        shard, space = server.plan.shard_bytes[server.index], server.plan.space_bytes
        for b in buckets:
            arrival = words.view(layout.word(b.index), 8)
            label = f"{self.name}, bucket {b.index}"
            if target is not None and own:
                # The parameters change while a version is on its way: it leaves from where the gradient was.
                slots = [target.view(b.space, b.nbytes)]
                views = [] if self._maps else [self.inbox.view(self.layout.slots + b.shard, b.nbytes)]
                self.pulls.append(Producer(self.channel, arrival, slots=slots, source=views, label=label))
                continue
            if target is None or source is None:
                self.pulls.append(Producer(self.channel, arrival))
                continue
            buffers = range(server.spec.buffers)
            slots = [target.view(i * space + b.space, b.nbytes) for i in buffers]
            views = [source.view(i * shard + b.shard, b.nbytes) for i in buffers]
            self.pulls.append(Producer(self.channel, arrival, slots=slots, source=views, label=label))
        if not buckets:
            self.pulls.append(Producer(self.channel, words.view(layout.word(0), 8)))
        self.together = Producer(self.channel, words.view(layout.together_word, 8))
        self.grant = Producer(self.channel, words.view(layout.grant_word, 8))
        self.asked = Producer(self.channel, words.view(layout.asked_word, 8))
        self.first = Producer(self.channel, words.view(layout.first_word, 8))
        self.updates = Producer(self.channel, words.view(layout.updates_word, 8))
        # Where the worker's memory cannot be mapped, our part of the norm leaves from where its own arrives.
        self.norm_back = Producer(
            self.channel,
            words.view(layout.norm_word, 8),
            slots=[words.view(layout.norm, NORM.size)],
            source=[] if self._maps else [self.inbox.view(self.layout.norm, NORM.size)],
        )

    def close(self) -> None:
        """Gives memory back."""
        self.inbox.close()
        unmap(self.channel, *self._theirs)


class Shard:
    """The shard ``index`` of the store ``name``, on this server. Made once all workers are there.

    Attributes:
        workers: What it shares with each worker, by rank and in their order; also with those that were lost.
    """

    def __init__(self, member: Member, name: str, spec: StoreSpec, servers: int, index: int) -> None:
        self.member, self.name, self.spec, self.index = member, name, spec, index
        check_versions(spec.versions, spec.rule, member.name)
        self.plan: StorePlan = spec.plan(servers)
        members = member.membership.workers
        ranks = sorted(members)
        if index == member.index:  # the first of this server's shards looks whether there is room for all
            check_memory(self.plan.registered_bytes(member.index, len(ranks), spec.buffers), member.name)
        self._regions: dict[str, Region] = {}
        self.parameters = self._allocate_parameters(ranks)
        self.workers = {rank: WorkerLink(self, rank, members[rank]) for rank in ranks}
        for worker in self.workers.values():
            self._show(worker)
        for worker in self.workers.values():
            worker.open(self)
        self.rule = make_rule(spec, self.plan, self.index, memoryview(self.parameters))
        self.fates = Fates(member.client.welcome, name, self.index)
        self._snapshots: Snapshots | None = None
        self._publisher: Publisher | None = None
        if spec.publish is not None and index == 0:
            first = self.workers[min(self.workers)]
            self._publisher = Publisher(
                member, name, self.plan, spec.publish.buffers, first.grant, first.asked, by_bucket=spec.by_bucket
            )

    def _show(self, worker: WorkerLink) -> None:
        looks = isinstance(self.spec.mode, Sync) and worker.channel.device is self.parameters.device
        looked_at = self.parameters.remote("read") if looks else None
        show(self.member, f"{self.name}/{self.index}", worker.name, worker.inbox, looked_at)

    def link(self, rank: int, incarnation: int) -> WorkerLink:
        """What it will share with a worker that joins. Waits until that has come to this store.

        Raises `PeerLost` where it is lost before.
        """
        worker = WorkerLink(self, rank, incarnation)
        self._show(worker)
        self.member.outwait(lambda _: worker.open(self))
        return worker

    def replace(self, worker: WorkerLink) -> None:
        """A worker takes part from now on, in the place of one of its rank that was lost, if any."""
        before = self.workers.pop(worker.index, None)
        self.workers = dict(sorted({**self.workers, worker.index: worker}.items()))
        if before is not None:
            self.rule.let_go(before.index, before.incarnation)
            if self.member.is_settled(before.channel):
                before.close()

    def head(self, worker: WorkerLink, step: int) -> StepHeader:
        """The head of a worker's round ``step``, once it has come."""
        head = unpack_header(self.receive(worker.head, step), len(self.spec.numeric))
        if head.step != step:
            raise ProtocolError(f"{worker.name} sent the head of round {head.step} in round {step}")
        return head

    # ---- versions for readers

    def keep_snapshots(self, moments: Moments | None = None) -> None:
        """From now on cuts are kept for readers, if these get versions. ``moments``: as for `Snapshots`."""
        if self.spec.publish is None:
            return
        count, cuts = self.spec.publish.buffers, self.workers[min(self.workers)].cuts
        values = ShardValues(self._bytes_of, self.spec.buffers)
        self._snapshots = Snapshots(self.member, self.name, self.plan, self.index, values, count, cuts, moments)

    def _bytes_of(self, buffer: int, bucket: Bucket) -> npt.NDArray[np.uint8]:
        at = buffer * self.plan.shard_bytes[self.index] + bucket.shard
        return np.asarray(memoryview(self.parameters)[at : at + bucket.nbytes])

    def before_round(self, round: int) -> None:
        """All workers' heads of a common round are there."""
        if self._snapshots is not None:
            self._snapshots.before_round(round)

    def before_write(self, bucket: int, round: int = 0) -> None:
        """A bucket is about to change."""
        if self._snapshots is not None:
            self._snapshots.before_write(bucket, round)

    def completed(self, round: int) -> None:
        """A common round is over."""
        if self._snapshots is not None:
            self._snapshots.completed(round)

    # ---- rounds

    def reach(self, update: int, state: str) -> None:
        """An update of a bucket has come to a place where tests let it fail."""
        if failpoints.listener is not None:
            failpoints.reach("primary", self.index, update, state)

    def wait_for(self, word: Word, at_least: int) -> int:
        """The value of a word that a worker raises, once that is ``at_least``. Raises as `receive`."""
        self.member.outwait(partial(word.wait, at_least))
        return word.value

    def load(self, step: int, worker: int) -> None:
        """Takes the rule's state from a worker, in that round."""
        take_state(self.member, self.name, self.index, step, self.rule, worker)

    def receive(self, edge: Consumer, step: int) -> memoryview:
        """As `Member.outwait`."""
        slot = self.member.outwait(partial(edge.receive, step))
        assert slot is not None
        return slot

    def _allocate_parameters(self, ranks: Sequence[int]) -> Region:
        """On a device whose memory workers can map, if any worker is reached that way."""
        devices: list[Device] = [self.member.channel(member_name("worker", rank)).device for rank in ranks]
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

    def close(self) -> None:
        """Frees the store's memory."""
        self.fates.close()
        for worker in self.workers.values():
            worker.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._snapshots is not None:
            self._snapshots.close()
        for region in self._regions.values():
            region.close()
        self.parameters.close()
