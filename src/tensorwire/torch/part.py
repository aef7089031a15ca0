"""A part of an optimizer's parameters: those that share one store. Construction makes the first part,
``add_param_group`` the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.launch import Worker
from tensorwire.launch.join_store import join_store
from tensorwire.observe import counters, ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store.admission import versions
from tensorwire.store.client_state import load_state
from tensorwire.store.course import Course
from tensorwire.store.late_start import await_values, take_over, take_part
from tensorwire.store.modes import Mode, Sync, settings_of
from tensorwire.store.rules import is_whole, looks_at_all
from tensorwire.store.sharding import Bucket, ParameterSpec, StorePlan
from tensorwire.store.state_transfer import Item
from tensorwire.store.step_header import LEFT_OUT, StepOperation
from tensorwire.store.store_client import StoreClient
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.every import PublishSpec
from tensorwire.torch import options
from tensorwire.torch.arguments import check_tensor
from tensorwire.torch.crossings import Streams, Values
from tensorwire.torch.device_copies import DeviceCopies
from tensorwire.torch.graph.memory.gradient_slots import close_slots, open_slots
from tensorwire.torch.shown import Shown
from tensorwire.torch.state import Share

_log = logging.getLogger("tensorwire")


@dataclass(frozen=True)
class StoreSettings:
    """What all parts of an optimizer have in common."""

    rule: str
    bucket_bytes: int
    reduce: str
    overlap: bool
    arguments: dict[str, Any] = field(default_factory=dict)  # of an optimizer that is not on the list of torch's own
    sources: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    mode: Mode = field(default_factory=Sync)
    compression: str = ""  # by name; empty: none
    shards: int | None = None  # one per server
    publish: PublishSpec | None = None  # readers get versions


class Part:
    """``groups``: entries of the optimizer's ``param_groups``, with names; their options are read at each step.

    ``course``: that of the optimizer's steps. ``without``: the ids of parameters in them that are no part of it.
    """

    def __init__(
        self,
        worker: Worker,
        groups: Sequence[dict[str, Any]],
        settings: StoreSettings,
        course: Course,
        without: Collection[int] = (),
    ) -> None:
        self._worker, self.groups, self._settings = worker, list(groups), settings
        self._named = [
            (name, p, g)
            for g, group in enumerate(groups)
            for name, p in zip(group["param_names"], group["params"], strict=True)
            if id(p) not in without
        ]
        self.names: list[str] = [name for name, _, _ in self._named]
        self.params: list[torch.nn.Parameter] = [p for _, p, _ in self._named]
        self._fixed = options.plain(groups)
        self._numeric = options.numeric(self._fixed)
        self.options()  # what cannot travel is refused before anything is agreed on
        self.client = self._connect()
        self.client.course = course
        if isinstance(settings.mode, Sync):  # in other modes workers may take as many steps as they like anyway
            worker.uneven_stores.append(self)
        self.buckets: list[list[Bucket]] = [[] for _ in self.params]  # by parameter
        for bucket in self.client.order:
            for i in {piece.tensor for piece in bucket.pieces}:
                self.buckets[i].append(bucket)
        self.slots = open_slots(self.client, self.params, self.buckets)
        try:
            self.shown = Shown(self.client, self.names, self.params, 2 if settings.overlap else 1)
            on_devices = not all(p.is_cpu for p in self.params)
            self.copies = DeviceCopies(self.client, self.shown.values[0]) if on_devices else None
        except BaseException as error:  # such as a device without memory: the other workers wait for this one
            worker.fail(error)
            raise
        self.recall: Callable[[], object] = lambda: None  # where another thread begins copies to devices: it goes on
        if worker.rank == 0:
            _log.info("%s: %s", self.client.name, self.summary())
        self.written: set[str] = set()
        self._open: list[float] | None = None  # the options that this round began with
        self._clips = False
        self._sent: set[int] = set()  # numbers of this round's buckets that are on their way
        self.latest = 0  # the last round that was closed: its version is the one to show
        if self.client.late:
            self.start_late()
        else:
            self.assign()

    def _connect(self) -> StoreClient:
        settings, worker = self._settings, self._worker
        tensors = [_spec(name, p, g) for name, p, g in self._named]
        spec = StoreSpec(
            versions(),
            tensors,
            settings.rule,
            self._fixed,
            self._numeric,
            settings.bucket_bytes,
            is_whole(settings.rule),
            settings.reduce,
            2 if settings.overlap and any(p.is_cpu for p in self.params) else 1,
            settings.arguments,
            settings.sources,
            settings.folders,
            looks_at_all(settings.rule),
            settings_of(settings.mode),
            compression=settings.compression,
            shards=settings.shards,
            overlap=settings.overlap,
            publish=settings.publish,
        )
        return join_store(worker, spec, late=True)

    @property
    def plan(self) -> StorePlan:
        """Where its tensors lie."""
        return self.client.plan

    def summary(self) -> str:
        """One line for people."""
        found = self.client.summary()
        return found if self.copies is None else f"{found}; {self.copies.describe()}"

    # ---- pushing

    def options(self) -> list[float]:
        """The numbers of all groups' options as they are now. Raises `Unsupported` for other changes of options."""
        options.check(self.groups, self._fixed)
        return options.values(self.groups, self._numeric)

    @property
    def is_open(self) -> bool:
        """Whether a round has begun and ``close_round`` has not ended it."""
        return self._open is not None

    @property
    def asks_norm(self) -> bool:
        """Whether servers wait in this round until they are told the norm."""
        return self.is_open and self._clips

    def clip(self, norm2: float) -> None:
        """Tells the servers the norm, if they wait for it in this round."""
        if self.asks_norm:
            self.client.clip(norm2)
            self._clips = False

    def skip_round(self) -> None:
        """A round in place of gradients: this step is left out by all workers."""
        self.settle()
        self.client.begin(StepOperation.SKIP, self.options())

    def open_round(self, max_norm: float) -> None:
        """Begins a round of gradients, with the options in force."""
        chosen = self.options()
        self.client.begin(StepOperation.UPDATE, chosen, max_norm)
        self._open, self._clips = chosen, max_norm > 0

    def check_options(self) -> None:
        """Raises `ArgumentError` if options have changed since the round began."""
        if self._open is not None and self._open != self.options():
            raise ArgumentError(
                "an option of the optimizer changed after the first gradients had been pushed: with overlap=True set "
                "learning rates and other options before backward()"
            )

    def gradient(self, i: int) -> torch.Tensor | None:
        """Parameter ``i``'s gradient as a flat row, ready to be pushed: one that was not born in its slot has it free.

        Raises `Unsupported` or `ArgumentError` for what cannot be sent.
        """
        p, name = self.params[i], self.names[i]
        g = p.grad
        if g is None:
            return None
        if g.layout == torch.sparse_coo:
            raise Unsupported(
                f"parameter {name!r} has a sparse gradient, and belongs to no embedding that was there with "
                "sparse=True when the optimizer was made: build it with sparse=False"
            )
        check_tensor(f"the gradient of {name!r}", g)
        if g.shape != p.shape or g.dtype != p.dtype or g.device != p.device:
            raise ArgumentError(
                f"the gradient of {name!r} is {g.dtype} {list(g.shape)} on {g.device}, "
                f"its parameter {p.dtype} {list(p.shape)} on {p.device}"
            )
        row = _row(g)
        if not self.slots[i].holds(row):
            self.slots[i].clear()
        return row

    def push(self, buckets: Sequence[Bucket], values: Values) -> None:
        """Brings values into the slots of ``buckets``, and sends these.

        Args:
            buckets: What to push.
            values: By tensor of the plan a flat row, or None.
        """
        if self.copies is None:
            for bucket in buckets:
                self.fill(bucket, values)
                self.client.push(bucket, _present(bucket, values))
            return
        streams = self.copies.currents()
        for bucket in buckets:
            self.fill(bucket, values, streams)
        counters.add(host_waits=sum(map(self.copies.crosses, buckets)))
        for bucket in buckets:
            self.send(bucket, values)

    def fill(self, bucket: Bucket, values: Values, streams: Streams = ()) -> None:
        """Brings values into the slot of ``bucket``. What was born there is there; the rest is copied.

        From devices copies only begin here, after what ``streams`` compute.
        """
        self.client.slot(bucket)
        for n, piece in enumerate(bucket.pieces):
            value = values[piece.tensor]
            if value is not None and value.is_cpu and not self.slots[piece.tensor].holds(value):
                self.client.copy(bucket, n, value[piece.start : piece.stop])
        if self.copies is not None:
            self.copies.down(bucket, values, streams)
        self._sent.add(bucket.number)

    def send(self, bucket: Bucket, values: Values) -> None:
        """Sends a bucket that was filled with ``values``, once copies from devices are there."""
        assert self.copies is not None
        self.copies.landed(bucket)
        self.client.push(bucket, _present(bucket, values))

    def unsent(self) -> list[Bucket]:
        """The buckets that have not been pushed in this round."""
        return [bucket for bucket in self.client.order if bucket.number not in self._sent]

    def close_round(self) -> None:
        """All buckets are on their way: the version of this round is the one to show."""
        self.latest = self.client.step
        self._open = None
        self._sent = set()

    # ---- what parameters show

    def behind(self, i: int) -> bool:
        """Whether parameter ``i`` does not show the version of the last closed round yet."""
        return self.shown.behind(i, self.latest)

    def show(self, indices: Iterable[int]) -> None:
        """Lets parameters show the version of the last closed round, which has come."""
        self.shown.show(indices, self.latest)

    def wait(self) -> None:
        """Waits for the version of the round that was just closed, of everything, and shows it."""
        with ranges.named(ranges.WAIT):
            self._wait()
        self.show(range(len(self.params)))

    def _wait(self) -> None:
        if self.copies is None:
            self.client.wait()
            return
        self.copies.end_step()
        version, copies = self.latest, self.copies
        try:
            self.client.wait(lambda bucket: copies.up(bucket, version))
        finally:  # also where that is interrupted
            copies.join(self.client.order)

    def bring(self, version: int) -> None:
        """Begins to copy a version to devices, bucket by bucket, as it comes."""
        assert self.copies is not None
        for bucket in self.client.order:
            self.client.wait_for(bucket, version)
            self.copies.up(bucket, version)

    def arrive(self, indices: Sequence[int]) -> None:
        """Waits for the last closed round's version of those parameters that do not show it yet, and shows it.

        On a device, the stream on which this thread computes waits for it.
        """
        late = [i for i in indices if self.behind(i)]
        if late:
            start = clock()
            with self._worker.member.explained(), ranges.named(ranges.WAIT):
                self._await([bucket for i in late for bucket in self.buckets[i]])
            self.show(late)
            spans.add("wait", self.latest, start, clock())
        if self.copies is not None:
            self.copies.join(bucket for i in indices for bucket in self.buckets[i])

    def _await(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if self.copies is None:
                self.client.wait_for(bucket, self.latest)
            elif self.client.has(bucket, self.latest):
                self.copies.up(bucket, self.latest)  # if the other thread has not come to it
            else:
                self.recall()
                self.copies.wait(bucket, self.latest)

    def bring_now(self) -> None:
        """Shows the version of the last closed round, all of which has come."""
        if self.copies is not None:
            self.copies.end_step()
            for bucket in self.client.order:
                self.copies.up(bucket, self.latest)
        everything = range(len(self.params))
        self.show(everything)
        self.arrive(everything)

    def settle(self) -> None:
        """Before servers may write to values without a push from here: no copy of them is under way."""
        if self.copies is not None:
            self.copies.settle()

    # ---- values that come from users

    def assign(self) -> None:
        """A round in which worker 0's present values become the store's, and everybody's."""
        client = self.client
        with self._worker.member.explained():
            client.ready()
            self.settle()
            with client.course.unit(f"setting the parameters of {client.name}"):
                client.begin(StepOperation.ASSIGN, self.options())
                if self._worker.rank == 0:
                    for slot in self.slots:
                        slot.clear()  # values take the way of gradients
                    self.push(client.order, [_row(p) for p in self.params])
                self.close_round()
                self._wait()
                if self.written:
                    self.shown.refresh()
                self.written = set()
                self.show(range(len(self.params)))

    def start_late(self) -> None:
        """A worker that joins gets the present values; where all have common rounds, it takes part in none yet."""
        client = self.client
        with self._worker.member.explained():
            if client.joining:
                self.latest = await_values(client)
                self.bring_now()
                return
            with client.course.unit(f"joining {client.name}"):
                take_over(client, self.options())
                self.close_round()
                self.bring_now()

    def take_part(self) -> None:
        """Comes into the common rounds, with the values of the last one. What the user set before is gone."""
        with self._worker.member.explained(), self.client.course.unit(f"joining {self.client.name}"):
            take_part(self.client)
        self.close_round()
        self.shown.refresh()
        self.written = set()
        self.wait()

    def note_written(self, params: Iterable[torch.nn.Parameter]) -> None:
        """The user changed these; the next step begins with an ``assign``."""
        by_id = {id(p): n for n, p in zip(self.names, self.params, strict=True)}
        self.written.update(by_id[id(p)] for p in params)

    # ---- the optimizer's state, and uneven numbers of steps

    @property
    def share(self) -> Share:
        """What saving and loading need to know."""
        return Share(self.client, self.params, self.groups, self._fixed)

    def load_state(self, items: Callable[[int], Iterable[Item]]) -> None:
        """A round in which worker 0's ``items(server)`` become what the servers keep."""
        self.settle()
        load_state(self.client, self.options(), items)
        self.close_round()
        self.bring_now()

    def check_pausing(self) -> None:
        """Raises `ArgumentError` in the middle of a step, and `StepInterrupted` after one that was interrupted."""
        self.client.course.check()
        if self.is_open:
            raise ArgumentError("job.uneven() ended between backward() and step(): gradients are in flight")

    def idle(self) -> None:
        """This worker's loop has ended; others may go on."""
        self.arrive(range(len(self.params)))
        self.settle()
        self.client.course.begin(self._pause)
        self.client.idle()

    def rejoin(self) -> None:
        """Waits until the loops of all have ended, and shows what came of them."""
        self.client.rejoin()
        self.close_round()
        self.bring_now()
        self.client.course.end(self._pause)

    @property
    def _pause(self) -> str:
        return f"the end of job.uneven() for {self.client.name}"

    # ---- the end

    def finish(self, *, dropped: bool = False) -> None:
        """This worker is done. Raises `StepInterrupted` where others would take a step with a part of its gradients.

        All of its gradients may have been pushed without a step.
        """
        course = self.client.course
        if self.is_open and not course.broken and self.unsent():
            course.begin(f"step {self.client.updates}")
            course.note(ArgumentError("the optimizer ended between backward() and step()"))
        elif not course.broken:
            self.clip(LEFT_OUT)
        try:
            self.client.finish()
        finally:
            if self.copies is not None:
                self.copies.close()
        close_slots(self.params, self.slots)

    def release(self) -> None:
        """The parameters become ordinary tensors, with the values that they show; gradients stay where they can."""
        for slot in self.slots:
            slot.clear()
        self.shown.release()


def _present(bucket: Bucket, values: Values) -> bytes:
    """A byte a piece, whether there is a value of it."""
    return bytes(values[piece.tensor] is not None for piece in bucket.pieces)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, flat, as they lie in memory: one that is negative by a mark alone is negated first."""
    return tensor.detach().resolve_neg().reshape(-1)


def _spec(name: str, p: torch.nn.Parameter, group: int) -> ParameterSpec:
    return ParameterSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), group)
