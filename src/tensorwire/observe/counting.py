"""Counters of this process. Tests assert them; the demo and the benchmarks print them."""

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
    """Totals, since the process began or since an earlier look.

    ``messages``: writes, reads, signals and atomics handed to a device. ``bytes``: their payload.
    ``mapped_bytes``: payload that was born in mapped memory and sent by signal alone: no byte moved.
    ``copies``, ``copied_bytes``: user-space copies of payload made by Tensorwire (the kernel's own, in sockets, are
    not counted). ``registrations``: regions allocated or registered. ``rpcs``: requests on the control connection.
    ``pickles``: objects pickled or unpickled by anyone while ``pickles_counted()`` is active.
    """

    messages: int = 0
    bytes: int = 0
    mapped_bytes: int = 0
    copies: int = 0
    copied_bytes: int = 0
    registrations: int = 0
    rpcs: int = 0
    pickles: int = 0


class LiveCounters:
    """The counters as they are now, each by its name. They are atomic, and native code counts here too."""

    def __getattr__(self, name: str) -> int:
        try:
            return _native.counted()[_PLACES[name]]
        except KeyError:
            raise AttributeError(f"no such counter: {name}") from None

    def add(self, **amounts: int) -> None:
        """Adds to counters by name."""
        for name, amount in amounts.items():
            _native.count(_PLACES[name], amount)

    def sent(self, nbytes: int) -> None:
        """A message of so many bytes, in a fraction of the time that ``add`` takes."""
        _native.count(_MESSAGES, 1)
        _native.count(_BYTES, nbytes)

    def mapped(self, nbytes: int) -> None:
        """Adds to ``mapped_bytes``, in a fraction of the time: a signal alone is soon sent."""
        _native.count(_MAPPED, nbytes)

    def snapshot(self) -> Counters:
        """A copy that later events do not change."""
        return Counters(**dict(zip(_native.COUNTERS, _native.counted(), strict=True)))

    def since(self, earlier: Counters) -> Counters:
        """What happened after ``earlier``."""
        now = self.snapshot()
        return Counters(**{f.name: getattr(now, f.name) - getattr(earlier, f.name) for f in fields(now)})


_PLACES = {name: place for place, name in enumerate(_native.COUNTERS)}

_MAPPED, _MESSAGES, _BYTES = _PLACES["mapped_bytes"], _PLACES["messages"], _PLACES["bytes"]

counters = LiveCounters()


@contextlib.contextmanager
def pickles_counted() -> Iterator[LiveCounters]:
    """Counts, for as long as it is active, every call of the ``pickle`` module's entry points in this process."""
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
