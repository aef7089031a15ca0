"""Which gradients have NaN or inf, once the total norm has shown that some do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tensorwire.errors import NonFiniteGradient, TensorwireError
from tensorwire.launch import Worker
from tensorwire.sizes import listed
from tensorwire.torch.part import Part

_LOOKUP_SECONDS = 5.0  # a worker that is idle says nothing


def error(worker: Worker, parts: Iterable[Part], norm: float) -> NonFiniteGradient:
    """What `step()` raises on every worker: each publishes what it found in its own gradients."""
    mine = list(parts)
    key = f"{mine[0].client.name}/nonfinite/{mine[0].client.step}"
    found = _gathered(worker, key, _own(mine))
    which = "; ".join(f"worker {rank}: {text}" for rank, text in found.items() if text)
    return NonFiniteGradient(
        f"the norm of the gradients in step {mine[0].client.updates} is {norm}, and no parameter was changed: "
        + (which or "each worker's own gradients are finite, their sum of squares is not")
    )


def _own(parts: Iterable[Part]) -> str:
    """This worker's gradients that are not finite."""
    return listed(
        [
            f"{name!r} has {'NaN' if torch.isnan(p.grad).any() else 'inf'}"
            for part in parts
            for name, p in zip(part.names, part.params, strict=True)
            if p.grad is not None and not torch.isfinite(p.grad).all()
        ]
    )


def _gathered(worker: Worker, key: str, own: str) -> dict[int, str]:
    """What each worker found, as far as it says so in time."""
    found = {worker.rank: own}
    try:
        worker.member.client.publish(f"{key}/{worker.rank}", own.encode("utf-8", "replace"))
        for rank in set(range(worker.num_workers)) - {worker.rank}:
            found[rank] = worker.member.client.lookup(f"{key}/{rank}", _LOOKUP_SECONDS).decode()
    except TensorwireError:
        pass  # the others have more to say than that the job ends, because one of them has raised already
    return dict(sorted(found.items()))
