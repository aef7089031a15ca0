"""What the stores of a comparison push, and what must then be pulled, for ours and for those of peers.

A tensor's values repeat every 1,024 elements, and differ from tensor to tensor, worker to worker and round to round.
Torch's elementwise optimizers have the same bits on both sides of such a multiple, so a short tensor tells what
becomes of a long one, and every value can be checked without a second model of the same size.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from tensorwire.bench.actors.lines import repeats
from tensorwire.models import Model
from tensorwire.store.sharding import CUT, ParameterSpec

LEARNING_RATE = 0.01
_START = -1  # in the place of a worker: the values before the first round


def sgd(parameters: Sequence[torch.Tensor]) -> torch.optim.SGD:
    """The optimizer of every store in the comparison."""
    return torch.optim.SGD([{"params": list(parameters)}], lr=LEARNING_RATE, momentum=0.9, fused=True)


def _block(tensor: int, worker: int, round: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(((round * 4096 + tensor) * 64) + worker + 1)
    return torch.randn(CUT, generator=generator)


def put(into: torch.Tensor, tensor: int, worker: int, round: int) -> None:
    """Fills elements of a tensor, flat, that begin at a multiple of 1,024 with a worker's gradient in a round."""
    _spread(into, _block(tensor, worker, round))


def put_start(into: torch.Tensor, tensor: int) -> None:
    """The same with the parameters that training begins with."""
    _spread(into, _block(tensor, _START, 0))


def _spread(into: torch.Tensor, block: torch.Tensor) -> None:
    whole = into.numel() // CUT * CUT
    into[:whole].view(-1, CUT).copy_(block)
    into[whole:].copy_(block[: into.numel() - whole])


def check_gradient(pushed: torch.Tensor, tensor: int, worker: int, round: int) -> None:
    """Raises `SystemExit` unless what a server has got of a gradient is what ``put`` made."""
    _compare(pushed, _block(tensor, worker, round).repeat(2), "gradients")


def _compare(values: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """``wanted``: the first 1,024 values, then those after the last multiple of 1,024."""
    whole = values.numel() // CUT * CUT
    rest = wanted[CUT if whole else 0 :][: values.numel() - whole]
    if not (repeats(values[:whole].numpy(), wanted[:CUT].numpy()) and torch.equal(values[whole:], rest)):
        raise SystemExit(f"the {what} that arrived are wrong")


class Expected:
    """What the parameters must be after all rounds so far; ``rule``: SGD, or none, which keeps them."""

    def __init__(self, model: Model, workers: int, rule: str) -> None:
        self._workers = workers
        self._short = [torch.nn.Parameter(torch.empty(_short(t))) for t in model.tensors]
        for i, short in enumerate(self._short):
            put_start(short.data, i)
        self._optimizer = sgd(self._short) if rule == "SGD" else None

    def went(self, round: int, steps: int) -> None:
        """A round of so many steps with the same gradients is over."""
        if self._optimizer is None:
            return
        for i, short in enumerate(self._short):
            short.grad = torch.empty_like(short)
            put(short.grad, i, 0, round)
            for worker in range(1, self._workers):
                other = torch.empty_like(short)
                put(other, i, worker, round)
                short.grad += other
            short.grad /= self._workers
        for _ in range(steps):
            self._optimizer.step()

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raises `SystemExit` unless these are the parameters, bit for bit. Each is flat."""
        for values, short in zip(parameters, self._short, strict=True):
            _compare(values, short.data, "parameters")


def _short(tensor: ParameterSpec) -> int:
    """Elements of the tensor that stands for this one: its first 1,024, and those after the last multiple of it."""
    return tensor.elements if tensor.elements < CUT else CUT + tensor.elements % CUT


def flat(memory: Any, elements: int, offset: int) -> torch.Tensor:
    """So many values at byte ``offset`` of ``memory``, sharing it, in one row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a message is read-only, and only read
        return torch.frombuffer(memory, dtype=torch.float32, count=elements, offset=offset)


def digest(parameters: Sequence[torch.Tensor]) -> int:
    """A number that other values would not have."""
    found = 0
    for values in parameters:
        row: Any = values.numpy()
        found = zlib.crc32(row, found)
    return found
