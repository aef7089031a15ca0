"""The exchanges between a Keras optimizer in this worker and the job's servers, by mode.

The optimizer updates the worker's own variables. In `Sync`, workers send gradients and get their mean. In `Async` and
`SSP`, they send the change of each variable, which a server adds to its value, and get that value, as in BytePS's
asynchronous mode. In the others, they exchange parameters now and then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import msgspec
import numpy as np

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ParameterModified, Unsupported
from tensorwire.launch.join_store import join_store
from tensorwire.launch.worker import Worker
from tensorwire.observe import counters
from tensorwire.store.admission import versions
from tensorwire.store.foreign import named_by
from tensorwire.store.half_precision import half_to_single, single_to_half
from tensorwire.store.local_exchanges import LocalExchanges, local_spec
from tensorwire.store.modes import SGD, SSP, Async, DiLoCo, Local, Mode, Sync, settings_of
from tensorwire.store.rule_names import MEAN, SUM
from tensorwire.store.sharding import Bucket, ParameterSpec, Piece
from tensorwire.store.step_header import StepOperation
from tensorwire.store.store_layout import StoreSpec
from tensorwire.tensorflow.keras_rules import RATE, RULE
from tensorwire.tensorflow.keras_rules import settings_of as settings_of_optimizer
from tensorwire.tensorflow.tensor_exchange import Bytes, Values, fingerprint_of

Array = np.ndarray[Any, Any]
_FINGERPRINT = "fingerprint"
_HERE = "of which variables there are gradients"
_HALF = ("bfloat16", "float16")


def make_rounds(
    worker: Worker, mode: Mode, tensors: Sequence[ParameterSpec], reduce: str, bucket_bytes: int, compression: str
) -> Rounds:
    """The rounds of a mode, in a new store. Raises as `join_store`, or `Unsupported`."""
    if isinstance(mode, Local):
        spec = local_spec(mode, tensors, worker.num_workers, worker.num_servers, bucket_bytes, compression)
        return LocalRounds(worker, _with_keras(spec, mode.outer) if isinstance(mode, DiLoCo) else spec)
    if isinstance(mode, (Async, SSP)) and mode.damping:
        raise Unsupported("a Keras optimizer sends changes, which know no learning rate: pass damping=0")
    alike = isinstance(mode, Sync)
    spec = StoreSpec(
        versions(),
        [*tensors, *([ParameterSpec(_HERE, (len(tensors),), "float64")] if alike else [])],
        MEAN if alike else SUM,
        [{_FINGERPRINT: 0.0} if alike else {}],
        [(0, _FINGERPRINT, -1)] if alike else [],
        bucket_bytes,
        False,
        reduce,
        mode_settings=settings_of(mode),
        compression=compression,
        alike=alike,
    )
    return GradientRounds(worker, spec) if alike else ChangeRounds(worker, spec)


def _with_keras(spec: StoreSpec, outer: SGD) -> StoreSpec:
    """The same, whose servers run Keras's optimizer in place of PyTorch's."""
    optimizer = keras.optimizers.SGD(outer.lr, outer.momentum, outer.nesterov)
    options = {**settings_of_optimizer(optimizer), RATE: outer.lr}
    changed = {"rule": RULE, "groups": [options], "numeric": [(0, RATE, -1)], "versions": versions(RULE)}
    return msgspec.structs.replace(spec, **changed, **named_by(RULE, options))


class Rounds:
    """One worker's rounds of a store. What `exchange` raises ends the step.

    Attributes:
        takes_gradients: Whether `exchange` is about gradients, before the worker's optimizer has its turn. Else it is
            about parameters, after it.
        brings_values: Whether it brings the parameters themselves, so that the worker's optimizer has no turn.
    """

    takes_gradients = brings_values = False
    _expected: float | None = None  # the fingerprint of the parameters after the last round

    def exchange(self, values: Values) -> None:
        """One step's round."""
        raise NotImplementedError

    def assign(self, values: Sequence[Bytes]) -> None:
        """Worker 0's parameters, which all workers have by now, become those of the store."""

    def complete(self, values: Values) -> None:
        """Takes what is still on its way into the parameters, at the end of a training."""

    def finish(self) -> None:
        """This worker is done."""

    def save(self) -> Bytes | None:
        """What the servers have and a file of the worker's optimizer should: one worker may call it alone."""
        return None

    def restore(self, saved: Bytes) -> None:
        """What `save` returned is the servers' with the next `assign`."""

    def _check(self, values: Values) -> None:
        if self._expected is not None and values.fingerprint != self._expected:
            raise ParameterModified(
                "a parameter was changed since the last step, and its value is the servers': call "
                "optimizer.write_parameters() on every worker after an intended change"
            )


