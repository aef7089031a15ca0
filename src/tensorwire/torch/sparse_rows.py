"""A parameter with sparse gradients: every worker has all of it, and only rows travel.

The table on the servers is the parameter. A worker asks which rows have changed, and copies them into its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from tensorwire.errors import ArgumentError, ParameterModified, Unsupported
from tensorwire.keyvalue.row_table import Table, most_rows
from tensorwire.keyvalue.table_files import set_state
from tensorwire.launch import Worker
from tensorwire.store.client_state import fetch_state
from tensorwire.store.course import Course
from tensorwire.store.kept import join
from tensorwire.store.modes import SSP, Async, Sync
from tensorwire.store.row_client import RowClient
from tensorwire.store.row_layout import Array, TableSpec
from tensorwire.store.row_rules import ROW_OPTIMIZERS
from tensorwire.store.tensor_items import tensor_of
from tensorwire.torch import options

_NOT_SENT = {"foreach", "fused", "differentiable", "capturable", "params"}


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of the parameters that embeddings among ``modules`` give sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(m.weight) for m in modules if isinstance(m, kinds) and m.sparse}


def check_dense(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Refuses the optimizer that takes sparse gradients alone. Raises `Unsupported`."""
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        raise Unsupported(
            "SparseAdam is for sparse gradients: give it the parameters of embeddings with sparse=True alone, and the "
            "others to a StoreOptimizer of their own"
        )


