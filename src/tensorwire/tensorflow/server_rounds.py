"""A worker's rounds when servers run the Keras optimizer: it pushes gradients and gets values back."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import Unsupported
from tensorwire.keyvalue.key_value import KeyValue
from tensorwire.observe import counters
from tensorwire.store.modes import SSP, Async, Mode, Sync
from tensorwire.store.sharding import ParameterSpec
from tensorwire.tensorflow.keras_rules import RATE, RULE, is_elementwise, settings_of
from tensorwire.tensorflow.store_rounds import Rounds
from tensorwire.tensorflow.tensor_exchange import Bytes, Values, fingerprint_of


class ServerRounds(Rounds):
    """One worker's rounds of a store whose servers run the optimizer. Every variable is a key.

    Behind the variables, ``exchange`` gets of which this worker has a gradient, 1 or 0 each, and the learning rate, all
    as float64.

    Raises `Unsupported` for an optimizer that servers cannot run, or a mode in which they run none; and as `KeyValue`.
    """

    takes_gradients = brings_values = True

    def __init__(
        self,
        optimizer: Any,
        mode: Mode,
        tensors: Sequence[ParameterSpec],
        reduce: str,
        bucket_bytes: int,
        compression: str,
    ) -> None:
        if not isinstance(mode, (Sync, Async, SSP)):
            raise Unsupported(f"{mode!r} runs the optimizer in the workers: leave on_servers False")
        if strange := [each.name for each in tensors if each.dtype == "bfloat16"]:
            raise Unsupported(f"servers run no optimizer of Keras on bfloat16, and {strange[0]} is: keep it in float32")
        self._tensors = list(tensors)
        self._keys = list(range(len(tensors)))  # names of Keras are others in every process
        self._store = KeyValue(
            mode,
            RULE,
            reduce=reduce,
            bucket_bytes=bucket_bytes,
            compression=compression or None,
            elementwise=is_elementwise(optimizer),
            **settings_of(optimizer),
        )
        self._store.init(self._keys, [np.zeros(each.shape, each.dtype) for each in tensors])
        # In Sync, workers that have no gradient of a variable learn by it whether another one has.
        self._here = KeyValue(mode, "mean") if isinstance(mode, Sync) else None
        if self._here is not None:
            self._here.init(0, np.zeros(len(tensors)))
        self._saved: Bytes | None = None  # a file of the servers', to be loaded

    def exchange(self, values: Values) -> None:
        """One step's round: a mean or a sum of gradients in `Sync`, else this worker's own."""
        self._check(values)
        rate, here = (values.arrays.pop(len(self._keys) + n).view(np.float64) for n in (1, 0))
        self._store.set_options(**{RATE: float(rate[0])})
        gradients = {n: self._shaped(n, values.arrays[n]) for n in self._keys if here[n]}
        begun = self._store.pushpull(list(gradients), list(gradients.values()), copy=False)
        others = {n: np.zeros(self._tensors[n].shape, self._tensors[n].dtype) for n in self._of_others(here)}
        late = self._store.pushpull(list(others), list(others.values()), copy=False)
        for number, answer in zip([*gradients, *others], [*(begun.wait() or ()), *(late.wait() or ())], strict=True):
            np.copyto(self._shaped(number, values.result(number)), answer)
            counters.add(copies=1, copied_bytes=answer.nbytes)
        self._remember()

    def _of_others(self, here: Any) -> list[int]:
        """The variables of which other workers alone have a gradient in this round."""
        if self._here is None:
            return []
        begun = self._here.pushpull(0, here, copy=False)
        return [] if here.all() else np.flatnonzero((begun.wait() > 0) & (here == 0)).tolist()

    def assign(self, values: Sequence[Bytes]) -> None:
        """Worker 0's values, which all workers have by now, become the servers'; and with them what was loaded."""
        if self._saved is not None:
            self._load(self._saved)
            self._saved = None
        self._store.assign(self._keys, [self._shaped(n, each) for n, each in enumerate(values)])
        self._now = self._store.pull(self._keys, copy=False).wait()  # memory that every answer comes to
        self._remember()

    def save(self) -> Bytes:
        """All that the servers have, as a file in numpy's npz format."""
        with tempfile.TemporaryDirectory(prefix="tensorwire-") as folder:
            path = Path(folder) / "servers.npz"
            self._store.save(path)
            return np.fromfile(path, np.uint8)

    def restore(self, saved: Bytes) -> None:
        self._saved = np.array(saved, np.uint8)

    def _load(self, saved: Bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="tensorwire-") as folder:
            path = Path(folder) / "servers.npz"
            saved.tofile(path)
            self._store.load(path)

    def _shaped(self, number: int, data: Bytes) -> Any:
        spec = self._tensors[number]
        return data.view(spec.dtype).reshape(spec.shape)

    def _remember(self) -> None:
        flat = [array.reshape(-1).view(np.uint8) for array in self._now]
        self._expected = fingerprint_of(flat, [DTYPES[each.dtype] for each in self._tensors])
