"""The stores of a `StoreOptimizer`: how parameters come into them, what they show, and how they end."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.launch import Worker
from tensorwire.store.course import Course
from tensorwire.store.modes import Local, Sync
from tensorwire.store.rule_names import is_foreign
from tensorwire.store.versions.publishing import Publishing
from tensorwire.torch.alone import Alone
from tensorwire.torch.arguments import check_parameters, largest_norm, named_group
from tensorwire.torch.layout import build
from tensorwire.torch.loading import find_compiled, find_modules, owners, watch_loading
from tensorwire.torch.local import LocalTraining
from tensorwire.torch.options import check_groups
from tensorwire.torch.origin import Origin
from tensorwire.torch.overlap import Overlap
from tensorwire.torch.owned_stores import OwnedStores
from tensorwire.torch.part import Part, StoreSettings
from tensorwire.torch.roots import named_parameters, with_names
from tensorwire.torch.sparse_rows import SparseRows, check_dense, sparse_parameters
from tensorwire.torch.stepping import Stepping


class OptimizerParts(torch.optim.Optimizer):
    """An optimizer whose parameters are in stores: one for each call that added some, and one for each that is sparse.

    `StoreOptimizer` says what its attributes are for.
    """

    _worker: Worker
    _course: Course
    _alone: Alone
    _class: type[torch.optim.Optimizer]
    _settings: StoreSettings
    _publishing: Publishing | None
    _model: torch.nn.Module | None
    _steps: Stepping
    _parts: list[Part]
    _rows: list[SparseRows]
    _overlap: Overlap | None
    _owned: OwnedStores
    _local: LocalTraining | None
    _inner: torch.optim.Optimizer | None
    _pid: int
    max_grad_norm: float | None
    error_if_nonfinite: bool

    @property
    def _clip(self) -> float:
        """The largest norm: 0 where no norm is asked for, inf where it is and nothing is clipped."""
        norm = largest_norm(self.max_grad_norm) or (math.inf if self.error_if_nonfinite else 0.0)
        if norm and not isinstance(self._settings.mode, Sync):
            raise Unsupported(
                "max_grad_norm and error_if_nonfinite look at the mean of all workers' gradients, which "
                f"{self._settings.mode!r} does not take: clip each worker's own by torch.nn.utils.clip_grad_norm_"
            )
        return norm

    def _train_locally(self, origin: Origin, mode: Local, bucket_bytes: int, modules: list[torch.nn.Module]) -> None:
        """The class itself updates the parameters here; the store is for the exchanges."""
        if is_foreign(self._settings.rule):
            self._inner = self._class(self.param_groups, **origin.arguments)
        else:
            self._inner = build(self._class, self.param_groups)
        self._link_inner()
        self._local = LocalTraining(
            self._worker,
            named_parameters(self),
            mode,
            self._inner.step,
            bucket_bytes,
            self._settings.compression,
            self._settings.shards,
            self._settings.publish,
            self._course,
        )
        params = self._local.params
        self._owned.add(self._local, watch_loading(params, owners(params, modules), self._local.note_written))

    def _link_inner(self) -> None:
        """The inner optimizer and this one have the same groups and the same state."""
        assert self._inner is not None
        self._inner.param_groups = self.param_groups
        self._inner.state = self.state

    def _add_part(self, groups: list[dict[str, Any]], modules: list[torch.nn.Module]) -> None:
        if not is_foreign(self._settings.rule):
            check_groups(self._class, groups)
        sparse = sparse_parameters(modules)
        self._add_rows(groups, sparse, modules)
        if not any(id(p) not in sparse for group in groups for p in group["params"]):
            return
        check_dense(self._class)
        part = Part(self._worker, groups, self._settings, self._course, sparse)
        self._parts.append(part)
        having = owners(part.params, modules)
        self._owned.add(part, watch_loading(part.params, having, part.note_written))
        if self._overlap is not None:
            self._overlap.watch(part, having, find_compiled(modules))

    def _add_rows(self, groups: list[dict[str, Any]], sparse: set[int], modules: list[torch.nn.Module]) -> None:
        """What has sparse gradients: of these parameters rows travel."""
        named = [(g, n, p) for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)]
        for group, name, p in named:
            if id(p) not in sparse:
                continue
            if self._settings.publish is not None:
                raise Unsupported(f"parameter {name!r} has sparse gradients: publish= does not take it so far")
            if self._clip:
                raise Unsupported(f"parameter {name!r} has sparse gradients: use no max_grad_norm, error_if_nonfinite")
            mode = self._settings.mode
            assert not isinstance(mode, Local)
            rows = SparseRows(self._worker, name, p, group, self._class, mode, self._settings.reduce, self._course)
            self._rows.append(rows)
            self._owned.add(rows, watch_loading([p], owners([p], modules), rows.note_written))

    @property
    def _stores(self) -> Sequence[Part | LocalTraining | SparseRows]:
        return [*self._parts, *self._rows] if self._local is None else [self._local]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. Call it on every worker, between two steps.

        Args:
            param_group: ``params``, as (name, parameter) pairs, and options that differ from the defaults. Parameters
                alone will do if they are in a module with some of the others: they have the names that they have there.

        Raises:
            ArgumentError: As in the constructor, or gradients are being pushed. Nothing was added.
            Unsupported: As in the constructor. Nothing was added.
            PlanMismatch: The workers' new parameters differ.
            WaitTimeout: Another worker did not come in time.
            JobEnded: The job ended; the message says why.
        """
        if not hasattr(self, "_pid"):  # while the constructor runs
            super().add_param_group(param_group)
            return
        with self._alone.calling("add_param_group()"):
            if self._local is not None:
                raise Unsupported(f"mode={self._settings.mode!r} takes no more parameters after construction so far")
            if self._publishing is not None:
                raise Unsupported("an optimizer with publish= takes no more parameters after construction so far")
            self._add_group(param_group)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        if any(part.is_open for part in self._parts):
            raise ArgumentError("add parameters before backward(): gradients are in flight")
        self.wait()
        group = named_group(len(self.param_groups), with_names(param_group, self, self._model))
        check_parameters([*named_parameters(self), *group["params"]])
        super().add_param_group(group)
        try:
            added = self.param_groups[-1:]
            self._add_part(added, find_modules(added[0]["params"], self._model))
        except BaseException:
            del self.param_groups[-1]
            raise

    def summary(self) -> str:
        """How many bytes move per step, and how much memory the servers register.

        Returns:
            One line of text.
        """
        self._alone.check()
        return "; ".join(part.summary() for part in self._stores)

    def wait(self) -> None:
        """With ``overlap``: returns when every parameter shows the version of the last ``step()``.

        Call it before code reads parameters without their modules, such as an average of weights. One worker may call
        it alone.

        Raises:
            WaitTimeout: The servers did not publish the version in time, because another worker is late.
            JobEnded: The job ended; the message says why.
        """
        with self._alone.calling("wait()"), torch.no_grad():
            if self._local is not None:
                self._local.complete()
            for part in self._parts:
                part.arrive(range(len(part.params)))

    def write_parameters(self) -> None:
        """Makes what the parameters hold now the store's values, with the next ``step()``.

        For intended changes in place: averaging, initialising again, pruning. Call it on every worker after the change;
        worker 0's values win.

        Raises:
            ArgumentError: Another thread is in a method of this optimizer.
        """
        with self._alone.calling("write_parameters()"):
            if self._local is not None:
                self._local.written = True
            for part in self._parts:
                part.note_written(part.params)
            for rows in self._rows:
                rows.note_written(rows.params)

    def close(self) -> None:
        """Gives up the stores. Call it on every worker, in any order; when all have, the servers free what they have.

        It is for the time between two steps. The parameters become ordinary tensors, with the values that they have,
        and every other method but ``zero_grad()`` raises `ArgumentError`. Idempotent. An optimizer that nothing refers
        to any more is closed, but for the parameters' memory, with this worker's next call that makes a store or waits
        for all workers.

        Raises:
            ArgumentError: In a forked child; or another thread is in a method of this optimizer.
            StepInterrupted: Gradients have been pushed without a step, or a step was interrupted: others wait for it.
            WaitTimeout: With `DiLoCo`, the last exchange did not come in time. It is closed all the same.
            JobEnded: The job ended; the message says why.
        """
        if self._alone.closed:
            return
        if os.getpid() != self._pid:
            raise ArgumentError("this optimizer belongs to the parent process: a forked child cannot close it")
        with self._alone.calling("close()"):
            try:
                self._owned.close()
            finally:
                self._alone.closed = True
                self._local = None
                self._parts.clear()
                self._rows.clear()
