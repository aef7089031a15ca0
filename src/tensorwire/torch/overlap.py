"""Pushes gradients while backward runs, and awaits new values while the next forward runs.

The post-accumulate hook that completes a bucket hands it to a thread, which copies and sends it beside backward. The
servers write the new version into the other buffer of the parameters, so backward continues with the old one. After
``step()``, the first code to get a parameter from its module, or the module's run, awaits it. Until then its memory is
full of NaN, so code that bypasses the module cannot mistake an old value for a new one. ``step()`` awaits a parameter
that no code got from its module in the step before, because compiled code or a list holds it. A module of
``torch.compile`` that is there when the optimizer is made awaits all parameters inside.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tensorwire.control.settings import step_timeout
from tensorwire.errors import ArgumentError, GradientModified
from tensorwire.observe import ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store.sharding import Bucket
from tensorwire.torch.alone import Alone
from tensorwire.torch.awaited import Awaited
from tensorwire.torch.crossings import Values, refuse_capture
from tensorwire.torch.loading import Hook
from tensorwire.torch.part import Part
from tensorwire.torch.transfer_thread import TransferThread

# Buckets below are copied by the hook itself: waking a thread costs as much.
_LARGE = 256 << 10
_CLOSE_SECONDS = 30.0


class Overlap:
    """``begin()`` opens the rounds of a step, or says that it has to wait for ``step()``."""

    def __init__(self, begin: Callable[[], bool], alone: Alone) -> None:
        self._begin, self.alone = weakref.WeakMethod(begin), alone  # hooks must not keep the optimizer
        self._timeout = step_timeout()
        self.push_thread, self._pull_thread = TransferThread("tensorwire-push"), TransferThread("tensorwire-pull")
        self._watched: list[_Watched] = []
        self._pauses = 0
        self._late = False  # this step's gradients are pushed by step()

    def watch(self, part: Part, modules: Iterable[torch.nn.Module], compiled: Iterable[torch.nn.Module]) -> None:
        """From now on pushes this part's gradients, and lets ``modules``, which own its parameters, wait for them.

        ``compiled``: modules that wait for all parameters inside, because compiled code does not.
        """
        self._watched.append(_Watched(part, self, modules, compiled))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside it gradients are accumulated and not pushed."""
        with self.alone.calling("no_sync()"):
            self._pauses += 1
        try:
            yield
        finally:
            with self.alone.hook():
                self._pauses -= 1

    def may_push(self, part: Part) -> bool:
        """Whether gradients of this backward are pushed as they come; opens the step's rounds."""
        if self._pauses or self._late:
            return False
        if not part.is_open:
            with torch.no_grad():
                begin = self._begin()
                self._late = begin is None or not begin()
        return not self._late

    def sent(self) -> None:
        """Returns when every gradient that was handed to the thread has left. Raises what came of that."""
        self.push_thread.drain(self._timeout)

    def settle(self) -> None:
        """Before ``step()`` pushes the rest. Raises `GradientModified` for what is not as it was pushed."""
        if any(watched.part.copies is None for watched in self._watched):
            self.sent()  # code may change gradients after ``step()``
        self.push_thread.check()
        for watched in self._watched:
            watched.settle()

    def forget(self) -> None:
        """The rest of a step is pushed now: the gradients that come next are the next step's."""
        self._late = False
        for watched in self._watched:
            watched.forget()

    def push(self, part: Part, buckets: Sequence[Bucket], values: Values) -> None:
        """Pushes the rest of a step. From devices copies begin here, and the thread sends what they bring."""
        if part.copies is None:
            part.push(buckets, values)
            return
        streams = part.copies.currents()
        for bucket in buckets:
            rows = {piece.tensor: values[piece.tensor] for piece in bucket.pieces}  # and no other gradient's memory
            part.fill(bucket, rows, streams)
            self.push_thread.submit(partial(_carry, part.send, part, bucket, rows))

    def postpone(self, part: Part) -> None:
        """Leaves the waiting for this round's version to the next forward, where that is safe."""
        if part.copies is not None:
            part.copies.end_step()
            self.pull(part)
        next(w for w in self._watched if w.part is part).postpone()

    def pull(self, part: Part) -> None:
        """Lets the thread copy the last version of ``part`` to devices."""
        self._pull_thread.submit(partial(_bring, part, part.latest))

    def close(self) -> None:
        """Leaves an ordinary model, with the values of the last step: no thread and no hook is left. Idempotent."""
        self.push_thread.close(_CLOSE_SECONDS)
        watched, self._watched = self._watched, []
        try:
            for each in watched:
                if not each.part.client.course.broken:
                    each.part.arrive(range(len(each.part.params)))
        finally:
            self._pull_thread.close(_CLOSE_SECONDS)
            for each in watched:
                each.release()


