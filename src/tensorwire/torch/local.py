"""Workers that train by themselves, with optimizers of their own, and meet on the servers now and then.

The parameters stay where they are. What the servers answer lies in memory of the store's, and is mixed into them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.launch import Worker
from tensorwire.launch.join_store import join_store
from tensorwire.observe import counters, ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store.admission import versions
from tensorwire.store.client_state import load_state
from tensorwire.store.modes import EASGD, DiLoCo, Local, LocalSGD, settings_of
from tensorwire.store.rule_names import ELASTIC, MEAN
from tensorwire.store.rules import tensor_over
from tensorwire.store.sharding import Bucket, ParameterSpec
from tensorwire.store.step_header import StepOperation
from tensorwire.store.store_client import StoreClient
from tensorwire.store.store_layout import StoreSpec
from tensorwire.torch import local_state, options

_log = logging.getLogger("tensorwire")


@dataclass(frozen=True)
class _Exchange:
    """A fragment that has been sent: in round ``round``, to be mixed after step ``due``."""

    fragment: int
    round: int
    due: int


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
    ) -> None:
        self._worker, self._mode, self._inner = worker, mode, inner
        self.params = [p for _, p in named]
        self._options: list[float] = []
        spec = self._spec(named, bucket_bytes, compression)
        self._check(spec, worker.num_servers)
        self.client: StoreClient = join_store(worker, spec)
        if worker.rank == 0:
            _log.info("%s: %s", self.client.name, self.summary())
        worker.at_close(self.finish)
        self._fragments = self._divide()
        self._slots = {b.number: self._pieces(self.client.memory(b), b, 0) for b in self.client.order}
        window = memoryview(self.client.windows[0])
        self._answers = {b.number: self._pieces(window, b, b.space) for b in self.client.order}
        self._on_the_way: deque[_Exchange] = deque()
        self.steps = 0
        self._tokens = [0.0] * len(self._fragments)
        self.written = False
        self._loaded: dict[str, Any] | None = None  # what the next step is to begin from
        self.assign()

    def _spec(self, named: Sequence[tuple[str, torch.nn.Parameter]], bucket_bytes: int, compression: str) -> StoreSpec:
        tensors = [ParameterSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named]
        mode, rule, group = self._mode, MEAN, dict[str, Any]()
        if isinstance(mode, EASGD):
            rule, group = ELASTIC, {"alpha": 0.9 / self._worker.num_workers if mode.alpha is None else mode.alpha}
        elif isinstance(mode, DiLoCo):
            outer = mode.outer
            chosen = {"lr": outer.lr, "momentum": outer.momentum, "nesterov": outer.nesterov}
            rule, group = "SGD", options.defaults(torch.optim.SGD, {**chosen, "fused": True})
        fixed = options.plain([group])
        numeric = options.numeric(fixed)
        self._options = options.values([group], numeric)
        return StoreSpec(
            versions(),
            tensors,
            rule,
            fixed,
            numeric,
            bucket_bytes,
            False,
            mode_settings=settings_of(mode),
            compression=compression,
        )

    def _check(self, spec: StoreSpec, servers: int) -> None:
        """What the mode does not go with is refused before anything is agreed on."""
        mode = self._mode
        if not isinstance(mode, DiLoCo):
            return
        workers = self._worker.num_workers
        if mode.quorum is not None and mode.quorum > workers:
            raise ArgumentError(f"quorum={mode.quorum} needs as many workers, and this job has {workers}")
        if servers:
            spec.plan(servers).fragments(mode.fragments)

    def _divide(self) -> list[list[Bucket]]:
        count = self._mode.fragments if isinstance(self._mode, DiLoCo) else 1
        numbers = self.client.plan.fragments(count)
        return [[b for b in self.client.order if numbers[b.number] == f] for f in range(count)]

    def _pieces(self, memory: memoryview, bucket: Bucket, start: int) -> list[torch.Tensor]:
        tensors = self.client.plan.tensors
        return [tensor_over(memory, tensors[p.tensor].dtype, start + p.offset, p.stop - p.start) for p in bucket.pieces]

    def summary(self) -> str:
        """One line for people."""
        return self.client.plan.summary(self._worker.num_workers)

    # ---- a step

    def count(self, tokens: float) -> None:
        """Adds to what this worker's next contribution of each fragment weighs."""
        self._tokens = [n + tokens for n in self._tokens]

    @torch.no_grad()
    def step(self, began: float, skip: bool = False) -> None:
        """A step of this worker's own optimizer, and the exchanges that are due after it.

        ``began``: when the script began to compute for it; the optimizer's own step is part of that.
        """
        try:
            if self._loaded is not None:
                self._give(self._loaded)
            if self.written:
                self._drop()
                self.assign()
            if not skip:
                self._inner()
            spans.add("compute", self.client.step, began, clock())
            self.steps += 1
            self._mix_due()
            for fragment in self._due():
                self._send(fragment)
            self._mix_due()
        except TensorwireError as error:
            raise self._worker.member.explain(error) from None

    def _due(self) -> Iterable[int]:
        """The fragments whose turn it is."""
        every, count = self._mode.every, len(self._fragments)
        return [f for f in range(count) if self.steps % every == (f + 1) * every // count % every]

    def _weight(self, fragment: int) -> float:
        if not isinstance(self._mode, DiLoCo) or self._mode.weight == "mean":
            return 1.0
        tokens, self._tokens[fragment] = self._tokens[fragment], 0.0
        if not tokens > 0:
            raise ArgumentError('weight="tokens" needs optimizer.count(tokens) before step(), in every exchange')
        return tokens

    def _send(self, fragment: int) -> None:
        client, weight, start = self.client, self._weight(fragment), clock()
        with ranges.named(ranges.PUSH):
            client.begin(StepOperation.UPDATE, self._options, weight=weight, fragment=fragment)
            for bucket in self._fragments[fragment]:
                client.slot(bucket)
                self._fill(bucket)
                client.push(bucket)
        delay = 0 if isinstance(self._mode, LocalSGD) else self._mode.delay
        self._on_the_way.append(_Exchange(fragment, client.step, self.steps + delay))
        spans.add("push", client.step, start, clock())

    def _fill(self, bucket: Bucket) -> None:
        """What this worker contributes: the way that it went since the last version, or where it is."""
        copied = 0
        for piece, slot, last in zip(
            bucket.pieces, self._slots[bucket.number], self._answers[bucket.number], strict=True
        ):
            own = self.params[piece.tensor].detach().reshape(-1)[piece.start : piece.stop]
            if isinstance(self._mode, DiLoCo) and own.is_floating_point():
                torch.sub(last, own, out=slot)
            else:
                slot.copy_(own)
            copied += slot.nbytes
        counters.add(copies=len(bucket.pieces), copied_bytes=copied)

    def _mix_due(self) -> None:
        while self._on_the_way and self._on_the_way[0].due <= self.steps:
            self._mix(self._on_the_way.popleft())

    def _mix(self, exchange: _Exchange) -> None:
        """Takes the answer to an exchange into the parameters, once it has come."""
        self._receive(exchange)
        for bucket in self._fragments[exchange.fragment]:
            self._take(bucket, self._change)

    def _receive(self, exchange: _Exchange) -> None:
        start = clock()
        with ranges.named(ranges.WAIT):
            for bucket in self._fragments[exchange.fragment]:
                self.client.wait_for(bucket, exchange.round)
        spans.add("wait", exchange.round, start, clock())

    def _take(self, bucket: Bucket, change: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """``change(own, answer)`` changes each piece of the parameters by what the server has answered."""
        for piece, answer in zip(bucket.pieces, self._answers[bucket.number], strict=True):
            p = self.params[piece.tensor]
            flat = p.detach().reshape(-1)  # a copy, where it is not contiguous
            change(flat[piece.start : piece.stop], answer)
            if flat.data_ptr() != p.data_ptr():
                p.copy_(flat.view(p.shape))

    def _change(self, own: torch.Tensor, answer: torch.Tensor) -> None:
        if not own.is_floating_point():
            return
        if isinstance(self._mode, EASGD):
            own.sub_(answer)
        elif isinstance(self._mode, DiLoCo) and self._mode.alpha:
            own.mul_(self._mode.alpha).add_(answer, alpha=1 - self._mode.alpha)
        else:
            own.copy_(answer)

    def complete(self) -> None:
        """Waits for all that is on its way, and mixes it."""
        while self._on_the_way:
            self._mix(self._on_the_way.popleft())

    def _drop(self) -> None:
        """Waits for all that is on its way, which was made of values that no longer count."""
        while self._on_the_way:
            self._receive(self._on_the_way.popleft())

    # ---- values that users set

    @torch.no_grad()
    def assign(self) -> None:
        """Worker 0's present values become the store's, and everybody's."""
        try:
            self._set(self.params)
        except TensorwireError as error:
            raise self._worker.member.explain(error) from None
        self.written = False
        for bucket in self.client.order:
            self._take(bucket, torch.Tensor.copy_)

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        """Worker 0's ``values``, by parameter, become the store's."""
        client = self.client
        client.begin(StepOperation.ASSIGN, self._options)
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
        mine = {"steps": self.steps, "tokens": list(self._tokens)}
        if self._loaded is not None:
            return {**self._loaded, **mine}
        values, state = local_state.fetch(self.client)
        return {"parameters": values, "state": state, **mine}

    def check(self, found: Any) -> None:
        """Raises `ArgumentError` for what `state` has not returned for such parameters."""
        local_state.check(self.client.plan, found, len(self._fragments))

    def load(self, found: dict[str, Any]) -> None:
        """The next step begins from what `check` has found good."""
        self.steps, self._tokens, self._loaded = found["steps"], list(found["tokens"]), found

    def _give(self, found: dict[str, Any]) -> None:
        """The servers have this, as worker 0 has it, and every worker goes on with the parameters that it has."""
        self._drop()
        plan = self.client.plan
        self._set([found["parameters"][t.name] for t in plan.tensors])
        load_state(self.client, self._options, partial(local_state.items, plan, found["state"]))
        self.written, self._loaded = False, None

    def finish(self) -> None:
        """This worker is done. What is on its way is taken into its parameters."""
        if self.client.step >= 0:
            with torch.no_grad():
                self.complete()
            self.client.finish()
