"""The stores of one optimizer, and their end: by ``close()``, with the optimizer, or with the job."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from tensorwire.errors import TensorwireError
from tensorwire.launch import Worker
from tensorwire.store.course import Course
from tensorwire.torch.stepping import Stepping

_living: weakref.WeakSet[OwnedStores] = weakref.WeakSet()


class OwnedStore(Protocol):
    """A store of some parameters."""

    def finish(self, *, dropped: bool) -> None:
        """This worker is done. ``dropped``: nobody waits for what is still on its way."""

    def release(self) -> None:
        """Makes the parameters ordinary tensors, with the values that they have."""


class OwnedStores:
    """Must not refer to ``optimizer``: what is here ends with it, in a call of this worker's that follows."""

    def __init__(self, worker: Worker, optimizer: torch.optim.Optimizer, course: Course, steps: Stepping) -> None:
        if _living:  # a scheduler's optimizer refers to itself: one that was dropped is to make room now
            gc.collect()
        self._worker, self._course, self._steps, self._optimizer = worker, course, steps, weakref.ref(optimizer)
        self._stores: list[OwnedStore] = []
        self._handles: list[RemovableHandle] = []
        worker.at_close(self.finish, owner=optimizer)
        _living.add(self)

    def add(self, store: OwnedStore, hooks: Iterable[RemovableHandle]) -> None:
        """One more, and the hooks on modules that go with it."""
        self._stores.append(store)
        self._handles += hooks

    def finish(self) -> None:
        """Hooks and threads are gone, and this worker is done with the stores. Raises the first error, in the end."""
        dropped = self._optimizer() is None
        if dropped and not self._worker.closed:
            self._course.check()
        stores, self._stores = self._stores, []
        ours = set(map(id, stores))
        self._worker.uneven_stores[:] = [each for each in self._worker.uneven_stores if id(each) not in ours]
        calls: list[Callable[[], object]] = [self._steps.leave, *(handle.remove for handle in self._handles)]
        if self._steps.overlap is not None:
            calls.insert(1, self._steps.overlap.close)  # it shows the last values
        calls += [partial(store.finish, dropped=dropped) for store in stores]
        self._handles.clear()
        _living.discard(self)
        first: BaseException | None = None
        for call in calls:
            try:
                call()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """The same, and parameters become ordinary tensors."""
        stores = list(self._stores)
        try:
            self.finish()
        except TensorwireError as error:
            raise self._worker.member.explain(error) from None
        finally:
            self._worker.not_at_close(self.finish)
            for store in stores:
                store.release()
