"""The waits between a device and a store, each left out: a test has to see that.

What waits for what is in the docstring of ``tensorwire.torch.crossings``. A slot's credit (4) cannot be missed:
a gradient needs its parameter, whose version comes after its server has read the slot.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tensorwire.torch.crossings import Crossing, Lane
from tensorwire.torch.part import Part


def _nothing(*_: Any) -> None:
    pass


def _forgetting(fill: Callable[..., None]) -> Callable[..., None]:
    """Who pushes keeps no gradients of devices until they were copied."""

    def filled(part: Part, bucket: Any, values: Any, streams: Any = ()) -> None:
        fill(part, bucket, values, streams)
        if isinstance(values, dict):  # of this bucket alone, from inside of backward
            values.update({tensor: torch.empty(0) for tensor, value in values.items() if value is not None})

    return filled


class Late:
    """Copies down are waited for only once the worker that trains says so: others' memory is then long in use."""

    def __init__(self) -> None:
        self._may = threading.Event()
        self._may.set()
        self._wait = Crossing.wait_for_copies

    def hold(self) -> None:
        self._may.clear()

    def go_on(self) -> None:
        self._may.set()

    def __call__(self, crossing: Crossing) -> None:
        assert self._may.wait(60)
        self._wait(crossing)


@contextlib.contextmanager
def late() -> Iterator[Late]:
    gate = Late()
    with mock.patch.object(Crossing, "wait_for_copies", lambda crossing: gate(crossing)):
        yield gate


_LAST = (Lane, "wait_for_copies")
# By what is left out: the methods that wait, and what a training has to do for it to show. Memory of gradients that are
# given back after a step is kept by whom sends it, and also by what the stream that trains waits for.
WAITS: dict[str, tuple[list[tuple[Any, str]], dict[str, Any]]] = {
    "1: a copy down waits for the streams that made the gradients": ([(Crossing, "wait_for_gradients")], {}),
    "2: a bucket is sent when its copies down are done": ([(Crossing, "wait_for_copies")], {}),
    "3: gradients are kept until then": ([(Part, "fill"), _LAST], {"held": True}),
    "3: the stream that trains goes on after them": ([_LAST], {"held": True, "to_none": False}),
    "5: a copy up waits for what used the parameters": ([(Crossing, "wait_for_use")], {"elsewhere": True}),
    "6: a stream that reads a parameter waits for its copy up": ([(Crossing, "join")], {}),
    "7: a bucket is sent when its last copy up is done": ([(Crossing, "wait_for_values")], {}),
}


@contextlib.contextmanager
def without(wait: str) -> Iterator[None]:
    """In it that wait is left out."""
    with contextlib.ExitStack() as stack:
        for owner, method in WAITS[wait][0]:
            instead = _forgetting(Part.fill) if method == "fill" else _nothing
            stack.enter_context(mock.patch.object(owner, method, instead))
        yield