class SparseRows:
    """One such parameter. ``group``: the parameter group that it is in, whose options are read at each step.

    Raises `Unsupported` for an optimizer or a mode that rows do not go with.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        param: torch.nn.Parameter,
        group: Mapping[str, Any],
        optimizer_class: type[torch.optim.Optimizer],
        mode: Sync | Async | SSP,
        reduce: str,
        course: Course,
    ) -> None:
        self._worker, self.name, self.param, self._group = worker, name, param, group
        # A group has more than options: schedulers keep numbers of their own there, such as `initial_lr`.
        self._known = inspect.signature(optimizer_class).parameters.keys() - _NOT_SENT
        self.params = [param]
        rule = optimizer_class.__name__
        if not param.is_cpu:
            raise Unsupported(
                f"parameter {name!r} has sparse gradients on {param.device}: build its embedding with sparse=False, "
                "keep it on the CPU, or use StoreEmbedding"
            )
        if rule not in ROW_OPTIMIZERS or getattr(torch.optim, rule, None) is not optimizer_class:
            raise Unsupported(
                f"parameter {name!r} has sparse gradients, which {rule} does not take: use "
                f"{', '.join(ROW_OPTIMIZERS)}, or build its embedding with sparse=False"
            )
        kind = str(param.dtype).removeprefix("torch.")
        self._table = Table(
            worker,
            name,
            tuple(param.shape),
            kind,
            mode=mode,
            rule=rule,
            options=self._given(),
            reduce=reduce,
            settings=TableSpec(most_rows(tuple(param.shape), kind), followed=True),
            values=param.detach().contiguous().numpy(),
        )
        self._table.client.course = course
        self.written = False
        self._version = -1
        if isinstance(mode, Sync):
            worker.uneven_stores.append(self)
        self.show()

    def _given(self) -> dict[str, Any]:
        """The optimizer's options as they are now."""
        return {name: value for name, value in self._group.items() if name in self._known}

    def gradient(self) -> tuple[Array, Array]:
        """Numbers and rows of this worker's gradient. Raises `Unsupported` or `ArgumentError` for what is none."""
        gradient = self.param.grad
        if gradient is None:
            return np.empty(0, np.int64), np.empty((0, *self.param.shape[1:]), self._table.dtype)
        if gradient.layout != torch.sparse_coo:
            raise Unsupported(
                f"parameter {self.name!r} has a dense gradient, though its embedding has sparse=True: another module "
                "shares it, so build the embedding with sparse=False"
            )
        if gradient.dtype != self.param.dtype or gradient.shape != self.param.shape:
            raise ArgumentError(f"the gradient of {self.name!r} is {gradient.dtype} {list(gradient.shape)}")
        whole = gradient.coalesce()
        return self._table.given(whole.indices()[0].numpy(), whole.values().numpy())

    def check(self) -> None:
        """Raises `ParameterModified` for values that changed without the store."""
        if self.param._version != self._version and not self.written:
            raise ParameterModified(
                f"parameter {self.name!r} was changed in place; its values live in the store and only step() changes "
                "them: call optimizer.write_parameters() on every worker after an intended change"
            )
        numbers = {n: v for n, v in self._given().items() if options.is_number(v) or options.is_numbers(v)}
        self._table.set_options(**{n: v for n, v in numbers.items() if not isinstance(v, bool)})

    def note_written(self, params: Iterable[torch.nn.Parameter]) -> None:
        """The user changed it; the next step begins with an ``assign``."""
        self.written = True

    def push(self, gradient: tuple[Array, Array]) -> None:
        """Sends rows to the servers."""
        self._table.push(*gradient)

    def assign(self) -> None:
        """Worker 0's present values become the table's, and everybody's."""
        self._table.wait()
        with self.client.course.unit(f"setting the rows of {self.name}"):
            self._table.meet("")
            if self._worker.rank == 0:
                self._table.assign(self.param.detach().contiguous().numpy())
            self._table.meet("")
            self.written = False
            self.show()

    @torch.no_grad()
    def show(self) -> None:
        """Takes over the rows that have changed, once what this worker pushed has been applied."""
        for numbers, rows in self._table.changes():
            self.param[torch.from_numpy(numbers)] = torch.from_numpy(rows)
        self._version = self.param._version

    # ---- the end

    def finish(self, *, dropped: bool = False) -> None:
        """This worker is done."""
        self._table.close()

    def release(self) -> None:
        """The parameter is an ordinary tensor."""

    # ---- uneven numbers of steps

    def check_pausing(self) -> None:
        """Nothing of it is under way between two steps; raises `StepInterrupted` after one that was interrupted."""
        self.client.course.check()

    def idle(self) -> None:
        """This worker's loop has ended; others may go on."""
        self.client.course.begin(self._pause)
        self._table.idle()

    def rejoin(self) -> None:
        """Waits until the loops of all have ended, and shows what came of them."""
        self._table.meet("")
        self.show()
        self.client.course.end(self._pause)

    @property
    def _pause(self) -> str:
        return f"the end of job.uneven() for {self.name}"

    # ---- the optimizer's state

    @property
    def client(self) -> RowClient:
        """The worker's end of its table."""
        return self._table.client

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.name}: {self.param.shape[0]} rows of {math.prod(self.param.shape[1:])} elements, "
            "of which those with gradients travel"
        )

    def state(self) -> dict[str, Any]:
        """What the servers keep for the parameter, in torch's form. Raises `WaitTimeout` or `JobEnded`."""
        rule = self._table.client.spec.rule
        found: dict[str, Any] = {}
        for entry, data in join(fetch_state(self._table.client)).values():
            value = tensor_of(entry, data)
            if not entry.rows:
                value = torch.tensor(float(value)) if rule == "Adagrad" else int(value)
            found[entry.key] = value
        return found

    def values(self) -> torch.Tensor:
        """What the servers have now. Raises `WaitTimeout` or `JobEnded`."""
        found = torch.empty(self.param.shape, dtype=self.param.dtype)
        self._table.pull(np.arange(self.param.shape[0]), found.numpy()).finish(None)
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The state that worker 0 has becomes what the servers keep."""
        self._table.wait()
        self._table.meet("")
        if self._worker.rank == 0 and state:
            whole = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == self.param.shape}
            arrays = {key: value.detach().contiguous().numpy() for key, value in whole.items()}
            set_state(self._table, {k: float(v) for k, v in state.items() if k not in whole}, arrays)
        self._table.meet("")
