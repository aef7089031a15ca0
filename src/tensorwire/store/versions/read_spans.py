"""What is read of a version: spans of its file, and the memory that they go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ReadSpan(NamedTuple):
    """``nbytes`` at ``file`` in the file, and at ``memory`` in what a reader has read."""

    file: int
    memory: int
    nbytes: int


class Chosen(NamedTuple):
    """What is read of a tensor: its dtype and shape then, and where it begins in what is read."""

    dtype: str
    shape: tuple[int, ...]
    memory: int


@dataclass(frozen=True)
class Selection:
    """``tensors``, by name, and the ``spans`` that hold them; ``nbytes``: the size of the memory that these fill."""

    tensors: dict[str, Chosen]
    spans: tuple[ReadSpan, ...]
    nbytes: int

    @property
    def payload(self) -> int:
        """How many bytes are read."""
        return sum(span.nbytes for span in self.spans)
