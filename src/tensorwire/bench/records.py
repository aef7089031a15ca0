"""The record of a measurement, and its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tensorwire.sizes import size_text as size_text

COUNTED = "0 copies, registrations, RPCs"  # a target of counts, which no load changes


@dataclass(frozen=True)
class Target:
    """What a figure should reach: at most ``seconds``, and at least a share of the speed of peers in the same run.

    What was not measured is left out. ``worst``: by the slowest round.
    """

    seconds: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    worst: bool = False

    def __str__(self) -> str:
        parts = [] if self.seconds is None else [f"<= {time_text(self.seconds)}"]
        parts += [f">= {share:.2f} of {name}" for name, share in self.shares.items()]
        return " and ".join(parts)

    def met(self, seconds: float, others: Mapping[str, float]) -> bool | None:
        """Whether it was reached; ``others``: seconds of each group in this run. None: nothing to compare with."""
        results = [] if self.seconds is None else [seconds <= self.seconds]
        results += [others[name] / seconds >= share for name, share in self.shares.items() if name in others]
        return all(results) if results else None


@dataclass(frozen=True)
class Record:
    """One figure. ``seconds`` is the median over rounds, ``low`` and ``high`` the fastest and slowest round.

    docs/benchmarks.md says what each ``mode`` is.
    ``ratio`` is the share of the limit's speed, ``limit_value / seconds``; it and ``met`` are None on a busy machine.
    ``copies``, ``rpcs`` and ``registrations`` are counts an operation on both ends together; None where nobody counts
    them. ``details``: what else is told of a step of training, such as its parts in seconds. ``how``: how a peer was
    run, where that is told.
    """

    bench: str
    device: str
    peer: str
    mode: str
    workload: str
    bytes: int
    seconds: float
    low: float
    high: float
    rounds: int
    bytes_per_second: float | None = None
    limit: str | None = None
    limit_value: float | None = None
    ratio: float | None = None
    copies: float | None = None
    rpcs: float | None = None
    registrations: float | None = None
    target: str | None = None
    met: bool | None = None
    details: Mapping[str, float] | None = None
    how: str | None = None

    def unjudged(self) -> Record:
        """The same without ratio and verdict, as on a busy machine; a verdict on counts or accuracy stays."""
        lasting = self.target == COUNTED or self.mode == "convergence"
        return replace(self, ratio=None, met=self.met if lasting else None)


def time_text(seconds: float) -> str:
    """Seconds for people: three digits and a unit."""
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * f >= 1 or u == "us")
    value = seconds * factor
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}"
