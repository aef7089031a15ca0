"""Where gradients are born: the store's slots of a parameter, side by side, as the memory of one tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from tensorwire.observe import counters
from tensorwire.store.sharding import Bucket
from tensorwire.store.store_client import StoreClient
from tensorwire.torch.graph.memory.target import ALIGNMENT, MemoryTarget

_slots = WeakIdKeyDictionary()  # GradientSlot by parameter; it must not keep the parameter


class GradientSlot:
    """The memory that parameter ``i`` of a store is pushed from, and what lives in it: a gradient that was born there.

    A holder of that gradient has its memory, past the step that pushed it. It moves out when something else has to be
    pushed: then its storage gets other memory, and all tensors over it keep their values.
    """

    def __init__(self, client: StoreClient, i: int, buckets: Sequence[Bucket]) -> None:
        self._client, self._buckets = client, buckets
        self.nbytes = client.plan.tensors[i].nbytes
        self._place = MemoryTarget(client.gradients, offset=client.plan.offsets[i], nbytes=self.nbytes)
        self._born: StorageWeakRef | None = None
        self._pid = os.getpid()

    def place(self) -> MemoryTarget | None:
        """Where a gradient can be born now; None if one lives there, or is still on its way.

        It does not wait; the push, which copies gradients of other memory, does. Raises what became of the last push.
        """
        if not self.nbytes or not self._client.births or self.taken or os.getpid() != self._pid:
            return None
        return self._place if all(map(self._client.is_free, self._buckets)) else None

    def born(self, gradient: torch.Tensor) -> None:
        """Says that the storage of ``gradient`` may be here."""
        if self._place.holds(gradient):
            self._born = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]

    @property
    def taken(self) -> bool:
        """Whether a storage that was born here lives here."""
        return self._living() is not None

    def holds(self, row: torch.Tensor) -> bool:
        """Whether ``row``, all of a gradient, is this memory: one that only begins here may show it in another way."""
        return row.data_ptr() == self._place.address and row.is_contiguous()

    def clear(self) -> None:
        """Who lives here moves out: one copy, counted. For what is pushed and was not born here."""
        storage = self._living()
        if storage is not None:
            storage.resize_(self.nbytes + ALIGNMENT)  # another size, so other memory, with the same values
            counters.add(copies=1, copied_bytes=self.nbytes)
        self._born = None

    def _living(self) -> torch.UntypedStorage | None:
        if self._born is None:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._born.cdata)
        if storage is None or storage.data_ptr() != self._place.address:
            self._born = storage = None
        return storage


def open_slots(
    client: StoreClient, params: Sequence[torch.nn.Parameter], buckets: Sequence[Sequence[Bucket]]
) -> list[GradientSlot]:
    """Those of the store's parameters; ``buckets`` are those of each. `slot_of` finds those of the CPU from now on."""
    found = [GradientSlot(client, i, its) for i, its in enumerate(buckets)]
    for p, slot in zip(params, found, strict=True):
        if p.is_cpu:
            _slots[p] = slot
    return found


def close_slots(params: Sequence[torch.nn.Parameter], slots: Sequence[GradientSlot]) -> None:
    """No gradient is born in ``slots`` of ``params`` any more."""
    for p, slot in zip(params, slots, strict=True):
        if slot_of(p) is slot:
            del _slots[p]


def slot_of(parameter: torch.Tensor) -> GradientSlot | None:
    """Where the gradient of ``parameter`` may be born; None if it is in no store."""
    slot: GradientSlot | None = _slots.get(parameter)  # type: ignore[no-untyped-call]
    return slot