class _BucketRounds(Rounds):
    """Rounds of a store that is cut into buckets."""

    def __init__(self, worker: Worker, spec: StoreSpec) -> None:
        self.client = join_store(worker, spec)
        self._window = np.frombuffer(memoryview(self.client.windows[0]), np.uint8)

    def finish(self) -> None:
        self.client.finish()

    # ---- for those below

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Around a round and its results. Where it is interrupted, the next one raises `StepInterrupted`."""
        client = self.client
        client.course.check()
        client.ready()
        with client.course.unit(f"round {client.step + 1} of {client.name}"):
            yield

    def _answered(self, piece: Piece, bucket: Bucket) -> Bytes:
        """What the servers have answered last for a piece."""
        start = bucket.space + piece.offset
        return self._window[start : start + (piece.stop - piece.start) * self._size(piece)]

    def _part(self, array: Bytes, piece: Piece) -> Bytes:
        """A piece of a tensor."""
        size = self._size(piece)
        return array[piece.start * size : piece.stop * size]

    def _size(self, piece: Piece) -> int:
        return DTYPES[self.client.plan.tensors[piece.tensor].dtype]

    def _dtype(self, piece: Piece) -> str:
        return self.client.plan.tensors[piece.tensor].dtype

    def _take(self, bucket: Bucket, values: Values) -> None:
        """The answers for a bucket become results."""
        for piece in bucket.pieces:
            if piece.tensor in values.arrays:
                answer = self._answered(piece, bucket)
                np.copyto(self._part(values.result(piece.tensor), piece), answer)
                counters.add(copies=1, copied_bytes=answer.nbytes)

    def _remember(self, values: Values) -> None:
        """What the fingerprint will be before the next step."""
        tensors = self.client.plan.tensors
        now = [values.now(number) for number in range(len(tensors))]
        self._expected = fingerprint_of(now, [DTYPES[each.dtype] for each in tensors])


class GradientRounds(_BucketRounds):
    """Gradients are pushed, and their mean comes back: all workers update their own variables alike.

    Behind the variables, ``exchange`` gets of which this worker has a gradient, 1 or 0 each, as float64; their mean
    says which have one on some worker. What comes back for the others means nothing.
    """

    takes_gradients = True

    def exchange(self, values: Values) -> None:
        client = self.client
        here = [*values.arrays[len(client.plan.tensors) - 1].view(np.float64), 1.0]
        with self._step():
            client.begin(StepOperation.UPDATE, [values.fingerprint])
            for bucket in client.order:
                client.slot(bucket)
                present = bytearray(len(bucket.pieces))
                for number, piece in enumerate(bucket.pieces):
                    if here[piece.tensor]:
                        present[number] = 1
                        client.copy(bucket, number, self._part(values.arrays[piece.tensor], piece))
                client.push(bucket, bytes(present))
            for bucket in client.order:
                client.wait_for(bucket, client.step)
                self._take(bucket, values)


class _ParameterRounds(_BucketRounds):
    """Rounds in which parameters are on the servers, too."""

    def assign(self, values: Sequence[Bytes]) -> None:
        client = self.client
        with self._step():
            client.begin(StepOperation.ASSIGN, [0.0] * len(client.spec.numeric))
            for bucket in client.order if client.member.index == 0 else ():
                client.slot(bucket)
                for number, piece in enumerate(bucket.pieces):
                    client.copy(bucket, number, self._part(values[piece.tensor], piece))
                client.push(bucket)
            client.wait()
            self._remember(Values(dict(enumerate(values))))

    def _room(self, bucket: Bucket, piece: Piece) -> Bytes:
        memory = np.frombuffer(self.client.memory(bucket), np.uint8)
        return memory[piece.offset : piece.offset + (piece.stop - piece.start) * self._size(piece)]

    def _put_difference(self, bucket: Bucket, piece: Piece, first: Bytes, second: Bytes) -> None:
        """The slot of a piece becomes ``first - second``."""
        dtype, room = self._dtype(piece), self._room(bucket, piece)
        if dtype in _HALF:
            bits = np.dtype("uint16" if dtype == "bfloat16" else dtype)
            difference = half_to_single(first.view(bits)) - half_to_single(second.view(bits))
            np.copyto(room.view(bits), single_to_half(difference, dtype))
        else:
            np.subtract(first.view(dtype), second.view(dtype), out=room.view(dtype))
        counters.add(copies=1, copied_bytes=room.nbytes)


class ChangeRounds(_ParameterRounds):
    """The change of every parameter is pushed, and its value comes back."""

    def exchange(self, values: Values) -> None:
        self._check(values)
        client = self.client
        with self._step():
            client.begin(StepOperation.UPDATE, [])
            for bucket in client.order:
                client.slot(bucket)
                for piece in bucket.pieces:
                    now = self._part(values.arrays[piece.tensor], piece)
                    self._put_difference(bucket, piece, now, self._answered(piece, bucket))
                client.push(bucket)
            for bucket in client.order:
                client.wait_for(bucket, client.step)
                self._take(bucket, values)
            self._remember(values)


class LocalRounds(_ParameterRounds):
    """Every worker trains by itself, and exchanges parameters now and then."""

    def __init__(self, worker: Worker, spec: StoreSpec) -> None:
        super().__init__(worker, spec)
        self._exchanges = LocalExchanges(self.client, self._fill, self._mix)
        self._values: Values

    def count(self, tokens: float) -> None:
        """Adds to what this worker's next contributions weigh."""
        self._exchanges.count(tokens)

    def exchange(self, values: Values) -> None:
        self._check(values)
        self._during(values, self._exchanges.step)

    def assign(self, values: Sequence[Bytes]) -> None:
        self._exchanges.drop()
        super().assign(values)

    def complete(self, values: Values) -> None:
        self._during(values, self._exchanges.complete)

    def _during(self, values: Values, call: Callable[[], None]) -> None:
        self._values = values
        call()
        self._remember(values)
        del self._values

    def _fill(self, bucket: Bucket) -> None:
        for number, piece in enumerate(bucket.pieces):
            own = self._part(self._values.now(piece.tensor), piece)
            if self._exchanges.sends_change:
                self._put_difference(bucket, piece, self._answered(piece, bucket), own)
            else:
                self.client.copy(bucket, number, own)

    def _mix(self, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            self._change(piece, self._part(self._values.changed(piece.tensor), piece), self._answered(piece, bucket))

    def _change(self, piece: Piece, own: Bytes, answer: Bytes) -> None:
        """Mixes an answer into a piece of the parameters."""
        (kept, taken), dtype = self._exchanges.shares, self._dtype(piece)
        if not kept:
            np.copyto(own, answer)
            return
        bits = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        mine, theirs = own.view(bits), answer.view(bits)
        if dtype in _HALF:
            mine, theirs = half_to_single(mine), half_to_single(theirs)
        kind = mine.dtype.type
        mixed = mine * kind(kept) + theirs * kind(taken)
        np.copyto(own.view(bits), single_to_half(mixed, dtype) if dtype in _HALF else mixed)
