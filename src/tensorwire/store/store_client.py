"""A worker's side of one store: the memory of its parameters, and the course of a round. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tensorwire._native import Window, copy_is_large, gather
from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import Channel, Completion, Device, Region
from tensorwire.device.mapped import unmap
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.edge.tensor import DTYPES
from tensorwire.edge.words import wait_unless
from tensorwire.errors import ArgumentError, Unsupported, WaitTimeout
from tensorwire.observe import counters, failpoints, spans
from tensorwire.observe.spans import clock
from tensorwire.sizes import counted
from tensorwire.store.bucket_code import encoders
from tensorwire.store.endpoints import find, show
from tensorwire.store.late_start import take_part
from tensorwire.store.modes import Sync, awaited
from tensorwire.store.send_window import SendWindow
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.step_header import NORM, STEPS, StepHeader, StepOperation, header_bytes, pack_header
from tensorwire.store.store_end import StoreEnd
from tensorwire.store.store_layout import Outbox, StoreSpec, inbox
from tensorwire.store.versions.cuts import CUT_BYTES, Cut, await_grant

_TILE = 2 << 20


class _Server:
    """What this worker shares with the server of one shard."""

    def __init__(self, client: StoreClient, index: int) -> None:
        plan, spec, member = client.plan, client.spec, client.member
        self.index = index
        self.name = member_name("server", plan.server_of(index))
        self._timeout = client.timeout
        self._own_clock = client.own_clock
        self.buckets = plan.buckets[index]
        self.channel: Channel = member.channel(self.name)
        # No parameters: this worker has a copy of them, which the server writes.
        self.inbox, self.shown = find(member, f"{client.name}/{index}", self.name)
        self.layout = inbox(plan, index, len(spec.numeric))
        self.back = Outbox(len(self.buckets))
        device = self.channel.device
        self.versions: Region = client.allocate(device, self.back.nbytes)
        # Where the server's memory cannot be mapped, what it will receive is put together in ours.
        self.mapped = self.channel.map(self.inbox.view())
        self.staging = None if self.mapped else client.allocate(device, self.layout.slots)
        self.gradients = None if self.mapped else client.gradients_on(device)
        self.head = self._producer(self.layout.head, header_bytes(len(spec.numeric)), self.layout.head_word)
        self.norm = self._producer(self.layout.norm, NORM.size, self.layout.norm_word)
        self.cut = self._producer(self.layout.cut, CUT_BYTES, self.layout.cut_word)
        self.join = Producer(self.channel, self.inbox.view(self.layout.join_word, 8))
        self.pushes = [self._push(b) for b in self.buckets]
        self._put: list[Completion | None] = [None] * len(self.buckets)
        # Where rounds overlap, the next forward waits for what it needs first.
        self.send_window = SendWindow() if spec.overlap and not self.mapped else None
        part = memoryview(self.versions)[self.back.norm : self.back.norm + NORM.size]
        self.together = Word(self.versions, self.back.together_word, self.channel)
        self.grant = Word(self.versions, self.back.grant_word, self.channel)
        self.asked = Word(self.versions, self.back.asked_word, self.channel)
        self.first = Word(self.versions, self.back.first_word, self.channel)
        self.updates = Word(self.versions, self.back.updates_word, self.channel)
        self.norm_part = Consumer(Word(self.versions, self.back.norm_word, self.channel), slots=[part])

    def _producer(self, offset: int, nbytes: int, word: int) -> Producer:
        source = [] if self.staging is None else [self.staging.view(offset, nbytes)]
        slots = [self.inbox.view(offset, nbytes)]
        return Producer(self.channel, self.inbox.view(word, 8), slots=slots, source=source)

    def _push(self, bucket: Bucket) -> Producer:
        source = [] if self.gradients is None else [self.gradients.view(bucket.space, bucket.nbytes)]
        return Producer(
            self.channel,
            self.inbox.view(self.layout.word(bucket.index), 8),
            slots=[self.inbox.view(self.layout.slots + bucket.shard, bucket.nbytes)],
            source=source,
            # Rounds of a worker's own may leave buckets out: `StoreClient.slot` then knows when a slot is free.
            credit=None if self._own_clock else self.version(bucket.index),
            label=f"{self.name}, bucket {bucket.index}",
        )

    def close(self) -> None:
        """Lets go of the server's memory."""
        unmap(self.channel, self.inbox, *([] if self.shown is None else [self.shown]))

    def failure(self) -> BaseException | None:
        """What became of a push that failed, if one has."""
        if self.send_window is not None:
            return self.send_window.error
        return next((error for push in self.pushes if (error := push.failure) is not None), None)

    def push_later(self, bucket: Bucket, step: int, nbytes: int | None, present: bytes | None) -> Completion:
        """Sends a bucket in its turn; ahead of it ``present``, as `put_present`, if that has changed."""
        if present is not None:
            self.put_present(bucket.index, present)
        return self.pushes[bucket.index].send(step, nbytes=nbytes)

    def put_present(self, bucket: int, present: bytes) -> None:
        """Tells the server which pieces of a bucket have a gradient: one byte per piece, ahead of the bucket."""
        at, nbytes = self.layout.present[bucket]
        if self.mapped is not None:
            memoryview(self.mapped)[at : at + nbytes] = present
            return
        assert self.staging is not None
        earlier = self._put[bucket]
        if earlier is not None:
            earlier.wait(self._timeout)  # it was there before a version that has come; now its source is free
        memoryview(self.staging)[at : at + nbytes] = present
        self._put[bucket] = self.pushes[bucket].put(self.staging.view(at, nbytes), self.inbox.view(at, nbytes))

    def version(self, bucket: int) -> Word:
        """The word that says which version of a bucket is out; also the credit of its gradient slot."""
        return Word(self.versions, self.back.word(bucket), self.channel)


