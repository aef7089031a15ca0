"""Training modes: when a server closes a round, and what the workers compute on. `StoreOptimizer` takes one."""

from __future__ import annotations

import math

import msgspec

from tensorwire.errors import ArgumentError


class Sync(msgspec.Struct, frozen=True, tag="sync"):
    """All workers step together: a round closes when every worker's gradient is there.

    The mean (or sum) of the gradients is applied once, so that the parameters have the bits that one process would
    give them. A slow worker holds up all others.
    """


class Async(msgspec.Struct, frozen=True, tag="async"):
    """Every worker steps at its own pace: each gradient is applied by itself, as it arrives.

    A worker computes on its own copy of the parameters: of each bucket the version that its last push led to. A slow
    worker holds up nobody; its gradients are stale. The *staleness* of a push is the number of other pushes that were
    applied to the bucket between the version that the gradient was computed on and this push.

    Source: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012 (Downpour SGD). ``damping``: Zhang, Gupta,
    Lian and Liu, Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016.

    Args:
        damping: The learning rate of a push is ``lr / (1 + damping * staleness)``. 0: it does not depend on the
            staleness.

    Raises:
        ArgumentError: ``damping`` is negative or not a number.
    """

    damping: float = 0.0

    def __post_init__(self) -> None:
        _check_number("damping", self.damping)


class SSP(msgspec.Struct, frozen=True, tag="ssp"):
    """Stale synchronous parallel: as `Async`, but no worker is far ahead of the slowest.

    A worker's *clock* is the number of its steps. The values that a worker computes step ``n + 1`` on contain all
    gradients of the steps up to ``n - staleness`` of every worker, and some later ones: a server answers the push of
    step ``n`` once the slowest worker's clock is at least ``n - staleness``. With 0 the workers step together, though
    gradients are still applied one by one.

    Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013.

    Args:
        staleness: By how many steps the fastest worker may be ahead of the slowest, 0 or more.
        damping: As for `Async`.

    Raises:
        ArgumentError: ``staleness`` is not a whole number of at least 0, or ``damping`` is negative or not a number.
    """

    staleness: int = 3
    damping: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.staleness, bool) or not isinstance(self.staleness, int) or self.staleness < 0:
            raise ArgumentError(f"staleness must be a whole number of steps, 0 or more, not {self.staleness!r:.100}")
        _check_number("damping", self.damping)


Mode = Sync | Async | SSP


def _check_number(name: str, value: object) -> None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ArgumentError(f"{name} must be a number of at least 0, not {value!r:.100}")
