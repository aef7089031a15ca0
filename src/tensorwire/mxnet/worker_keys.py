"""A key of a `KVStore`: its memory, and the operations of MXNet's engine that push and pull it.

A key of dense arrays has two NDArrays over registered memory: the slot that pushes send from, and the values that
servers write. Requests are operations on these two, so backward, copies and readers of a weight wait for one another as
for any other operation of MXNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.keyvalue import KeyValue
from tensorwire.mxnet import engine
from tensorwire.mxnet.key_requests import BegunRequest, KeyRequests
from tensorwire.mxnet.server_rule import over

Key = int | str
_PART_BYTES = 16 << 20  # smaller: copies and transfers overlap more; larger: fewer requests


class _Keyed:
    """A key, and how its requests get to the servers. ``value``: where its values come to."""

    value: Any

    def __init__(self, store: KeyValue, key: Key, requests: KeyRequests) -> None:
        self._store, self._key, self._requests = store, key, requests

    def _begin(self, call: Callable[[], BegunRequest], numbers: dict[str, float]) -> BegunRequest:
        """Calls with these options in force."""
        with self._requests.turn:
            if numbers:
                self._store.set_options(**numbers)
            return call()

    def _fetch(
        self, begin: Callable[[], BegunRequest], reads: Sequence[Any], writes: Sequence[Any], priority: int
    ) -> None:
        """Begins a request in its turn, once ``reads`` are there; ``value`` and ``writes`` wait for its answer."""
        self._requests.check()
        engine.push(
            lambda ended: self._requests.submit(begin, ended, priority), reads, [self.value, *writes], self._name
        )

    @property
    def _name(self) -> str:
        return f"tensorwire {self._key}"

    def _give(self, outs: Sequence[Any]) -> None:
        for array in outs:
            self.value.copyto(array)

    def count_unsent(self) -> None:
        """The record of this worker's pushes has those that were asked for and will not leave, too."""


class DenseKey(_Keyed):
    """A key of dense arrays."""

    def __init__(self, store: KeyValue, key: Key, requests: KeyRequests) -> None:
        super().__init__(store, key, requests)
        self._memory = store.slot(key)
        self.slot = over(self._memory)
        self.value = over(store.pull(key, copy=False).wait())
        self._order = mx.nd.zeros((1,))  # a pull reads what pushes before it write: it leaves after them
        self._asked = self._begun = 0  # pushes

    def check(self, values: Sequence[Any], outs: Sequence[Any]) -> None:
        """Refuses what cannot be pushed, or pulled into. Raises `ArgumentError` or `Unsupported`."""
        _check(self._key, values, outs, self.slot.shape, self.slot.dtype)

    def push(self, values: Sequence[Any], numbers: dict[str, float], priority: int) -> None:
        """As `KVStore.push`."""
        self._fill(values)
        self._requests.check()
        call = partial(self._store.push, self._key, self._memory, priority=priority)
        request = self._requests.send(self._counted(call, numbers), priority)
        engine.push(request.leave, [self.slot], [self._order], self._name)
        engine.push(request.finish, [], [self.slot], self._name)  # until servers have taken it nobody writes there

    def pull(self, outs: Sequence[Any], priority: int) -> None:
        """As `KVStore.pull`."""
        call = partial(self._store.pull, self._key, copy=False, priority=priority)
        self._fetch(partial(self._begin, call, {}), [self._order], [], priority)
        self._give(outs)

    def push_and_pull(
        self, values: Sequence[Any], outs: Sequence[Any], numbers: dict[str, float], priority: int
    ) -> None:
        """As `KVStore.pushpull`."""
        self._fill(values)
        call = partial(self._store.pushpull, self._key, self._memory, copy=False, priority=priority)
        self._fetch(self._counted(call, numbers), [self.slot], [self._order], priority)
        self._give(outs)

    def count_unsent(self) -> None:
        self._store._count_unsent(self._key, self._asked - self._begun)
        self._begun = self._asked

    def _counted(self, call: Callable[[], BegunRequest], numbers: dict[str, float]) -> Callable[[], BegunRequest]:
        self._asked += 1

        def begin() -> BegunRequest:
            request = self._begin(call, numbers)
            self._begun += 1
            return request

        return begin

    def _fill(self, values: Sequence[Any]) -> None:
        if len(values) == 1:
            if values[0].handle.value != self.slot.handle.value:
                values[0].copyto(self.slot)
            return
        first = values[0].context
        mx.nd.add_n(*(array.as_in_context(first) for array in values)).copyto(self.slot)


