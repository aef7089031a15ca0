"""Numeric settings from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from tensorwire.errors import ArgumentError

# A mistyped count must not start processes until the machine has no memory left. A job may have this many workers, and
# as many servers; one machine starts at most so many of each.
MOST_MEMBERS = 1 << 16
MOST_ON_A_MACHINE = 512
MOST_MACHINES = 4096


class FailureTimes(NamedTuple):
    """In seconds, all from one: each ``beat`` a process shows that it lives, it ``leaves`` a job of whose coordinator
    it has heard nothing for so long, and it is lost after so long a ``silence``.
    """

    beat: float
    leaves: float
    silence: float

    @classmethod
    def of(cls, failure_timeout: float) -> FailureTimes:
        """A process that was cut off has left before it is lost, and may miss a few beats before."""
        times = cls(failure_timeout / 10, 0.8 * failure_timeout, failure_timeout)
        assert 2 * times.beat < times.leaves < times.silence
        return times


def failure_times(environment: Mapping[str, str] = os.environ) -> FailureTimes:
    """Those of ``TENSORWIRE_FAILURE_TIMEOUT`` (10 s). Raises `ArgumentError`."""
    return FailureTimes.of(seconds(environment, "TENSORWIRE_FAILURE_TIMEOUT", 10.0))


def seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """A number of seconds above 0. Raises `ArgumentError`."""
    text = environment.get(name, "")
    try:
        found = float(text) if text else default
    except ValueError:
        found = -1.0
    if not 0 < found < 1e6:
        raise ArgumentError(f"{name} must be a number of seconds above 0, not {text!r}")
    return found


def step_timeout(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds that a step may wait for other workers: ``TENSORWIRE_TIMEOUT`` (1800). Raises `ArgumentError`."""
    return seconds(environment, "TENSORWIRE_TIMEOUT", 1800.0)


def check_count(what: str, count: int, most: int = MOST_MEMBERS) -> None:
    """Raises `ArgumentError` if ``count`` of ``what`` is above ``most``."""
    if count > most:
        raise ArgumentError(f"{what}: at most {most}, not {count}")


def check_min_workers(what: str, least: int | None, workers: int) -> None:
    """Raises `ArgumentError` unless ``least``, if there is one, is the number of some of the workers."""
    if least is not None and not 1 <= least <= workers:
        raise ArgumentError(f"{what} is the number of workers to go on with, 1 to {workers}, not {least}")


def whole(environment: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    """A whole number, or ``default`` where it is not set. Raises `ArgumentError`."""
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ArgumentError(f"{name} must be a whole number, not {text!r}") from None
