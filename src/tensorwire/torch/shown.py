"""What parameters show: a version of the store's, in a window or in their own memory on a device; or nothing yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence

import torch

from tensorwire._native import Window
from tensorwire.errors import ParameterModified
from tensorwire.store.rules import tensor_over
from tensorwire.store.sharding import PAGE
from tensorwire.store.store_client import StoreClient

_log = logging.getLogger("tensorwire")


class Shown:
    """Of the parameters of one store. ``turns``: 2 where a version may be shown while the next one comes, else 1.

    Attributes:
        values: By turn, what parameters show: on a device always the same memory, their own.
    """

    def __init__(
        self, client: StoreClient, names: Sequence[str], params: Sequence[torch.nn.Parameter], turns: int
    ) -> None:
        self._client, self._names, self._params = client, names, params
        self.values = [self._tensors(client.windows[turn % len(client.windows)]) for turn in range(turns)]
        for i, p in enumerate(params):
            if not p.is_cpu:
                own = p.data.contiguous()
                for values in self.values:
                    values[i] = own
        self._turns = [-1] * len(params)  # which turn each parameter shows
        self._showing = threading.Lock()  # with overlap, any thread that runs a module shows its parameters
        self._marks = [(0, 0)] * len(params)  # address and version count of what each shows
        self._pages_seen = True  # whether the kernel tells which pages of a window were written to

    def _tensors(self, window: Window) -> list[torch.Tensor]:
        """The parameters' tensors in a window."""
        plan, memory = self._client.plan, memoryview(window)
        return [
            tensor_over(memory, spec.dtype, offset, spec.elements).view(spec.shape)
            for spec, offset in zip(plan.tensors, plan.offsets, strict=True)
        ]

    def nowhere(self) -> list[torch.Tensor]:
        """Tensors of the parameters' shapes, full of NaN: a little memory, seen many times."""
        on_cpu = any(p.is_cpu for p in self._params)
        found = self._tensors(self._client.repeated(b"\xff")) if on_cpu else [torch.empty(0)] * len(self._params)
        for i, p in enumerate(self._params):
            if not p.is_cpu:
                one = torch.full((p.element_size(),), 0xFF, dtype=torch.uint8, device=p.device).view(p.dtype)
                found[i] = one[0].expand(p.shape)
        return found

    def behind(self, i: int, version: int) -> bool:
        """Whether parameter ``i`` does not show that version yet."""
        return self._turns[i] != version % len(self.values)

    def show(self, indices: Iterable[int], version: int) -> None:
        """Lets parameters show a version, which has come.

        As an update in place does, it raises their version count: a graph made before cannot be run backward.
        """
        turn = version % len(self.values)
        changed = list(indices)
        with self._showing:
            for i in changed:
                if self._turns[i] != turn:
                    self._params[i].data = self.values[turn][i]
            self._mark(changed)
            for i in changed:  # last, so that one who was interrupted here shows them again
                self._turns[i] = turn

    def hide(self, indices: Iterable[int], nowhere: Sequence[torch.Tensor]) -> None:
        """Lets parameters show ``nowhere`` until ``show``, so no code mistakes the last version for this one."""
        hidden = list(indices)
        with self._showing:
            for i in hidden:  # first, so that one who was interrupted here shows them again
                self._turns[i] = -1
                self._params[i].data = nowhere[i]
            self._mark(hidden)

    def _mark(self, changed: Sequence[int]) -> None:
        torch.autograd.graph.increment_version([self._params[i] for i in changed])
        for i in changed:
            self._marks[i] = (self._params[i].data_ptr(), self._params[i]._version)

    def refresh(self) -> None:
        """What was written through windows is in the store now."""
        for window in self._client.windows:
            window.refresh(0, window.nbytes)

    def check(self, written: Collection[str]) -> None:
        """Raises `ParameterModified` for values that changed without the store, but for those of ``written`` names."""
        changed = []
        for name, p, (address, version) in zip(self._names, self._params, self._marks, strict=True):
            if p.data_ptr() != address:
                raise ParameterModified(
                    f"parameter {name!r} was moved out of the store's memory (.to(), .half(), .data =): "
                    "convert or move the model before constructing the optimizer"
                )
            if p._version != version and name not in written:
                changed.append(name)
        if not changed and not written:
            changed = self._stray()
        if changed:
            which = " or ".join(repr(name) for name in changed)
            raise ParameterModified(
                f"parameter {which} was changed in place; its values live in the store and only step() changes "
                "them: call optimizer.write_parameters() on every worker after an intended change"
            )

    def _stray(self) -> list[str]:
        """Who lies in the first page that was written to through a window, past autograd's own version count.

        On a device nobody can tell.
        """
        if not any(p.is_cpu for p in self._params):
            return []
        try:
            pages = [page for window in self._client.windows for page in window.modified(1)]
        except OSError as error:
            if self._pages_seen:
                self._pages_seen = False
                _log.warning("changes of parameters through .data will go unnoticed here: %s", error)
            return []
        tensors, offsets = self._client.plan.tensors, self._client.plan.offsets
        return [
            name
            for page in pages
            for name, t, start in zip(self._names, tensors, offsets, strict=True)
            if start < page + PAGE and page < start + t.nbytes
        ]

    @torch.no_grad()
    def release(self) -> None:
        """The parameters become ordinary tensors, with the values that they show."""
        for p, (address, _) in zip(self._params, self._marks, strict=True):
            if p.is_cpu and p.data_ptr() == address:  # nobody has moved it
                p.data = p.detach().clone()
