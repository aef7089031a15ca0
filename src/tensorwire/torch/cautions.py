"""Mistakes that do not stop a training but make it worse. Worker 0 warns, once per job."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from tensorwire.errors import TensorwireError
from tensorwire.launch import Worker

_LOOKUP_SECONDS = 1.0  # others have said theirs a step ago, if they take part
_looked: weakref.WeakSet[Worker] = weakref.WeakSet()


class Cautions:
    """What is looked at for the first optimizer of a job: at its construction, and in its first two steps."""

    def __init__(
        self, worker: Worker, params: Iterable[torch.nn.Parameter], modules: Sequence[torch.nn.Module]
    ) -> None:
        self._worker, self._steps, self._mine = worker, 0, b""
        self.done = worker in _looked or worker.joins
        _looked.add(worker)
        if self.done:
            return
        self._dropping = [weakref.ref(m) for m in modules if _drops(m)]
        self._warn_of_ddp(modules, {id(p) for p in params})
        self.done = worker.num_workers == 1

    def _warn_of_ddp(self, modules: Iterable[torch.nn.Module], ours: set[int]) -> None:
        wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
        if self._worker.rank == 0 and any(id(p) in ours for w in wrappers for p in w.module.parameters()):
            _warn(
                "the model is in DistributedDataParallel, which averages the gradients as well, so that they are "
                "averaged and moved twice: leave the wrapper out"
            )

    def step(self) -> None:
        """At a step, after its backward: compares what this worker drew with what the others drew."""
        self._steps += 1
        with contextlib.suppress(TensorwireError):  # the step itself says what is wrong
            if self._steps == 1:
                self._publish()
            else:
                self._compare()
        self.done = self._steps == 2 or self._worker.rank > 0

    def _publish(self) -> None:
        modules = [ref() for ref in self._dropping]
        if any(m is not None and m.training for m in modules):
            state: bytes = torch.get_rng_state().numpy().tobytes()
            self._mine = hashlib.sha256(state).digest()
        self._worker.member.client.publish(f"random/{self._worker.rank}", self._mine, to=["worker 0"])

    def _compare(self) -> None:
        if not self._mine:
            return
        for rank in range(1, self._worker.num_workers):
            if self._worker.member.client.lookup(f"random/{rank}", _LOOKUP_SECONDS) != self._mine:
                return
        _warn(
            "all workers draw the same dropout masks, because their random states are equal: call "
            "torch.manual_seed(seed + job.rank); worker 0's initial values count anyhow"
        )


def _drops(module: torch.nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, (torch.nn.MultiheadAttention, torch.nn.RNNBase)) and module.dropout > 0


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
