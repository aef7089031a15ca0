"""A bank: memory for all tensors of one step, reused once it has no reader left.

Tensors of a step may outlive it (saved for a backward pass, or kept in a list). So a step takes a free bank, or a new
one. A steady loop needs two.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorwire._native import Hold, Memory
from tensorwire.errors import OutOfMemory

MOST_BANKS = 250  # their number travels in 8 bits beside the step


class Bank:
    """One bank of this process: ``owner`` is its memory, ``step`` the last one that took it."""

    __slots__ = ("held", "memory", "number", "owner", "step")

    def __init__(self, number: int, owner: Memory) -> None:
        self.number, self.owner, self.memory = number, owner, memoryview(owner)
        self.step = 0
        self.held = False

    def hold(self, step: int, released: Callable[[Bank], None] | None = None) -> Hold:
        """Takes it for ``step``: all of its bytes. ``released(bank)`` is called when the last holder is gone."""
        self.step, self.held = step, True
        return Hold(self.owner, 0, self.memory.nbytes, self._end, released or _nothing)

    def _end(self, released: Callable[[Bank], None]) -> None:
        self.held = False
        released(self)


def _nothing(_: object) -> None:
    """Does nothing but to let go of the token."""


def check_number(banks: int, name: str) -> None:
    """Refuses one bank more than ``banks`` if there can be no more. Raises `OutOfMemory`."""
    if banks >= MOST_BANKS:
        raise OutOfMemory(
            f"{name}: tensors of {banks} earlier runs are still held, such as losses with their graphs in a "
            "list: detach() them"
        )


def hold_all(memory: Memory) -> Hold:
    """All of ``memory``, for readers that give no credit back."""
    return Hold(memory, 0, memory.nbytes, _nothing, _nothing)


def hold_part(memory: Memory, offset: int, nbytes: int, kept: Hold) -> Hold:
    """A part of ``memory``, which keeps ``kept`` until it is released. Others may keep it longer."""
    return Hold(memory, offset, nbytes, _nothing, kept)
