"""When a worker in a local mode sends its parameters, and when it takes the servers' answer.

The framework's adapter computes the values to send, and mixes answers into the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire.errors import ArgumentError, WaitTimeout
from tensorwire.observe import ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store.admission import versions
from tensorwire.store.modes import EASGD, DiLoCo, Local, LocalSGD, settings_of
from tensorwire.store.rule_names import ELASTIC, MEAN
from tensorwire.store.sharding import Bucket, ParameterSpec
from tensorwire.store.step_header import StepOperation
from tensorwire.store.store_client import StoreClient
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.every import PublishSpec


def local_spec(
    mode: Local,
    tensors: Sequence[ParameterSpec],
    workers: int,
    servers: int,
    bucket_bytes: int,
    compression: str,
    shards: int | None = None,
    publish: PublishSpec | None = None,
) -> StoreSpec:
    """The store of a mode. Raises `ArgumentError` for what the mode does not go with."""
    rule, group = MEAN, dict[str, Any]()
    if isinstance(mode, EASGD):
        rule, group = ELASTIC, {"alpha": 0.9 / workers if mode.alpha is None else mode.alpha}
    elif isinstance(mode, DiLoCo):
        outer = mode.outer
        rule = "SGD"
        group = {"lr": outer.lr, "momentum": outer.momentum, "nesterov": outer.nesterov, "fused": True}
        if mode.quorum is not None and mode.quorum > workers:
            raise ArgumentError(f"quorum={mode.quorum} needs as many workers, and this job has {workers}")
    spec = StoreSpec(
        versions(),
        list(tensors),
        rule,
        [group],
        [(0, name, -1) for name in sorted(group) if name != "fused"],
        bucket_bytes,
        False,
        mode_settings=settings_of(mode),
        compression=compression,
        shards=shards,
        publish=publish,
    )
    if servers and isinstance(mode, DiLoCo):
        spec.plan(servers).fragments(mode.fragments)
    return spec


@dataclass(frozen=True)
class _Exchange:
    """A fragment that has been sent: in round ``round``, to be mixed after step ``due``."""

    fragment: int
    round: int
    due: int


_LEAST_TOKENS, _MOST_TOKENS = 1e-6, 1e15  # what weights gradients in float32 without an overflow or a sum of zero


class LocalExchanges:
    """The exchanges of one worker.

    Args:
        client: Its end of a store of `local_spec`.
        fill: Brings what this worker contributes into the memory of a bucket.
        mix: Takes what the servers have answered for a bucket into the parameters.

    Attributes:
        steps: Steps that this worker has taken.
        sends_change: Whether it contributes the last version less its parameters, in place of these.
        shares: What its own values and an answer are multiplied by; the sum is what it goes on with.
        tokens: By fragment, what its next contribution weighs.
    """

    def __init__(self, client: StoreClient, fill: Callable[[Bucket], None], mix: Callable[[Bucket], None]) -> None:
        mode = client.spec.mode
        assert isinstance(mode, Local)
        self._client, self._mode, self._fill, self._mix = client, mode, fill, mix
        self.sends_change = isinstance(mode, DiLoCo)
        kept = mode.alpha if isinstance(mode, DiLoCo) else 0.0
        self.shares = (1.0, -1.0) if isinstance(mode, EASGD) else (kept, 1.0 - kept)
        count = mode.fragments if isinstance(mode, DiLoCo) else 1
        numbers = client.plan.fragments(count)
        self._fragments = [[b for b in client.order if numbers[b.number] == f] for f in range(count)]
        group = client.spec.groups[0]
        self.options = [float(group[name]) for _, name, _ in client.spec.numeric]
        self._on_the_way: deque[_Exchange] = deque()
        self.steps = 0
        self.tokens = [0.0] * count
        self._to_send: list[int] = []  # fragments whose turn has come

    def count(self, tokens: float) -> None:
        """Adds to what this worker's next contribution of each fragment weighs. Raises `ArgumentError`."""
        if (
            isinstance(tokens, bool)
            or not isinstance(tokens, (int, float))
            or not _LEAST_TOKENS <= tokens <= _MOST_TOKENS
        ):
            raise ArgumentError(
                f"tokens must be a number from {_LEAST_TOKENS:g} to {_MOST_TOKENS:g}, not {tokens!r:.100}"
            )
        self.tokens = [n + tokens for n in self.tokens]

    def take_over(self) -> None:
        """A worker that joins is as far as the slowest of the others."""
        self.steps = self._client.updates * self._mode.every // len(self._fragments)

    def step(self) -> None:
        """What is due after a step of the worker's own optimizer."""
        self.go_on()
        self._to_send, self.steps = self._due(self.steps + 1), self.steps + 1
        self.go_on()

    def go_on(self) -> None:
        """Does what is left of the last step, if it was interrupted. Raises `StepInterrupted` where that cannot be."""
        self._client.course.check()
        self._mix_due()
        while self._to_send:
            self._send(self._to_send[0])
        self._mix_due()

    def _due(self, step: int) -> list[int]:
        """The fragments whose turn is after that step."""
        every, count = self._mode.every, len(self._fragments)
        return [f for f in range(count) if step % every == (f + 1) * every // count % every]

    def _weight(self, fragment: int) -> float:
        if not isinstance(self._mode, DiLoCo) or self._mode.weight == "mean":
            return 1.0
        tokens = self.tokens[fragment]
        if not tokens > 0:
            raise ArgumentError('weight="tokens" needs optimizer.count(tokens) before step(), in every exchange')
        return tokens

    def _send(self, fragment: int) -> None:
        client, weight, start = self._client, self._weight(fragment), clock()
        client.ready()
        with ranges.named(ranges.PUSH), client.course.unit(f"exchange {client.updates + 1} of {client.name}"):
            client.begin(StepOperation.UPDATE, self.options, weight=weight, fragment=fragment)
            for bucket in self._fragments[fragment]:
                client.slot(bucket)
                self._fill(bucket)
                client.push(bucket)
            self.tokens[fragment] = 0.0
            delay = 0 if isinstance(self._mode, LocalSGD) else self._mode.delay
            self._on_the_way.append(_Exchange(fragment, client.step, self.steps + delay))
            del self._to_send[0]
        spans.add("push", client.step, start, clock())

    def _mix_due(self) -> None:
        while self._on_the_way and self._on_the_way[0].due <= self.steps:
            self._receive(self._mix)

    def _receive(self, then: Callable[[Bucket], None] | None) -> None:
        """Waits for the first that is on its way; one that is interrupted meanwhile is still the first."""
        start, exchange = clock(), self._on_the_way[0]
        with ranges.named(ranges.WAIT):
            for bucket in self._fragments[exchange.fragment]:
                self._client.wait_for(bucket, exchange.round)
        spans.add("wait", exchange.round, start, clock())
        with self._client.course.unit(f"taking exchange {exchange.round} of {self._client.name} into the parameters"):
            if then is not None:
                for bucket in self._fragments[exchange.fragment]:
                    then(bucket)
            self._on_the_way.popleft()

    def complete(self) -> None:
        """Waits for all that is on its way, and mixes it."""
        self.go_on()
        try:
            while self._on_the_way:
                self._receive(self._mix)
        except WaitTimeout as error:
            raise WaitTimeout(f"the parameters are without this worker's last exchange: {error}") from None

    def drop(self) -> None:
        """Waits for all that is on its way, which was made of values that no longer count."""
        self._client.course.check()
        while self._to_send:
            self._send(self._to_send[0])
        while self._on_the_way:
            self._receive(None)
