"""What the two ends of an edge do in addition to the transfer, in ours and in peers alike: add two tensors, sum them.

The producer adds two tensors of float32 into the memory that is to be sent, ``torch.add(a, b, out=...)``; the consumer
sums what it received. All values are small integers, of which every half cancels the one before it, so that no float32
on the way is rounded and every sum is known exactly. The first and the last value say which step it is.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from tensorwire.bench.actors.lines import repeats

_HALF = 1024  # elements


def _block(term: int, round: int) -> np.ndarray[Any, Any]:
    digest = hashlib.shake_128(f"{term} {round}".encode()).digest(_HALF)
    half = np.frombuffer(digest, np.int8).astype(np.float32)
    return np.concatenate([half, -half])


class Summands:
    """The producer's end: two tensors of ``elements`` values."""

    def __init__(self, elements: int) -> None:
        self._terms = [torch.zeros(elements), torch.zeros(elements)]
        self._row = self._terms[0].numpy()

    def prepare(self, round: int) -> None:
        """Puts the round's values there."""
        for i, term in enumerate(self._terms):
            block = torch.from_numpy(_block(i, round))
            whole = term.numel() // block.numel() * block.numel()
            term[:whole].view(-1, block.numel()).copy_(block)
            term[whole:] = block[: term.numel() - whole]

    def add(self, step: int, out: torch.Tensor) -> None:
        """Produces the tensor of a round's step, counted from 1, in the memory of ``out``."""
        self._row[0] = self._row[-1] = step
        torch.add(*self._terms, out=out)


class Sums:
    """The consumer's end: what the tensors of a round, each of ``elements`` values, summed up to."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self.found: list[float] = []

    def take(self, tensor: torch.Tensor) -> None:
        """Consumes a tensor."""
        self.found.append(tensor.sum().item())

    def check(self, round: int, steps: int, last: Any) -> None:
        """Raises `SystemExit` unless all sums of a round were right and ``last`` holds its last tensor, bit for bit.

        The next round begins.
        """
        found, self.found = self.found, []
        values, (first, second) = np.frombuffer(last, np.float32), (_block(0, round), _block(1, round))
        block, end = first + second, (self._elements - 1) % first.size
        rest = block[: end + 1].sum() - first[0] - first[end]
        if found != [rest + 2 * step for step in range(1, steps + 1)]:
            raise SystemExit("the sums of what arrived are wrong")
        if values.size != self._elements:
            raise SystemExit(f"{values.size} values arrived, not {self._elements}")
        ends = (values[0], values[-1]) == (steps + second[0], steps + second[end])
        if not (ends and repeats(values[1:-1], np.roll(block, -1))):
            raise SystemExit("the values that arrived are wrong")
