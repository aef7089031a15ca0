"""A worker's record of a key: its location, and its requests under way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorwire.device.checks import check_plain
from tensorwire.edge.tensor import Spec
from tensorwire.errors import ArgumentError
from tensorwire.keyvalue.key_arguments import Key, as_array, check_unmasked, pairs
from tensorwire.observe import counters
from tensorwire.store.key_client import KeyClient


class KeyEntry:
    """A key."""

    store: KeyClient
    tensor: int

    def __init__(self, key: Key, spec: Spec) -> None:
        self.key, self.spec = key, spec
        self.dtype = np.dtype(spec.dtype)
        self.pulling: KeyPull | None = None  # the last pull, until it is finished

    def place(self, store: KeyClient, tensor: int) -> None:
        """The key is on the servers."""
        self.store, self.tensor, self._buckets = store, tensor, store.buckets[tensor]
        self.slot = self._over(store.slot(tensor))
        self.value = self._over(store.value(tensor))
        self.value.flags.writeable = False

    def _over(self, memory: memoryview) -> np.ndarray[Any, Any]:
        return np.frombuffer(memory, self.dtype, math.prod(self.spec.shape)).reshape(self.spec.shape)

    def check(self, array: Any, what: str) -> None:
        """Refuses what is not of the key's shape and dtype, or has a mask. Raises `ArgumentError`."""
        check_unmasked(array)
        if isinstance(array, np.ndarray) and array.shape == self.spec.shape and array.dtype == self.dtype:
            return
        check_plain(f"key {self.key!r}", array)
        found = Spec.of(array)
        if (found.shape, found.dtype) != (self.spec.shape, self.spec.dtype):
            raise ArgumentError(f"the {what} for key {self.key!r} must be {self.spec}, not {found}")

    def fill(self, arrays: Sequence[Any]) -> None:
        """Puts the sum of arrays into the slot. Each may be the slot itself, or another view of its memory."""
        first = self._apart(arrays[0], whole=True)
        rest = [self._apart(array, whole=False) for array in arrays[1:]]
        if first is not self.slot:
            self.store.fill(self.tensor, first)
        for array in rest:
            np.add(self.slot, as_array(array), out=self.slot)

    def _apart(self, array: Any, *, whole: bool) -> Any:
        """The slot, if ``array`` is it and that may be (``whole``); else what shares no memory with it."""
        try:
            found = as_array(array)
        except ArgumentError:
            return array
        if not np.may_share_memory(found, self.slot):
            return array
        same = found.ctypes.data == self.slot.ctypes.data and found.strides == self.slot.strides
        return self.slot if whole and same else found.copy()

    @property
    def applied(self) -> bool:
        """Whether its last push has been applied."""
        return all(self.store.push_is_applied(bucket) for bucket in self._buckets)

    def wait_for_push(self, timeout: float | None) -> None:
        """Returns when its last push has been applied."""
        for bucket in self._buckets:
            self.store.wait_for_push(bucket, timeout)

    def asked(self) -> list[int]:
        """How many answers about each of its buckets were asked for."""
        return [self.store.asked[b.number] for b in self._buckets]

    def answered(self, asked: Sequence[int]) -> bool:
        """Whether there have been so many."""
        return self.store.answered(self.tensor, asked)

    def wait(self, asked: Sequence[int], timeout: float | None) -> None:
        """Returns when there have been so many."""
        for bucket, number in zip(self._buckets, asked, strict=True):
            self.store.wait_for(bucket, number, timeout)


class KeyPull:
    """The pull of one key."""

    def __init__(self, entry: KeyEntry, out: np.ndarray[Any, Any] | None, copy: bool) -> None:
        self._entry, self._asked, self._copy = entry, entry.asked(), copy
        self.result = out

    @property
    def ready(self) -> bool:
        """Whether ``finish`` would return at once."""
        return self._entry.pulling is not self or self._entry.answered(self._asked)

    def wait_for_answer(self, timeout: float | None) -> None:
        """Returns when the value has come."""
        if self._entry.pulling is self:
            self._entry.wait(self._asked, timeout)

    def finish(self, timeout: float | None) -> None:
        """Waits for the value, and takes it. Idempotent."""
        entry = self._entry
        if entry.pulling is not self:
            return
        entry.wait(self._asked, timeout)
        if not self._copy and self.result is None:
            self.result = entry.value
        else:
            if self.result is None:
                self.result = np.empty(entry.spec.shape, entry.dtype)
            np.copyto(self.result, entry.value)
            counters.copied(entry.value.nbytes)
        entry.pulling = None  # not before: one that is interrupted is finished later


def arrays_for(entries: Sequence[KeyEntry], keys: Key | Sequence[Key], values: Any) -> list[list[Any]]:
    """The arrays that are given for each of these keys. Raises `ArgumentError` for one that does not fit."""
    found = []
    for entry, (_, value) in zip(entries, pairs(keys, values), strict=True):
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        if not several:
            raise ArgumentError(f"there is no array for key {entry.key!r}")
        for each in several:
            entry.check(each, "value")
        found.append(several)
    return found


def outs_for(entries: Sequence[KeyEntry], keys: Key | Sequence[Key], out: Any) -> list[Any]:
    """Where the values of these keys are to go; None: to new arrays. Raises `ArgumentError` as `arrays_for`."""
    if out is None:
        return [None] * len(entries)
    outs = []
    for entry, (_, each) in zip(entries, pairs(keys, out), strict=True):
        entry.check(each, "out")
        array = as_array(each)
        if not array.flags.writeable:
            raise ArgumentError(f"out for key {entry.key!r} is read-only")
        outs.append(array)
    return outs
