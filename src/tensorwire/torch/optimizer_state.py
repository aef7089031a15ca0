"""What a `StoreOptimizer` saves and loads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.store.modes import Sync
from tensorwire.torch.local_state import KEY as STORE
from tensorwire.torch.local_state import fetch_values
from tensorwire.torch.optimizer_parts import OptimizerParts
from tensorwire.torch.options import plain
from tensorwire.torch.roots import named_parameters
from tensorwire.torch.state import SavedState


class OptimizerState(OptimizerParts):
    """An optimizer whose state is on servers, and in files in torch's form. Its copies are optimizers of torch's."""

    _saved: SavedState

    def state_dict(self) -> dict[str, Any]:
        """Returns options and state in torch's own layout. One worker may call it alone, between two steps.

        Returns:
            ``{"state": ..., "param_groups": ...}`` with whole tensors, as the stock optimizer has them. For parameters
            of 16 bits, state is in float32, and ``master`` is the parameter in float32. In EASGD, LocalSGD and DiLoCo
            these are this worker's own, and ``"store"`` holds what the servers have: ``parameters`` and ``state`` by
            name, such as the outer optimizer's momentum, and this worker's ``steps`` and ``tokens``.

        Raises:
            ArgumentError: In a forked child; or, with ``overlap``, between ``backward()`` and ``step()``.
            WaitTimeout: The servers did not answer in time.
            JobEnded: The job ended; the message says why.
        """
        with self._between_steps("state_dict()"):
            if self._local is not None:
                return {**super().state_dict(), STORE: self._local.state()}
            self.wait()
            with self._saved.shown([part.share for part in self._parts]):
                if not self._saved.pending:
                    self.state.update((rows.param, kept) for rows in self._rows if (kept := rows.state()))
                return self._saved.complete(super().state_dict())

    def shared_state(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that all workers share, by name. One worker may call it alone, between two steps.

        Returns:
            Copies, for ``model.load_state_dict(..., strict=False)``: in Sync the values of the last step, in other
            modes what the servers have now, with all that others have pushed, but without what this worker has trained
            since its last exchange. In EASGD, LocalSGD and DiLoCo integer parameters, which are each worker's own, are
            left out.

        Raises:
            ArgumentError: In a forked child; or, with ``overlap``, between ``backward()`` and ``step()``.
            WaitTimeout: The servers did not answer in time.
            JobEnded: The job ended; the message says why.
        """
        with self._between_steps("shared_state()"):
            if self._local is not None:
                return self._local.shared()
            self.wait()
            found = {name: p.detach().clone() for name, p in named_parameters(self)}
            if not isinstance(self._settings.mode, Sync):  # this worker has its own copy, of its last step
                for part in self._parts:
                    found.update(fetch_values(part.client))
                found.update((rows.name, rows.values()) for rows in self._rows)
            return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over options and state. Call it on every worker, between two steps; worker 0's state counts.

        Options take effect at once, the state with the next ``step()``, before its update.

        Args:
            state_dict: From ``state_dict()`` of this class or of the stock optimizer. In EASGD, LocalSGD and DiLoCo an
                entry ``"store"`` sets what the servers have, and each worker keeps the parameters that it has then.

        Raises:
            ArgumentError: The state has other parameters, sizes, types or keys; or gradients are being pushed. Nothing
                was changed.
        """
        with self._between_steps("load_state_dict()"):
            if self._publishing is not None:
                self._publishing.run += 1
            if self._local is not None:
                stored = state_dict.get(STORE)
                if stored is not None:
                    self._local.check(stored)
                super().load_state_dict({k: v for k, v in state_dict.items() if k != STORE})
                self._link_inner()
                if stored is not None:
                    self._local.load(stored)
                return
            fixed = [fixed for part in self._parts for fixed in part.share.fixed] or plain(self.param_groups)
            with self._saved.taken(fixed):
                super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy or a pickle is a stock optimizer of the class, with copies of the groups and the state."""
        return self._saved.copied(super().state_dict() if self._local is not None else self.state_dict())

    @contextlib.contextmanager
    def _between_steps(self, call: str) -> Iterator[None]:
        """Around a call that saves or loads state, which does not go together with others."""
        with self._alone.calling(call), self._worker.member.explained():
            if os.getpid() != self._pid:
                raise ArgumentError("this optimizer belongs to the parent process: a forked child cannot use it")
            if any(part.is_open for part in self._parts):
                raise ArgumentError("save and load state between two steps: gradients are in flight")
            yield