class _Watched:
    def __init__(
        self,
        part: Part,
        overlap: Overlap,
        modules: Iterable[torch.nn.Module],
        compiled: Iterable[torch.nn.Module],
    ) -> None:
        self.part = part
        self._overlap = overlap
        part.client.sent = overlap.sent
        if part.copies is not None:
            part.recall = partial(_recall, overlap, part)
        self._hooked: set[int] = set()
        self._pushed: dict[int, tuple[torch.Tensor, int]] = {}  # gradients of this round, as they were pushed
        self._rows: dict[int, torch.Tensor | None] = {}  # the same, each as a flat row
        self._missing: dict[int, int] = {}  # by bucket: gradients that this round still lacks
        self._streams: dict[int, dict[tuple[int, int], torch.Stream]] = {}  # by bucket: what its gradients come from
        self._ran: set[int] = set()  # got from their modules since the last step
        self._nowhere = part.shown.nowhere()
        self._compiled = False
        self._inside = 0  # calls of `compiled` modules
        self._handles: list[RemovableHandle] = []
        self._modules: list[tuple[weakref.ref[torch.nn.Module], dict[str, int]]] = []
        self._hook_gradients()
        indices = {id(p): i for i, p in enumerate(part.params)}
        for module in modules:
            own = {name: indices[id(p)] for name, p in module._parameters.items() if id(p) in indices}
            self._modules.append((weakref.ref(module), own))
            Awaited.watch(module, own, self.arrive)
            # Some modules, such as an LSTM, keep their parameters in a second place, too.
            hook = Hook(self._before_forward, list(own.values()))
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        for module in compiled:
            if inside := [indices[id(p)] for p in module.parameters() if id(p) in indices]:
                enter, leave = Hook(self._enter, inside), Hook(self._leave)
                self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def release(self) -> None:
        """Takes every hook back."""
        for handle in self._handles:
            handle.remove()
        for ref, own in self._modules:
            if (module := ref()) is not None:
                Awaited.release(module, own, self.arrive)

    # ---- backward

    def _hook_gradients(self) -> None:
        for i, p in enumerate(self.part.params):
            if p.requires_grad and i not in self._hooked:
                hook = Hook(self._ready, i)
                self._handles.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                self._hooked.add(i)

    @torch.compiler.disable  # type: ignore[untyped-decorator] # in a compiled loop, backward runs this
    def _ready(self, i: int, p: torch.Tensor) -> None:
        """Parameter ``i`` has its gradient."""
        with self._overlap.alone.hook(), self.part.client.member.explained():
            self._take(i, p)

    def _take(self, i: int, p: torch.Tensor) -> None:
        part = self.part
        self._overlap.alone.go_on()
        if i in self._pushed:
            raise GradientModified(
                f"parameter {part.names[i]!r} got a second gradient after its first had been pushed: run all "
                "backward passes of a step but the last inside optimizer.no_sync(), or use overlap=False; after a "
                "backward pass that was interrupted, end the job and start it again from a checkpoint"
            )
        if part.behind(i) and not part.is_open:
            raise ArgumentError(
                f"parameter {part.names[i]!r} was used before its new value had come: code that does not get it from "
                "its module has to call optimizer.wait() after step()"
            )
        if not self._overlap.may_push(part):
            return
        assert p.grad is not None
        stream = None if p.is_cpu else _current(p)
        if stream is not None:
            self._row(i)  # on this stream, where it is a copy
        with part.client.course.unit(f"step {part.client.updates}"):
            if not self._missing:
                self._count()
            self._pushed[i] = (p.grad, p.grad._version)
            for bucket in part.buckets[i]:
                if stream is not None:
                    self._streams.setdefault(bucket.number, {})[stream.device_index, stream.stream_id] = stream
                self._missing[bucket.number] -= 1
                if not self._missing[bucket.number]:
                    self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        """All gradients of a bucket are there. They may be changed before they are copied: ``settle`` finds out."""
        step, start = self.part.client.step, clock()
        part, rows = self.part, {piece.tensor: self._row(piece.tensor) for piece in bucket.pieces}
        send: Callable[[Bucket, Values], None] = lambda bucket, values: part.push([bucket], values)  # noqa: E731
        with torch.no_grad(), ranges.named(ranges.PUSH):
            if part.copies is not None:
                part.fill(bucket, rows, self._streams.pop(bucket.number, {}).values())
                send = part.send
            if part.copies is None and bucket.nbytes < _LARGE:
                send(bucket, rows)
            else:
                self._overlap.push_thread.submit(partial(_carry, send, part, bucket, rows))
        spans.add("push", step, start, clock())

    def _row(self, i: int) -> torch.Tensor | None:
        if i not in self._rows:
            self._rows[i] = self.part.gradient(i)
        return self._rows[i]

    def _count(self) -> None:
        part = self.part
        for bucket in part.client.order:
            self._missing[bucket.number] = len({piece.tensor for piece in bucket.pieces} & self._hooked)

    def settle(self) -> None:
        part = self.part
        for i, (gradient, version) in self._pushed.items():
            p = part.params[i]
            if p.grad is not gradient or gradient._version != version:
                raise GradientModified(
                    f"the gradient of {part.names[i]!r} was changed after it had been pushed: clip with "
                    "StoreOptimizer(max_grad_norm=), or use overlap=False"
                )
        # A version is shown before its successor is asked for: the buffer of the one before is then free.
        part.arrive(range(len(part.params)))

    def forget(self) -> None:
        """This step's gradients are pushed."""
        self._pushed.clear()
        self._rows.clear()
        self._missing.clear()
        self._streams.clear()
        self._hook_gradients()

    # ---- the next forward

    def postpone(self) -> None:
        part = self.part
        # A gradient that was born in its slot must not change before its server has read it, and code may change it.
        born = {i for i, slot in enumerate(part.slots) if slot.taken}
        later = set() if self._compiled else self._ran - born
        self._ran, self._inside = set(), 0
        part.arrive([i for i in range(len(part.params)) if i not in later])
        part.shown.hide(later, self._nowhere)

    def arrive(self, indices: Sequence[int]) -> None:
        """Somebody gets these parameters from their module."""
        if torch.compiler.is_compiling():
            self._compile()
            return
        self._overlap.alone.go_on_if_free()
        self._ran.update(indices)
        self.part.arrive(indices)

    def _before_forward(self, own: Sequence[int], module: torch.nn.Module, args: Any) -> None:
        self.arrive(own)

    def _enter(self, inside: Sequence[int], module: torch.nn.Module, args: Any) -> None:
        """Code that was compiled, or is now, runs next."""
        self._inside += 1
        self.arrive(inside)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._inside = max(0, self._inside - 1)  # one whose module raised before it was entered counts for none

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _compile(self) -> None:
        """While code is compiled. It will not come here when it runs: unless its module waits, all is there before."""
        if not self._inside:
            self._compiled = True
            self.part.arrive(range(len(self.part.params)))


