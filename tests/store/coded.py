"""What a worker's codes lead to, computed again in plain torch; only the codes themselves are the package's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tensorwire.store.compression import parse_compression
from tensorwire.store.modes import EASGD, LocalSGD, Mode

Pieces = Sequence["torch.Tensor | None"]


class SimulatedCode:
    """The code of one worker's pushes to one bucket. ``first``: the bucket's pieces in the first version."""

    def __init__(self, name: str, mode: Mode, first: Sequence[torch.Tensor]) -> None:
        self.compression = parse_compression(name)
        assert self.compression is not None
        self.mode = mode
        self.sizes = [v.numel() if v.is_floating_point() else 0 for v in first]
        self.kept = torch.zeros(sum(self.sizes))
        if isinstance(mode, EASGD):
            self.kept = self._row(first)
        self.code = np.zeros(self.compression.nbytes(sum(self.sizes)), np.uint8)
        self.nbytes = len(self.code) + sum(v.nbytes for v in first if not v.is_floating_point())
        self.smaller = sum(self.sizes) > 0 and self.nbytes < sum(v.nbytes for v in first)

    def _row(self, pieces: Pieces) -> torch.Tensor:
        """Floating-point pieces side by side; one that is missing is zeros."""
        both = zip(pieces, self.sizes, strict=True)
        return torch.cat([torch.zeros(n) if v is None or not n else v.float() for v, n in both])

    def push(self, pieces: Pieces, last: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The pieces as the server sees them. ``last``: what it answered last."""
        assert self.compression is not None
        row = self._row(pieces)
        known = self._row(last) if isinstance(self.mode, LocalSGD) else torch.zeros_like(row)
        here = torch.cat([torch.full((n,), v is not None) for v, n in zip(pieces, self.sizes, strict=True)])
        if isinstance(self.mode, EASGD):
            known = self.kept
            row = row - known
        else:
            row = torch.where(here, row - known + self.kept, 0.0)
        arrives = torch.zeros_like(row)
        self.compression.encode(row.numpy(), self.code)
        self.compression.decode(self.code, arrives.numpy())
        self.kept = known + arrives if isinstance(self.mode, EASGD) else torch.where(here, row - arrives, self.kept)
        seen = (known + arrives).split(self.sizes)
        return [
            part.to(v.dtype) if v is not None and v.is_floating_point() else v
            for v, part in zip(pieces, seen, strict=True)
        ]

    def answered(self, answer: Sequence[torch.Tensor]) -> None:
        """The worker has got this."""
        if isinstance(self.mode, EASGD):
            self.kept = self.kept - self._row(answer)
