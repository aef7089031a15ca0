"""One clock for a job on several machines: each member's offset from the coordinator's, from a few round trips."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tensorwire.errors import ProtocolError
from tensorwire.messages import decode_message
from tensorwire.observe.spans import Clock

_TRIPS = 8


class _Time(msgspec.Struct, frozen=True, array_like=True):
    """A moment on some machine's monotonic clock. Processes with the same ``where`` share it."""

    where: str
    seconds: float


def _here() -> str:
    """This machine, since it started, and the namespace that shifts its clocks."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:  # a kernel before 5.6
        return boot


def pack_time() -> bytes:
    """The coordinator's answer: where it is, and when that is."""
    return msgspec.msgpack.encode(_Time(_here(), time.monotonic()))


def distance(ask: Callable[[], bytes]) -> Clock:
    """What to add here to come to the clock of who answers ``ask()`` with `pack_time`; nothing on one machine.

    The answer was made somewhere between question and reply: the fastest trip says it best, to half its time.
    """
    best: Clock | None = None
    for _ in range(_TRIPS):
        start = time.monotonic()
        answer = ask()
        stop = time.monotonic()
        try:
            there = decode_message(answer, _Time)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the coordinator does not know what time it is: {error}") from None
        if there.where == _here():
            return Clock()
        found = Clock(there.seconds - (start + stop) / 2, (stop - start) / 2)
        best = found if best is None or found.error < best.error else best
    assert best is not None
    return best
