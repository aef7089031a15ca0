"""The training modes that the demo knows by name, with settings for a short training of this model."""

from __future__ import annotations

from collections.abc import Mapping

from tensorwire.store import EASGD, SGD, SSP, Async, DiLoCo, LocalSGD, Sync

Mode = Sync | Async | SSP | EASGD | LocalSGD | DiLoCo

# With so few steps between two exchanges, the outer momentum of 0.9 that suits hundreds of steps would overshoot.
OUTER = SGD(lr=0.5, momentum=0.5)
# Asynchronous pushes are damped: two stale steps of full length, with momentum, would be too much for this model.
MODES: Mapping[str, Mode] = {
    "sync": Sync(),
    "async": Async(damping=1.0),
    "ssp": SSP(staleness=3, damping=1.0),
    "easgd": EASGD(every=10),
    "localsgd": LocalSGD(every=10),
    "diloco": DiLoCo(every=10, outer=OUTER),
    "streaming": DiLoCo(every=10, outer=OUTER, fragments=2, delay=2, alpha=0.5),
    "decoupled": DiLoCo(every=10, outer=OUTER, fragments=2, delay=2, alpha=0.5, quorum=1, grace=0.02),
}


def bucket_bytes(mode: Mode) -> int:
    """Smaller buckets where there are fragments, so that small models have enough of them."""
    return 2**20 if isinstance(mode, DiLoCo) and mode.fragments > 1 else 2**22


def waits(mode: Mode) -> bool:
    """Whether a worker may have to wait for the steps of another one, so that all are to take the same number."""
    if isinstance(mode, DiLoCo):
        return mode.quorum is None
    return not isinstance(mode, (Async, EASGD))