class KeyParts:
    """A key of dense arrays in parts, which are keys of their own: one is copied while another is on its way."""

    def __init__(self, store: KeyValue, key: Key, value: Any, names: Sequence[Key], requests: KeyRequests) -> None:
        self._key, self._shape, self._dtype = key, value.shape, value.dtype
        self._parts = [DenseKey(store, name, requests) for name in names]

    def check(self, values: Sequence[Any], outs: Sequence[Any]) -> None:
        """As of every key."""
        _check(self._key, values, outs, self._shape, self._dtype)

    def push(self, values: Sequence[Any], numbers: dict[str, float], priority: int) -> None:
        """As `KVStore.push`."""
        for part, mine in self._each(values):
            part.push(mine, numbers, priority)

    def pull(self, outs: Sequence[Any], priority: int) -> None:
        """As `KVStore.pull`."""
        for part, mine in self._each(outs):
            part.pull(mine, priority)

    def push_and_pull(
        self, values: Sequence[Any], outs: Sequence[Any], numbers: dict[str, float], priority: int
    ) -> None:
        """As `KVStore.pushpull`."""
        for (part, mine), (_, into) in zip(self._each(values), self._each(outs), strict=True):
            part.push_and_pull(mine, into, numbers, priority)

    def count_unsent(self) -> None:
        """As of every key."""
        for part in self._parts:
            part.count_unsent()

    def _each(self, arrays: Sequence[Any]) -> Iterator[tuple[DenseKey, list[Any]]]:
        """Every part, with what arrays have of it, in place."""
        with mx.autograd.pause():
            flat = [array.reshape((-1,)) for array in arrays]
            start = 0
            for part in self._parts:
                end = start + part.slot.size
                yield part, [array[start:end] for array in flat]
                start = end


class RowKey(_Keyed):
    """A key of which rows are pushed: they are in ``row_sparse`` arrays."""

    def __init__(self, store: KeyValue, key: Key, value: Any, requests: KeyRequests) -> None:
        super().__init__(store, key, requests)
        self._shape, self._dtype = value.shape, np.dtype(value.dtype)
        dense = value.tostype("default").asnumpy()
        store.init_rows(key, value.shape, self._dtype.name, values=dense)
        self._all = np.arange(value.shape[0])
        self._whole: Any = None  # all rows, where somebody wants them
        self.value: Any = None

    def check(self, values: Sequence[Any], outs: Sequence[Any]) -> None:
        """As of every key; what is pushed may be sparse or dense."""
        _check(self._key, values, outs, self._shape, self._dtype.type, sparse=True)

    def push(self, values: Sequence[Any], numbers: dict[str, float], priority: int) -> None:
        """As `KVStore.push`; it waits until the gradients are there."""
        indices, rows = [], []
        for array in values:
            if array.stype == "row_sparse":
                indices.append(array.indices.asnumpy())
                rows.append(array.data.asnumpy())
            else:
                indices.append(self._all)
                rows.append(array.asnumpy())
        self._requests.check()
        call = partial(self._store.row_sparse_push, self._key, np.concatenate(indices), np.concatenate(rows))
        self._begin(call, numbers)

    def pull(self, outs: Sequence[Any], priority: int) -> None:
        """As `KVStore.pull`: all rows."""
        if self._whole is None:
            self._whole = np.zeros(self._shape, self._dtype)
            self.value = over(self._whole)
        self._fetch(partial(self._store.row_sparse_pull, self._key, self._all, out=self._whole), [], [], priority)
        self._give(outs)

    def push_and_pull(
        self, values: Sequence[Any], outs: Sequence[Any], numbers: dict[str, float], priority: int
    ) -> None:
        """As `KVStore.pushpull`."""
        self.push(values, numbers, priority)
        self.pull(outs, priority)

    def fetch(self, out: Any, row_ids: Any) -> None:
        """Fetches rows into a row_sparse array."""
        self._requests.check()
        ids = np.unique(row_ids.asnumpy().astype(np.int64))
        rows = self._store.row_sparse_pull(self._key, ids).wait()
        with mx.autograd.pause():
            mx.nd.sparse.row_sparse_array((rows, ids), shape=self._shape, dtype=self._dtype).copyto(out)


def parts_of(key: Key, value: Any) -> dict[Key, Any]:
    """An array by its key, or if it is large its parts, by names of their own."""
    most = _PART_BYTES // value.itemsize
    if value.size <= most:
        return {key: value}
    flat = value.reshape(-1)
    return {f"{key!r} from {start}": flat[start : start + most] for start in range(0, flat.size, most)}


def _check(
    key: Key, values: Sequence[Any], outs: Sequence[Any], shape: tuple[int, ...], dtype: Any, *, sparse: bool = False
) -> None:
    """Refuses arrays that do not fit a key. Raises `ArgumentError` or `Unsupported`."""
    for array in values:
        if array.stype != "default" and not sparse:
            raise Unsupported(f"key {key!r} is dense in every worker: it takes no {array.stype} array")
        if (array.shape, array.dtype) != (shape, dtype):
            raise ArgumentError(
                f"the value for key {key!r} must be {dtype.__name__}{list(shape)}, "
                f"not {array.dtype.__name__}{list(array.shape)}"
            )
    for array in outs:
        if array.shape != shape:
            raise ArgumentError(f"key {key!r} has the shape {list(shape)}, and out has {list(array.shape)}")
