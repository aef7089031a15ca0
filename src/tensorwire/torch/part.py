"""A part of an optimizer's parameters: those that share one store. Construction makes the first part,
``add_param_group`` the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorwire._native import Window
from tensorwire.errors import ArgumentError, ParameterModified, Unsupported
from tensorwire.launch import Worker
from tensorwire.launch.join_store import join_store
from tensorwire.observe import counters, ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store.admission import versions
from tensorwire.store.client_state import load_state
from tensorwire.store.course import Course
from tensorwire.store.modes import Mode, Sync, settings_of
from tensorwire.store.rules import is_whole, looks_at_all, tensor_over
from tensorwire.store.sharding import PAGE, Bucket, ParameterSpec, StorePlan
from tensorwire.store.state_transfer import Item
from tensorwire.store.step_header import LEFT_OUT, StepOperation
from tensorwire.store.store_client import StoreClient
from tensorwire.store.store_layout import StoreSpec
from tensorwire.torch import options
from tensorwire.torch.arguments import check_tensor
from tensorwire.torch.device_copies import DeviceCopies, Streams, Values
from tensorwire.torch.graph.memory.gradient_slots import close_slots, open_slots
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
        self._views = self._make_views()
        on_devices = any(p.device.type != "cpu" for p in self.params)
        self.copies = DeviceCopies(self.client, self._views[0]) if on_devices else None
        self.recall: Callable[[], object] = lambda: None  # where another thread begins copies to devices: it goes on
        if worker.rank == 0:
            _log.info("%s: %s", self.client.name, self.summary())
        self.written: set[str] = set()
        self._pages_seen = True  # whether the kernel tells which pages of a window were written to
        self._open: list[float] | None = None  # the options that this round began with
        self._clips = False
        self._sent: set[int] = set()  # numbers of this round's buckets that are on their way
        self.latest = 0  # the last round that was closed: its version is the one to show
        self._shown = [-1] * len(self.params)  # which buffer each parameter shows
        self._showing = threading.Lock()  # with overlap, any thread that runs a module shows its parameters
        self._marks = [(0, 0)] * len(self.params)
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
            2 if settings.overlap and any(p.device.type == "cpu" for p in self.params) else 1,
            settings.arguments,
            settings.sources,
            settings.folders,
            looks_at_all(settings.rule),
            settings_of(settings.mode),
            compression=settings.compression,
            shards=settings.shards,
        )
        return join_store(worker, spec)

    @property
    def plan(self) -> StorePlan:
        """Where its tensors lie."""
        return self.client.plan

    def summary(self) -> str:
        """One line for people."""
        found = self.plan.summary(self._worker.num_workers, len(self.client.windows))
        return found if self.copies is None else f"{found}; {self.copies.describe()}"

    def _make_views(self) -> list[list[torch.Tensor]]:
        """What parameters show, in turn, version by version: on a device always the same memory, their own."""
        views = []
        for turn in range(2 if self._settings.overlap else 1):
            views.append(self._tensors(self.client.windows[turn % len(self.client.windows)]))
            for i, p in enumerate(self.params):
                if p.device.type != "cpu":
                    views[turn][i] = p.data.contiguous() if turn == 0 else views[0][i]
        return views

    def _tensors(self, window: Window) -> list[torch.Tensor]:
        """The parameters' tensors in a window."""
        plan, memory = self.client.plan, memoryview(window)
        return [
            tensor_over(memory, spec.dtype, offset, spec.elements).view(spec.shape)
            for spec, offset in zip(plan.tensors, plan.offsets, strict=True)
        ]

    def nowhere(self) -> list[torch.Tensor]:
        """Tensors of the parameters' shapes, full of NaN: a little memory, seen many times."""
        found = self._tensors(self.client.repeated(b"\xff"))
        for i, p in enumerate(self.params):
            if p.device.type != "cpu":
                byte = torch.full((p.element_size(),), 0xFF, dtype=torch.uint8, device=p.device)
                found[i] = byte.view(p.dtype).expand(p.shape) if p.dim() else byte.view(p.dtype)[0]
        return found

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
        for bucket in buckets:
            counters.add(host_waits=1)
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
        return self._shown[i] != self._buffer

    @property
    def _buffer(self) -> int:
        return self.latest % len(self._views)

    def show(self, indices: Iterable[int]) -> None:
        """Lets parameters show the version of the last closed round, which has come.

        As an update in place does, it raises their version count: a graph made before cannot be run backward.
        """
        buffer = self._buffer
        changed = list(indices)
        with self._showing:
            for i in changed:
                if self._shown[i] != buffer:
                    self.params[i].data = self._views[buffer][i]
            self._mark(changed)
            for i in changed:  # last, so that one who was interrupted here shows them again
                self._shown[i] = buffer

    def _mark(self, changed: Sequence[int]) -> None:
        torch.autograd.graph.increment_version([self.params[i] for i in changed])
        for i in changed:
            self._marks[i] = (self.params[i].data_ptr(), self.params[i]._version)

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
        self.client.wait(lambda bucket: copies.up(bucket, version))
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

    def hide(self, indices: Iterable[int], nowhere: Sequence[torch.Tensor]) -> None:
        """Lets parameters show ``nowhere`` until ``show``, so no code mistakes the last version for this one."""
        hidden = list(indices)
        with self._showing:
            for i in hidden:  # first, so that one who was interrupted here shows them again
                self._shown[i] = -1
                self.params[i].data = nowhere[i]
            self._mark(hidden)

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
                    for window in client.windows:  # what was written through one is in the store now
                        window.refresh(0, window.nbytes)
                self.written = set()
                self.show(range(len(self.params)))

    def note_written(self, params: Iterable[torch.nn.Parameter]) -> None:
        """The user changed these; the next step begins with an ``assign``."""
        by_id = {id(p): n for n, p in zip(self.names, self.params, strict=True)}
        self.written.update(by_id[id(p)] for p in params)

    def check_parameters(self) -> None:
        """Raises `ParameterModified` for values that changed without the store."""
        changed = []
        for name, p, (address, version) in zip(self.names, self.params, self._marks, strict=True):
            if p.data_ptr() != address:
                raise ParameterModified(
                    f"parameter {name!r} was moved out of the store's memory (.to(), .half(), .data =): "
                    "convert or move the model before constructing the optimizer"
                )
            if p._version != version and name not in self.written:
                changed.append(name)
        if not changed and not self.written:
            changed = self._stray()
        if changed:
            which = " or ".join(repr(name) for name in changed)
            raise ParameterModified(
                f"parameter {which} was changed in place; its values live in the store and only step() changes "
                "them: call optimizer.write_parameters() on every worker after an intended change"
            )

    def _stray(self) -> list[str]:
        """Who lies in the first page that was written to through a window, past autograd's own version count.

        On a device nobody can tell.
        """
        if all(p.device.type != "cpu" for p in self.params):
            return []
        try:
            pages = [page for window in self.client.windows for page in window.modified(1)]
        except OSError as error:
            if self._pages_seen:
                self._pages_seen = False
                _log.warning("changes of parameters through .data will go unnoticed here: %s", error)
            return []
        tensors, offsets = self.client.plan.tensors, self.client.plan.offsets
        return [
            name
            for page in pages
            for name, t, start in zip(self.names, tensors, offsets, strict=True)
            if start < page + PAGE and page < start + t.nbytes
        ]

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

    @torch.no_grad()
    def release(self) -> None:
        """The parameters become ordinary tensors, with the values that they show; gradients stay where they can."""
        for slot in self.slots:
            slot.clear()
        for p, (address, _) in zip(self.params, self._marks, strict=True):
            if p.is_cpu and p.data_ptr() == address:  # nobody has moved it
                p.data = p.detach().clone()


def _present(bucket: Bucket, values: Values) -> bytes:
    """A byte a piece, whether there is a value of it."""
    return bytes(values[piece.tensor] is not None for piece in bucket.pieces)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, flat, as they lie in memory: one that is negative by a mark alone is negated first."""
    return tensor.detach().resolve_neg().reshape(-1)


def _spec(name: str, p: torch.nn.Parameter, group: int) -> ParameterSpec:
    return ParameterSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), group)
