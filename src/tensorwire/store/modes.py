"""Training modes: when a server closes a round, and which parameters workers compute on. `StoreOptimizer` takes one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

import msgspec

from tensorwire.errors import ArgumentError


def _check_number(name: str, value: object) -> None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        raise ArgumentError(f"{name} must be a number of at least 0, not {value!r:.100}")


def _check_steps(name: str, value: object, least: int, what: str = "steps") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} must be a whole number of {what}, {least} or more, not {value!r:.100}")


def _check_delay(delay: object, every: int) -> None:
    _check_steps("delay", delay, 0)
    if delay >= every:  # type: ignore[operator]
        raise ArgumentError(f"delay must be less than every={every}, not {delay}")


def _check_share(name: str, value: object, *, least_allowed: bool = True) -> None:
    _check_number(name, value)
    if value > 1 or (not least_allowed and not value):  # type: ignore[operator]
        least = "from 0" if least_allowed else "above 0"
        raise ArgumentError(f"{name} must be {least} to 1, not {value!r}")


@dataclass(frozen=True)
class Sync:
    """All workers step together: a round closes when every worker's gradient is there.

    The mean (or sum) of the gradients is applied once, so that the parameters have the bits that one process would
    give them. A slow worker holds up all others.
    """


@dataclass(frozen=True)
class Async:
    """Every worker steps at its own pace: each gradient is applied by itself, as it arrives.

    A worker computes on its own copy of the parameters: of each bucket the version that its last push led to. A slow
    worker holds up no other; its gradients are stale. The *staleness* of a push is the number of other pushes applied
    to the bucket since the version that the gradient was computed on.

    Source: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012 (Downpour SGD). ``damping``: Zhang, Gupta,
    Lian and Liu, Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016.

    Args:
        damping: The learning rate of a push is ``lr / (1 + damping * staleness)``. 0: it does not depend on the
            staleness.
        max_staleness: A push whose staleness is above it is discarded, bucket by bucket; its worker gets the present
            version all the same. None: all are applied.

    Raises:
        ArgumentError: An argument is out of its range.
    """

    damping: float = 0.0
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        _check_number("damping", self.damping)
        if self.max_staleness is not None:
            _check_steps("max_staleness", self.max_staleness, 0, what="pushes")


@dataclass(frozen=True)
class SSP:
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
        _check_steps("staleness", self.staleness, 0)
        _check_number("damping", self.damping)


@dataclass(frozen=True)
class EASGD:
    """Elastic averaging: every worker trains by itself; it and a common centre are pulled towards each other.

    After every ``every`` steps of its own optimizer a worker sends its parameters ``x``. The server moves the centre
    ``c`` by ``d = alpha * (x - c)``, and the worker moves back by the same: ``c += d``, ``x -= d``. A slow worker holds
    up nobody.

    Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NIPS 2015, algorithm 1
    (asynchronous); ``alpha`` is theirs, by default 0.9 over the number of workers.

    Args:
        every: Steps between two exchanges, 1 or more.
        alpha: The share of the difference by which both sides move, above 0 and at most 1. None: 0.9 / workers.
        delay: Steps after which the worker moves, less than ``every``: meanwhile the transfer is hidden.

    Raises:
        ArgumentError: An argument is out of its range.
    """

    every: int = 10
    alpha: float | None = None
    delay: int = 0

    def __post_init__(self) -> None:
        _check_steps("every", self.every, 1)
        _check_delay(self.delay, self.every)
        if self.alpha is not None:
            _check_share("alpha", self.alpha, least_allowed=False)


@dataclass(frozen=True)
class LocalSGD:
    """Every worker trains by itself; after every ``every`` steps all take the mean of their parameters.

    The state of their optimizers stays their own. A slow worker holds up all others once per ``every`` steps.

    Source: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.

    Args:
        every: Steps between two means, 1 or more.

    Raises:
        ArgumentError: ``every`` is not a whole number of at least 1.
    """

    every: int = 10

    def __post_init__(self) -> None:
        _check_steps("every", self.every, 1)


@dataclass(frozen=True)
class SGD:
    """The outer optimizer of `DiLoCo`: ``torch.optim.SGD`` on the servers, with these options.

    Args:
        lr: The outer learning rate.
        momentum: The outer momentum, from 0 to 1.
        nesterov: Whether it is Nesterov's momentum.

    Raises:
        ArgumentError: An option is out of its range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        _check_number("the outer lr", self.lr)
        _check_share("the outer momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise ArgumentError("nesterov=True needs a momentum above 0: pass SGD(nesterov=False)")


@dataclass(frozen=True)
class DiLoCo:
    """Every worker trains by itself; an outer optimizer on the servers follows their changes.

    After every ``every`` steps a worker sends the difference between the last version that it got and its parameters.
    The mean of the workers' differences is the gradient of the outer optimizer. The worker then takes the new version.

    - With ``fragments``, the buckets are divided into that many fragments of about equal size, whose exchanges are
      spread evenly over the ``every`` steps. With ``delay``, a worker continues while a fragment is under way, and
      after that many steps mixes the new version ``v`` into its own values: ``x = alpha * x + (1 - alpha) * v``.
    - With ``quorum``, a server does not wait for all workers: it updates when that many have sent a fragment and
      ``grace`` seconds have passed since. Later changes count in the next update, or in one of their own if their
      worker sends the fragment again before. With ``grace="auto"`` a server waits until the first of the workers that
      have sent needs the answer, ``delay`` of its steps after sending. The times between its sends show its pace.

    Source: Douillard et al., DiLoCo, arXiv 2311.08105; fragments, delay and alpha: Streaming DiLoCo, arXiv 2501.18512;
    quorum, grace and weights: Decoupled DiLoCo, arXiv 2604.21428.

    Args:
        every: Steps between two exchanges of the same parameter, 1 or more.
        outer: The outer optimizer.
        fragments: The number of fragments, from 1 to ``every``.
        delay: Steps between sending a fragment and mixing its new version, less than ``every``.
        alpha: The share of its own values that a worker keeps, from 0 (the default) to 1.
        quorum: The least number of workers that an update waits for. None: all that have not finished.
        grace: Seconds for which a server waits for more workers than the quorum; or ``"auto"``, which with ``delay=0``
            is no time.
        weight: ``"mean"``: all workers count the same. ``"tokens"``: they count by their calls of
            ``optimizer.count(tokens)`` since their last exchange of the fragment.

    Raises:
        ArgumentError: An argument is out of its range.
    """

    every: int = 20
    outer: SGD = SGD()
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    quorum: int | None = None
    grace: float | str = 0.0
    weight: str = "mean"

    def __post_init__(self) -> None:
        _check_steps("every", self.every, 1)
        _check_steps("fragments", self.fragments, 1, what="fragments")
        _check_delay(self.delay, self.every)
        _check_share("alpha", self.alpha)
        if isinstance(self.grace, str) and self.grace != "auto":
            raise ArgumentError(f"grace must be 'auto' or a number of seconds, not {self.grace!r:.100}")
        if self.grace != "auto":
            _check_number("grace", self.grace)
        if not isinstance(self.outer, SGD):
            raise ArgumentError(f"outer must be tw.store.SGD(...), not {self.outer!r:.100}")
        if self.fragments > self.every:
            raise ArgumentError(f"fragments must be at most every={self.every}, not {self.fragments}")
        if self.quorum is not None:
            _check_steps("quorum", self.quorum, 1, what="workers")
        elif self.grace:
            raise ArgumentError("grace needs a quorum: without one a server waits for all workers")
        if self.weight not in ("mean", "tokens"):
            raise ArgumentError(f"weight must be 'mean' or 'tokens', not {self.weight!r:.100}")


Local = EASGD | LocalSGD | DiLoCo  # workers train by themselves, with optimizers of their own
OwnClock = Async | SSP | EASGD | LocalSGD | DiLoCo
Mode = Sync | Async | SSP | EASGD | LocalSGD | DiLoCo
_MODES: dict[str, type[Mode]] = {mode.__name__: mode for mode in get_args(Mode)}


def check_mode(mode: object) -> None:
    """Raises `ArgumentError` for what is no mode."""
    if not isinstance(mode, Mode):
        raise ArgumentError(f"mode must be one of tw.store, such as tw.store.Async(), not {mode!r:.100}")


def check_reduce(reduce: object) -> None:
    """Raises `ArgumentError` for what gradients cannot be reduced to."""
    if reduce not in ("mean", "sum"):
        raise ArgumentError(f"gradients can be reduced to their 'mean' or their 'sum', not {reduce!r:.100}")


def settings_of(mode: Mode) -> dict[str, Any]:
    """What a server is told of a mode."""
    return {"name": type(mode).__name__, "settings": asdict(mode)}


def mode_of(settings: Mapping[str, Any]) -> Mode:
    """The mode that `settings_of` was given."""
    return msgspec.convert(settings["settings"], _MODES[settings["name"]])


def awaited(mode: Mode, workers: int) -> str:
    """Whom the rounds of ``workers`` wait for, in words; '' for all of them."""
    together = isinstance(mode, Sync) or (workers > 1 and quorum_of(mode) in (None, workers))
    return "" if together else "its servers or slower workers"


def quorum_of(mode: OwnClock) -> int | None:
    """How many workers close a round; None: all that have not finished."""
    if isinstance(mode, LocalSGD):
        return None
    return mode.quorum if isinstance(mode, DiLoCo) else 1