def agree(member: Member, name: str, spec: StoreSpec, plan: StorePlan, workers: int) -> None:
    """Returns when all workers have come with the same ``spec``; until then servers know nothing of the store.

    Raises `ArgumentError` (what cannot travel), `PlanMismatch` (which ends the job), `JobEnded`, or `WaitTimeout`
    where others do not come.
    """
    spec.encoded()
    lines = [
        spec.versions,
        f"rule {spec.rule} {spec.groups} {spec.arguments} {spec.sources}",
        f"mode {spec.mode!r}",
        f"compression {spec.compression or None}",
        f"reduce {spec.reduce}",
        f"overlap {spec.overlap}, {counted(spec.buffers, 'buffer')}",
        f"publish {spec.publish}",
        f"buckets of {spec.bucket_bytes} bytes",
        plan.describe(),
    ]
    if member.client.compare(name, spec.digest(plan), "\n".join(lines), workers):
        member.late.add(name)


class StoreClient(StoreEnd):
    """One worker's end of the store ``name``: push a bucket, wait for versions, see parameters in ``windows``.

    All workers have to `agree` on it before.
    """

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        super().__init__(member, name, spec, plan)
        self.own_clock = not isinstance(spec.mode, Sync)
        # Whether this worker comes late, and takes part in no rounds yet: see `late_start`.
        self.joining = self.late and not self.own_clock
        self.updates = 0  # rounds that were steps of the training
        self.published = 0  # versions for readers that this worker has made a cut for
        self._sources: dict[str, Region] = {}  # by device: what gradients leave from, laid out as the space
        self.servers: list[_Server] = [_Server(self, shard) for shard in range(plan.shards)]
        self.order: list[Bucket] = self.plan.in_order()
        self.windows = [Window(self.plan.space_bytes) for _ in range(spec.buffers)]
        self.gradients = self._place_gradients()
        filled = np.zeros(plan.space_bytes if spec.compression else 0, np.uint8).data
        self._encoders = encoders(spec, plan, filled)  # by bucket number; their memory is then what is filled
        # By the buckets' numbers: which pieces had a gradient, the round in which it was pushed last, and where its
        # pieces go.
        self._present = [b""] * len(self.order)
        self._pushed = [0] * len(self.order)
        self._rooms = [self._rooms_of(b) for b in sorted(self.order, key=lambda b: b.number)]
        self._updating = False  # in a round whose pushes are gradients
        self._setting = False  # in one that sets values or state
        self._large = copy_is_large(sum(b.nbytes for b in self.order))
        self.sent: Callable[[], object] = lambda: None  # returns when no other thread pushes in this round any more
        self._space: dict[str, Region] = {}  # by device: where servers write that cannot be mapped
        self._place_parameters(self.windows)
        self._open()

    def summary(self) -> str:
        """One line for people: what moves a step, and what servers register."""
        found = self.plan.summary(self.member.client.welcome.workers, len(self.windows))
        return found if self.spec.publish is None else f"{found}; {self.spec.publish.describe(self.plan)}"

    def _place_parameters(self, windows: Sequence[Window]) -> None:
        """Fills ``windows``: with the servers' own memory where it can be mapped, else with ours that they write."""
        plan = self.plan
        for index, at, shard, nbytes in plan.runs():
            server = self.servers[index]
            mapped = None if server.shown is None else server.channel.map(server.shown.view())
            for buffer, window in enumerate(windows):
                if mapped is not None:
                    window.place(at, mapped, buffer * plan.shard_bytes[index] + shard, nbytes)
                    continue
                device = server.channel.device
                if device.name not in self._space:
                    self._space[device.name] = self.allocate(device, plan.space_bytes * len(windows))
                window.place(at, self._space[device.name], buffer * plan.space_bytes + at, nbytes)

    def shown_windows(self) -> list[Window]:
        """The same as ``windows``, without copy-on-write, to be read alone: a driver that knew the others' memory would
        know private copies.
        """
        shown = [Window(self.plan.space_bytes, shared=True, read_only=True) for _ in self.windows]
        self._place_parameters(shown)
        return shown

    def gradients_on(self, device: Device) -> Region:
        """That device's memory that gradients leave from, where servers' memory cannot be mapped."""
        if device.name not in self._sources:
            self._sources[device.name] = self.allocate(device, self.plan.space_bytes)
        return self._sources[device.name]

    def _place_gradients(self) -> Window:
        """The slots of all buckets, laid out as the space: each tensor's side by side, whichever servers have it."""
        window = Window(self.plan.space_bytes, shared=True)
        for index, at, shard, nbytes in self.plan.runs():
            server = self.servers[index]
            if server.mapped is not None:
                window.place(at, server.mapped, server.layout.slots + shard, nbytes)
            else:
                window.place(at, self.gradients_on(server.channel.device), at, nbytes)
        return window

    def repeated(self, byte: bytes) -> Window:
        """A window of the space's size that shows one byte everywhere: a little memory, many times."""
        nbytes = min(_TILE, self.plan.space_bytes)
        tile = self.allocate(self.servers[0].channel.device, nbytes)
        memoryview(tile)[:] = byte * nbytes
        window = Window(self.plan.space_bytes)
        for at in range(0, self.plan.space_bytes, nbytes):
            window.place(at, tile, 0, min(nbytes, self.plan.space_bytes - at))
        return window

    def _open(self) -> None:
        for server in self.servers:
            ours = self._space.get(server.channel.device.name)
            parameters = None if ours is None else ours.remote("write")
            show(self.member, f"{self.name}/{server.index}", server.name, server.versions, parameters)

    # ---- one round

    def begin(
        self,
        operation: StepOperation,
        options: Sequence[float],
        max_norm: float = 0.0,
        *,
        weight: float = 1.0,
        fragment: int = 0,
    ) -> None:
        """Opens a round on every server; the arguments are those of `StepHeader`.

        Call it in a unit of ``course``, which ends when everything has been pushed.

        Raises `ArgumentError` for a ``max_norm`` below 0, and `Unsupported` where values or state are to be set after
        workers have come or gone.
        """
        if not max_norm >= 0:
            raise ArgumentError(f"the norm to clip gradients to must be above 0, not {max_norm!r}")
        self._setting = operation in (StepOperation.ASSIGN, StepOperation.LOAD)
        if self._setting and self.member.membership.epoch:
            raise Unsupported(
                "values and state cannot be set once a worker has been lost or has joined: that needs all workers that "
                "the job began with"
            )
        self.ready()
        self.step += 1
        self.updates += operation in STEPS
        self._updating = operation is StepOperation.UPDATE
        block = pack_header(StepHeader(operation, self.step, tuple(options), max_norm, weight, fragment))
        for server in self.servers:
            server.head.slot(self.step)[:] = block
            server.head.send(self.step)
        self._reach("headed")

    def ready(self) -> None:
        """Returns when the head of the next round may leave. Raises as ``wait``."""
        self.sent()
        for server in self.servers:
            if server.send_window is not None:
                try:
                    server.send_window.flush(self.timeout)
                finally:
                    self._failure(server)
            # Then the head of the round before has been read.
            word = server.together if self.own_clock else server.version(0)
            self.wait_on(server, partial(word.wait, self.step))

    def _reach(self, state: str) -> None:
        if failpoints.listener is not None:
            failpoints.reach("worker", self.member.index, self.updates, state)

    def slot(self, bucket: Bucket) -> memoryview:
        """The memory that this round's gradients of a bucket are to be put into; it is the same in every round."""
        if self.own_clock:
            self._wait_for(bucket, self._pushed[bucket.number])
        self.servers[bucket.shard_number].pushes[bucket.index].slot(self.step, self.timeout)
        return self.memory(bucket)

    def memory(self, bucket: Bucket) -> memoryview:
        """The same, without asking whether it is free: for views that are made once."""
        encoder = self._encoders.get(bucket.number)
        return self._slot(bucket) if encoder is None else encoder.memory

    def _slot(self, bucket: Bucket) -> memoryview:
        return memoryview(self.gradients)[bucket.space : bucket.space + bucket.nbytes]

    @property
    def births(self) -> bool:
        """Whether what is put into the memory of a bucket leaves from there, and is not coded first."""
        return not self.spec.compression

    def is_free(self, bucket: Bucket) -> bool:
        """Whether the slot may be filled before its next round has begun: its server has read what was pushed last.

        Raises what became of that push, if it failed.
        """
        server = self.servers[bucket.shard_number]
        if self.step < 0 or server.version(bucket.index).value < self._pushed[bucket.number]:
            return False
        server.pushes[bucket.index].flush(self.timeout)  # it has left: the server had it
        return True

    def _rooms_of(self, bucket: Bucket) -> list[memoryview]:
        memory, sizes = self.memory(bucket), [DTYPES[self.plan.tensors[p.tensor].dtype] for p in bucket.pieces]
        return [
            memory[p.offset : p.offset + (p.stop - p.start) * size]
            for p, size in zip(bucket.pieces, sizes, strict=True)
        ]

    def copy(self, bucket: Bucket, number: int, values: object) -> None:
        """Copies one piece of a bucket into its slot, which ``slot`` has said to be free.

        ``values``: a tensor on the CPU, with the elements and of the dtype of the bucket's piece ``number``.
        """
        room = self._rooms[bucket.number][number]
        gather(room, values, self._large)
        counters.add(copies=1, copied_bytes=room.nbytes)

    def push(self, bucket: Bucket, present: bytes | None = None) -> None:
        """Sends a bucket whose slot has been filled; where rounds overlap, in its turn.

        Args:
            bucket: The bucket.
            present: One byte per piece, 0 where there is no gradient; None: there are all.
        """
        server = self.servers[bucket.shard_number]
        here = b"\1" * len(bucket.pieces) if present is None else present
        news = None if self._present[bucket.number] == here else here
        self._present[bucket.number] = here
        self._pushed[bucket.number] = self.step
        if self._updating:
            self.produced[bucket.shard_number] += 1
            counters.add(pushes=1)
        nbytes = self._encode(bucket, here)
        if server.send_window is not None:
            send = partial(server.push_later, bucket, self.step, nbytes, news)
            server.send_window.submit(bucket.first, bucket.nbytes if nbytes is None else nbytes, send)
        else:
            if news is not None:
                server.put_present(bucket.index, news)
            server.pushes[bucket.index].send(self.step, nbytes=nbytes)
        self._reach("pushed")

    def _encode(self, bucket: Bucket, present: bytes) -> int | None:
        """Brings what was put into the memory of a bucket into its slot. Returns how many bytes travel; None: all."""
        encoder = self._encoders.get(bucket.number)
        if encoder is None:
            return None
        slot = self._slot(bucket)
        nbytes = encoder.nbytes if self._updating else bucket.nbytes
        if self._updating:
            encoder.encode(present, self._answer(bucket), slot)
        else:
            slot[:] = encoder.memory
        counters.add(copies=1, copied_bytes=nbytes)
        return nbytes

    def _answer(self, bucket: Bucket) -> memoryview:
        """What a server has answered last."""
        return memoryview(self.windows[0])[bucket.space : bucket.space + bucket.nbytes]

    def wait(self, arrived: Callable[[Bucket], object] | None = None) -> None:
        """Waits until every bucket has this round's version. Raises `WaitTimeout` or, for a job that ended, why.

        ``arrived``: called with each bucket once it has.
        """
        start = clock()
        for bucket in self.order:
            self.wait_for(bucket, self.step)
            if self._setting and bucket.number in self._encoders:
                self._encoders[bucket.number].reset(self._answer(bucket))
            if arrived is not None:
                arrived(bucket)
        spans.add("wait", self.step, start, clock())

    def wait_for(self, bucket: Bucket, step: int) -> None:
        """Waits until ``bucket`` has the version of round ``step``. Raises as ``wait``."""
        self._wait_for(bucket, step)
        self._reach("answered_some")

    def version_of(self, bucket: Bucket) -> int:
        """The last round whose version of a bucket has come."""
        return self.servers[bucket.shard_number].version(bucket.index).value

    def has(self, bucket: Bucket, step: int) -> bool:
        """Whether ``wait_for`` would not wait."""
        return self.version_of(bucket) >= step

    def begin_from(self, step: int, updates: int) -> None:
        """The next round follows round ``step``, with its values, after so many ``updates``."""
        self.step, self.updates = step, updates
        self.wait()
        for bucket in self.order:
            if bucket.number in self._encoders:
                self._encoders[bucket.number].reset(self._answer(bucket))
        self.joining = False

    def _wait_for(self, bucket: Bucket, step: int) -> None:
        server = self.servers[bucket.shard_number]
        self.wait_on(server, partial(server.version(bucket.index).wait, step))

    def wait_on(self, server: _Server, wait: Callable[[float], object]) -> None:
        """``wait(seconds)`` for something of a server, unless a push to it has failed: its round does not end."""
        try:
            sound = partial(wait_unless, wait, gone_on=partial(self._failure, server))
            self.member.wait(sound, self.timeout, self._place)
        except WaitTimeout:
            raise self._too_long() from None

    def _place(self) -> tuple[str, str]:
        """Where this worker waits, and, unless that is for all others, for whom."""
        return f"step {self.updates} of {self.name}", awaited(self.spec.mode, self.member.client.welcome.workers)

    def _failure(self, server: _Server) -> BaseException | None:
        """What became of a push that failed, after which this worker cannot go on."""
        error = server.failure()
        if error is not None:
            self.course.begin(f"a push of step {self.updates} to {server.name}")
            self.course.note(error)
        return error

    def norm2(self) -> float:
        """The sum of squares of all servers' gradients in a round with ``max_norm``; `LEFT_OUT` in one that a worker
        skips. Raises as ``wait``.
        """
        total = 0.0
        for server in self.servers:
            receive = partial(server.norm_part.receive, self.step)
            self.wait_on(server, receive)
            part = receive(0.0)
            assert part is not None
            total += NORM.unpack(part)[0]
        return total

    def clip(self, norm2: float) -> None:
        """Tells the servers the sum of squares of everything that is clipped together; then they update.

        `LEFT_OUT`: they keep the version that there is.
        """
        for server in self.servers:
            server.norm.slot(self.step)[:] = NORM.pack(norm2)
            server.norm.send(self.step)

    def _too_long(self) -> WaitTimeout:
        return WaitTimeout(
            f"step {self.updates} of {self.name} did not complete within {self.timeout:g} s: "
            "another worker has not reached it (TENSORWIRE_TIMEOUT sets the limit)"
        )

    def flush(self, timeout: float) -> None:
        """Returns when every bucket that was sent is in its server's memory. Raises `WaitTimeout` or `PeerLost`."""
        for server in self.servers:
            if server.send_window is not None:
                server.send_window.flush(timeout)
            for push in server.pushes:
                push.flush(timeout)

    # ---- versions for readers

    @property
    def asked(self) -> int:
        """How often readers have asked for a version."""
        return self.servers[0].asked.value

    def cut(self, run: int, step: int, *, wait: bool) -> int | None:
        """Worker 0: the state after the last round becomes a version for readers. ``run``, ``step``: as in `Manifest`.

        Where readers hold all buffers that it could go to, ``wait`` says whether to wait for one. Returns the version's
        counter; None: it was left out. Raises as ``wait``.
        """
        counter, publisher = self.published + 1, self.servers[0]
        buffer = await_grant(publisher.grant, counter, partial(self.wait_on, publisher), patient=wait)
        if buffer is None:
            return None
        with self.course.unit(f"version {counter} of {self.name}"):
            block = Cut(counter, buffer, self.step, run, step).pack()
            for server in self.servers:
                server.cut.slot(counter)[:] = block
                server.cut.send(counter)
            for server in self.servers:
                server.cut.flush(self.timeout)  # the head of the next round must not overtake it
            self.published = counter
        return counter

    # ---- uneven numbers of steps

    def idle(self) -> None:
        """Tells every server that this worker takes no part in rounds until all are idle; then call ``rejoin``."""
        self.begin(StepOperation.IDLE, [0.0] * len(self.spec.numeric))

    def rejoin(self) -> None:
        """Waits until all workers are idle, and takes over how far the others came. Raises `WaitTimeout` as ``wait``.

        The limit is for one step of the others, however many these are.
        """
        for server in self.servers:
            step = self._together(server)
        self.updates += step - self.step
        self.step = step
        self.wait()

    def _together(self, server: _Server) -> int:
        """The round in which all are idle."""
        seen: list[int] = []
        while True:
            try:
                server.together.wait(self.step, self.timeout)
                return server.together.value
            except WaitTimeout:
                now = [s.version(b.index).value for s in self.servers for b in s.buckets]
                if now == seen:
                    raise WaitTimeout(
                        f"at the end of job.uneven() no other worker took a step for {self.timeout:g} s "
                        "(TENSORWIRE_TIMEOUT sets the limit)"
                    ) from None
                seen = now

    def _leave(self) -> None:
        if self.joining:
            take_part(self)
        # Nobody may have waited for the last round: until it is over servers write to this worker's memory.
        for bucket in self.order:
            self._wait_for(bucket, self._pushed[bucket.number] if self.own_clock else self.step)
        self.begin(StepOperation.FINISH, [0.0] * len(self.spec.numeric))
        for server in self.servers:
            server.head.flush(self.timeout)
            if not server.buckets:  # what says so comes after what `begin` waited for
                self.wait_on(server, partial(server.version(0).wait, self.step - 1))
