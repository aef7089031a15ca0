"""The functions that send, each of them watched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tensorwire.edge.header import HEADER
from tensorwire.graph.ir import Unknown
from tensorwire.graph.kinds import BOUNDED, STATIC
from tensorwire.torch.graph.execution.transfers import Function, Transfers
from tests.torch.graph.cuts import same_bits

seen: Counter[str] = Counter()  # "births": those that were looked at; "turned": with other strides than traced


class WatchedTransfers(Transfers):
    """What is sent stays what it was. What the plan says is born lies where it says, from the second run on."""

    def sender(self, index: int) -> Function:
        send, edge = super().sender(index), self._edges[index]

        def watched(value: Any) -> None:
            if not isinstance(value, torch.Tensor):
                send(value)
                return
            if edge.birthplace and edge.kind in (STATIC, BOUNDED) and self._group.step > 1:
                self._check_birth(index, value)
            before, strides = value.clone(), value.stride()
            send(value)
            assert value.stride() == strides
            assert same_bits(value, before), f"{edge} was changed by sending it"

        return watched

    def _check_birth(self, index: int, value: torch.Tensor) -> None:
        edge, bank = self._edges[index], self._group.bank
        assert bank is not None
        assert edge.slot is not None
        assert edge.spec is not None
        place = bank.owner.address + edge.slot + (HEADER if edge.kind == BOUNDED else 0)
        assert value.untyped_storage().data_ptr() == place, f"{edge}: it was born elsewhere"
        assert len(value.shape) == len(edge.spec.shape)
        assert all(_agree(*sizes) for sizes in zip(value.shape, edge.spec.shape, strict=True))
        assert str(value.dtype) == f"torch.{edge.spec.dtype}"
        seen["births"] += 1
        turned = not all(_agree(*sizes) for sizes in zip(value.stride(), edge.spec.stride, strict=True))
        seen["turned"] += turned
        assert turned or value.data_ptr() == place + edge.offset, f"{edge}: it begins elsewhere"


def _agree(size: int, planned: int | Unknown) -> bool:
    if isinstance(planned, Unknown):
        return planned.most is None or size <= planned.most
    return size == planned
