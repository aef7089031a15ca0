"""Counters of this process. Tests assert them; the demo and benchmarks print them."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from tensorwire import _native


@dataclass(frozen=True)
class Counters:
    """Totals of this process, since it began or since an earlier snapshot.

    Attributes:
        messages: Writes, reads, signals and atomics given to a device.
        bytes: Their payload in bytes.
        mapped_bytes: Payload in bytes that was computed in mapped memory and sent by a signal alone: no byte moved.
        copies: Copies of payload that Tensorwire made in user space; the kernel's own, in sockets, are not counted.
        copied_bytes: The size of these copies in bytes.
        registrations: Regions allocated or registered.
        rpcs: Requests on the control connection.
        pickles: Calls of ``pickle`` by any code while `pickles_counted` is active.
        pushes: Of a worker: buckets of gradients that it sent to servers. Each has one of these fates, on a server:
        applied: Pushes that led to a new version by themselves.
        merged: Pushes that led to a new version together with others.
        discarded: Pushes that changed nothing.
        host_waits: With parameters on an accelerator: how often the thread that trains waited for copies from or to it.
    """

    messages: int = 0
    bytes: int = 0
    mapped_bytes: int = 0
    copies: int = 0
    copied_bytes: int = 0
    registrations: int = 0
    rpcs: int = 0
    pickles: int = 0
    pushes: int = 0
    applied: int = 0
    merged: int = 0
    discarded: int = 0
    host_waits: int = 0


class LiveCounters:
    """The counters as they are now: ``counters.copies`` and so on, by the names in `Counters`.

    They are always on, and atomic; native code counts here, too.
    """

    def __getattr__(self, name: str) -> int:
        try:
            return _native.counted()[_PLACES[name]]
        except KeyError:
            raise AttributeError(f"no such counter: {name}") from None

    def add(self, **amounts: int) -> None:
        """Adds to counters.

        Args:
            **amounts: What to add, by the counter's name.
        """
        for name, amount in amounts.items():
            _native.count(_PLACES[name], amount)

    def sent(self, nbytes: int) -> None:
        """Counts a message, in a fraction of the time that ``add`` takes.

        Args:
            nbytes: The size of its payload in bytes.
        """
        _native.count(_MESSAGES, 1)
        _native.count(_BYTES, nbytes)

    def mapped(self, nbytes: int) -> None:
        """Adds to ``mapped_bytes``, in a fraction of the time that ``add`` takes.

        Args:
            nbytes: What to add, in bytes.
        """
        _native.count(_MAPPED, nbytes)

    def copied(self, nbytes: int) -> None:
        """Counts a copy, in a fraction of the time that ``add`` takes.

        Args:
            nbytes: Its size in bytes.
        """
        _native.count(_COPIES, 1)
        _native.count(_COPIED_BYTES, nbytes)

    def snapshot(self) -> Counters:
        """Takes the totals as they are now.

        Returns:
            The totals, which later events do not change.
        """
        return Counters(**dict(zip(_native.COUNTERS, _native.counted(), strict=True)))

    def since(self, earlier: Counters) -> Counters:
        """Counts what happened after a snapshot.

        Args:
            earlier: From ``snapshot()``.

        Returns:
            The differences.
        """
        now = self.snapshot()
        return Counters(**{f.name: getattr(now, f.name) - getattr(earlier, f.name) for f in fields(now)})


_PLACES = {name: place for place, name in enumerate(_native.COUNTERS)}

_MAPPED, _MESSAGES, _BYTES = _PLACES["mapped_bytes"], _PLACES["messages"], _PLACES["bytes"]
_COPIES, _COPIED_BYTES = _PLACES["copies"], _PLACES["copied_bytes"]

counters = LiveCounters()
"""The counters of this process."""


@contextlib.contextmanager
def pickles_counted() -> Iterator[LiveCounters]:
    """Counts in ``counters.pickles`` every call of the ``pickle`` module's functions and classes within the block.

    Yields:
        ``counters``.
    """
    names = ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")
    originals = {name: getattr(pickle, name) for name in names}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            counters.add(pickles=1)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(pickle, name, counting(original))
    try:
        yield counters
    finally:
        for name, original in originals.items():
            setattr(pickle, name, original)
