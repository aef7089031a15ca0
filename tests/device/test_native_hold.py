"""Memory that is lent: it goes back once, when nobody looks into it any more, or when that is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire._native import Hold, Memory

NBYTES = 4096

VIEWS: dict[str, Callable[[Hold], Any]] = {
    "memoryview": lambda hold: memoryview(hold)[3:].cast("B"),
    "numpy": lambda hold: np.frombuffer(hold, np.float32)[1:].reshape(3, 5).T,
    "torch": lambda hold: torch.frombuffer(memoryview(hold), dtype=torch.int32)[1:].view(3, 5).t(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_it_goes_back_when_the_last_view_is_gone(name: str) -> None:
    returned: list[str] = []
    hold = Hold(Memory.allocate(NBYTES), 64, 64, returned.append, "token")
    view = VIEWS[name](hold)
    assert not hold.released
    del hold
    assert returned == []
    del view
    assert returned == ["token"]


def test_it_shows_its_part_of_the_memory() -> None:
    memory = Memory.allocate(NBYTES)
    memoryview(memory)[64:70] = b"inside"
    hold = Hold(memory, 64, 6, int, 0)
    assert bytes(hold) == b"inside"
    memoryview(hold)[:2] = b"IN"
    assert bytes(memoryview(memory)[63:71]) == b"\0INside\0"
    assert bytes(Hold(memory, NBYTES, 0, int, 0)) == b""
    for offset, nbytes in ((NBYTES, 1), (0, NBYTES + 1), (2**63, 2**63)):
        with pytest.raises(IndexError):
            Hold(memory, offset, nbytes, int, 0)


def test_read_only_memory_stays_so() -> None:
    assert memoryview(Hold(Memory.wrap(b"constant"), 0, 8, int, 0)).readonly


def test_it_goes_back_once() -> None:
    returned: list[int] = []
    hold = Hold(Memory.allocate(NBYTES), 0, 8, returned.append, 1)
    hold.release()
    assert hold.released
    hold.release()
    del hold
    assert returned == [1]


def test_it_keeps_the_memory() -> None:
    view = memoryview(Hold(Memory.allocate(NBYTES), 0, NBYTES, int, 0))
    view[:] = b"x" * NBYTES
    assert bytes(view) == b"x" * NBYTES


def fail(token: int) -> None:
    raise ValueError(f"cannot take {token}")


def test_errors_are_raised_where_somebody_can_catch_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(args.exc_value))
    hold = Hold(Memory.allocate(NBYTES), 0, 8, fail, 1)
    with pytest.raises(ValueError, match="cannot take 1"):
        hold.release()
    del hold
    assert told == []  # it was given back, with an error
    with pytest.raises(KeyError):  # an exception that is on its way goes on
        [Hold(Memory.allocate(NBYTES), 0, 8, fail, 2), {}["none"]]
    assert [str(error) for error in told] == ["cannot take 2"]
