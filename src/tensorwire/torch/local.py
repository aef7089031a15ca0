"""Workers that train with optimizers of their own and exchange parameters on the servers now and then.

The parameters stay in ordinary memory, or on their device. The servers' answers lie in the store's memory, and are
mixed into them. Copies from and to a device make this thread wait, once an exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from tensorwire.launch import Worker
from tensorwire.launch.join_store import join_store
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock
from tensorwire.store.client_state import load_state
from tensorwire.store.course import Course
from tensorwire.store.late_start import take_over
from tensorwire.store.local_exchanges import LocalExchanges, local_spec
from tensorwire.store.modes import Local
from tensorwire.store.rules import pieces_over
from tensorwire.store.sharding import Bucket, ParameterSpec
from tensorwire.store.step_header import StepOperation
from tensorwire.store.store_client import StoreClient
from tensorwire.store.versions.every import PublishSpec
from tensorwire.torch import local_state

_log = logging.getLogger("tensorwire")


class LocalTraining:
    """The exchanges of one worker. ``named``: its parameters; ``inner`` updates them."""

    def __init__(
        self,
        worker: Worker,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        mode: Local,
        inner: Callable[[], None],
        bucket_bytes: int,
        compression: str,
        shards: int | None,
        publish: PublishSpec | None,
        course: Course,
    ) -> None:
        self._worker, self._inner = worker, inner
        self.params = [p for _, p in named]
        tensors = [ParameterSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named]
        spec = local_spec(
            mode, tensors, worker.num_workers, worker.num_servers, bucket_bytes, compression, shards, publish
        )
        self.client: StoreClient = join_store(worker, spec, late=True)
        self.client.course = course
        if worker.rank == 0:
            _log.info("%s: %s", self.client.name, self.summary())
        self._exchanges = LocalExchanges(self.client, self._fill, partial(self._take, change=self._change))
        self._slots = {b.number: self._pieces(self.client.memory(b), b, 0) for b in self.client.order}
        window = memoryview(self.client.windows[0])
        self._answers = {b.number: self._pieces(window, b, b.space) for b in self.client.order}
        self.written = False
        self._loaded: dict[str, Any] | None = None  # what the next step is to begin from
        self.assign()

    def _pieces(self, memory: memoryview, bucket: Bucket, start: int) -> list[torch.Tensor]:
        return pieces_over(self.client.plan, memory, bucket.pieces, start)

    def summary(self) -> str:
        """One line for people."""
        return self.client.summary()

    # ---- a step

    @property
    def steps(self) -> int:
        """How many steps are over."""
        return self._exchanges.steps

    def count(self, tokens: float) -> None:
        """Adds to what this worker's next contribution of each fragment weighs."""
        self._exchanges.count(tokens)

    @torch.no_grad()
    def step(self, began: float, skip: bool = False) -> None:
        """A step of this worker's own optimizer, and the exchanges that are due after it.

        ``began``: when the script began to compute for it; the optimizer's own step is part of that.
        """
        with self._worker.member.explained():
            if self._loaded is not None:
                self._give(self._loaded)
            if self.written:
                self._exchanges.drop()
                self.assign()
            if not skip:
                self._inner()
            spans.add("compute", self.client.step, began, clock())
            self._exchanges.step()

    def _fill(self, bucket: Bucket) -> None:
        """What this worker contributes: the way that it went since the last version, or where it is."""
        copied = 0
        for piece, slot, last in zip(
            bucket.pieces, self._slots[bucket.number], self._answers[bucket.number], strict=True
        ):
            own = self.params[piece.tensor].detach().reshape(-1)[piece.start : piece.stop].cpu()
            if self._exchanges.sends_change and own.is_floating_point():
                torch.sub(last, own, out=slot)
            else:
                slot.copy_(own)
            copied += slot.nbytes
        counters.add(copies=len(bucket.pieces), copied_bytes=copied)

    def _take(self, bucket: Bucket, change: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """``change(own, answer)`` changes each piece of the parameters by what the server has answered."""
        for piece, answer in zip(bucket.pieces, self._answers[bucket.number], strict=True):
            p = self.params[piece.tensor]
            flat = p.detach().reshape(-1)  # a copy, where it is not contiguous
            change(flat[piece.start : piece.stop], answer.to(p.device))
            if flat.data_ptr() != p.data_ptr():
                p.copy_(flat.view(p.shape))

    def _change(self, own: torch.Tensor, answer: torch.Tensor) -> None:
        if not own.is_floating_point():
            return
        kept, taken = self._exchanges.shares
        if not kept:
            own.copy_(answer)
            return
        if kept != 1:
            own.mul_(kept)
        own.add_(answer, alpha=taken)

    def go_on(self) -> None:
        """Does what is left of the exchanges of a step that was interrupted."""
        self._exchanges.go_on()

    def complete(self) -> None:
        """Waits for all that is on its way, and mixes it."""
        self._exchanges.complete()

    # ---- values that users set

    @torch.no_grad()
    def assign(self) -> None:
        """Worker 0's present values become the store's, and everybody's."""
        what = f"setting the parameters of {self.client.name}"
        with self._worker.member.explained(), self.client.course.unit(what):
            if self.client.late and not self.client.step:
                take_over(self.client, self._exchanges.options)
                self._exchanges.take_over()
            else:
                self._set(self.params)
            self.written = False
            for bucket in self.client.order:
                self._take(bucket, torch.Tensor.copy_)

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        """Worker 0's ``values``, by parameter, become the store's."""
        client = self.client
        client.begin(StepOperation.ASSIGN, self._exchanges.options)
        for bucket in client.order if self._worker.rank == 0 else ():
            client.slot(bucket)
            for piece, slot in zip(bucket.pieces, self._slots[bucket.number], strict=True):
                slot.copy_(values[piece.tensor].detach().reshape(-1)[piece.start : piece.stop])
            client.push(bucket)
        client.wait()

    def note_written(self, params: Iterable[torch.nn.Parameter]) -> None:
        """The user set values, which the next step makes everybody's."""
        self.written = True

    # ---- the store's state

    def state(self) -> dict[str, Any]:
        """What the servers have, and how far this worker is. Raises `WaitTimeout`, `PeerLost` or `JobEnded`."""
        mine = {"steps": self._exchanges.steps, "tokens": list(self._exchanges.tokens)}
        if self._loaded is not None:
            return {**self._loaded, **mine}
        values, state = local_state.fetch(self.client)
        return {"parameters": values, "state": state, **mine}

    def shared(self) -> dict[str, torch.Tensor]:
        """Copies of what the servers have, but for integers, which are each worker's own. Raises as `state`."""
        if self._loaded is not None:
            values = {name: value.clone() for name, value in self._loaded["parameters"].items()}
        else:
            values = local_state.fetch_values(self.client)
        return {name: value for name, value in values.items() if value.is_floating_point()}

    def check(self, found: Any) -> None:
        """Raises `ArgumentError` for what `state` has not returned for such parameters."""
        local_state.check(self.client.plan, found, len(self._exchanges.tokens))

    def load(self, found: dict[str, Any]) -> None:
        """The next step begins from what `check` has found good."""
        self._exchanges.steps, self._exchanges.tokens = found["steps"], list(found["tokens"])
        self._loaded = found

    def _give(self, found: dict[str, Any]) -> None:
        """The servers have this, as worker 0 has it, and every worker goes on with the parameters that it has."""
        self._exchanges.drop()
        plan = self.client.plan
        with self.client.course.unit(f"loading the state of {self.client.name}"):
            self._set([found["parameters"][t.name] for t in plan.tensors])
            load_state(self.client, self._exchanges.options, partial(local_state.items, plan, found["state"]))
            self.written, self._loaded = False, None

    def finish(self, *, dropped: bool = False) -> None:
        """This worker is done. What is on its way is taken into its parameters, unless these may be others' by now."""
        if self.client.step >= 0:
            if not self.client.course.broken:
                with torch.no_grad():
                    (self._exchanges.drop if dropped else self.complete)()
            self.client.finish()

    def release(self) -> None:
        """The parameters are ordinary tensors."""
