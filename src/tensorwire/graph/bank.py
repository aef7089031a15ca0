"""Memory that one run of a graph keeps until the last tensor in it is gone: a bank, and who holds it.

A graph may run again while tensors of an earlier run are alive (saved for a backward pass, or forgotten in a list).
Each run takes a bank that nobody holds any more, or a new one. In a steady loop there are two, and no more are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from tensorwire.errors import OutOfMemory

MOST_BANKS = 250  # their number travels in 8 bits beside the run's


class Held(numpy.ndarray[Any, numpy.dtype[numpy.uint8]]):
    """The bytes of a bank during one run. Tensors over them keep it; ``released()`` is called when it dies.

    ``keeps``: what lives as long.
    """

    released: Callable[[], None] | None = None
    keeps: object = None

    def __del__(self) -> None:
        released, self.released = self.released, None
        if released is not None:
            released()


def hold(memory: memoryview, released: Callable[[], None] | None = None) -> Held:
    """A view of ``memory`` whose end is told by ``released()``, in whatever thread that happens."""
    held = numpy.frombuffer(memory, numpy.uint8).view(Held)
    held.released = released
    return held


@dataclass(frozen=True)
class Ledger:
    """How workers tell each other of banks that they had to make: ``publish(way, worker, number, region)`` and
    ``find(way, worker, number)``; ``way`` is ``in`` or ``out``. ``name``: of the graph. ``plans()``: how many this
    worker has made."""

    name: str
    publish: Callable[[str, str, int, bytes], None]
    find: Callable[[str, str, int], bytes]
    plans: Callable[[], int]


def too_many(banks: int, name: str) -> None:
    """Raises `OutOfMemory` if there can be no more banks."""
    if banks >= MOST_BANKS:
        raise OutOfMemory(
            f"graph {name}: tensors of {banks} earlier runs are still held, such as losses with their graphs in a "
            "list: detach() them"
        )


class Bank:
    """One bank of this process: ``memory``, and the last run that took it."""

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.memory = memory
        self.run = 0
        self.held = False

    def hold(self, run: int, released: Callable[[Bank], None] | None = None) -> Held:
        """Takes it for ``run``. ``released(bank)`` is called when the last holder is gone."""
        self.run, self.held = run, True

        def end() -> None:
            self.held = False
            if released is not None:
                released(self)

        return hold(self.memory, end)