def _current(p: torch.Tensor) -> torch.Stream:
    """The stream that has made the gradient of ``p``, in its hook. Raises `Unsupported` in a graph's capture."""
    stream = torch.accelerator.current_stream(p.device)
    refuse_capture(stream)
    return stream


def _carry(send: Callable[[Bucket, Values], None], part: Part, bucket: Bucket, values: Values) -> None:
    """Pushes a bucket on that thread."""
    step, start = part.client.step, clock()
    try:
        if part.copies is not None:
            part.copies.enter_thread()
        with torch.no_grad():
            send(bucket, values)
    except BaseException as error:  # the round lacks it from now on
        part.client.course.begin(f"step {part.client.updates}")
        part.client.course.note(error)
        if part.copies is not None:
            part.copies.fail(error)
        raise
    spans.add("copy", step, start, clock())


def _bring(part: Part, version: int) -> None:
    """Copies a version to devices on that thread."""
    assert part.copies is not None
    try:
        part.copies.enter_thread()
        with torch.no_grad():
            part.bring(version)
    except BaseException as error:
        part.copies.fail(error)


def _recall(overlap: Overlap, part: Part) -> None:
    """Somebody waits for copies to devices: if that thread has met an error, it begins again."""
    assert part.copies is not None
    if part.copies.recover():
        overlap.pull(part)
