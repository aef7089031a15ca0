"""``StoreEmbedding``: an embedding whose table lies only on the servers."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.keyvalue.key_versions import KeyVersions, PublishedCalls, publishing_of
from tensorwire.keyvalue.row_sums import RowSums
from tensorwire.keyvalue.row_table import Table, check_embedding, embedding_table
from tensorwire.keyvalue.served_rows import ServedRows
from tensorwire.launch import current_worker
from tensorwire.store.modes import SSP, Async, Sync
from tensorwire.store.request_client import RequestClient
from tensorwire.store.row_rules import ROW_OPTIMIZERS
from tensorwire.store.versions.every import Every

# By their numbers, because all workers push in the same order.
_embeddings: weakref.WeakValueDictionary[int, StoreEmbedding] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class StoreEmbedding(ServedRows, PublishedCalls, torch.nn.Module):
    """An embedding whose table no worker has to hold: rows are pulled in forward, their gradients pushed by a step.

    ::

        embedding = tw.torch.StoreEmbedding(10**8, 64, torch.optim.Adagrad, lr=0.1)
        loss = model(embedding(indices)).sum()
        loss.backward()
        optimizer.step()

    Gradients of several lookups and backward passes are summed, as those of a parameter are. The next ``step()`` of
    any optimizer in this process, a `StoreOptimizer` or one of torch's, pushes the sum, or that of the module itself,
    and servers apply it as one update. Each row travels once, however often it is named.

    Its only parameter, ``anchor``, is a zero whose gradient is zero. ``optimizer.zero_grad()`` does not drop the rows'
    gradients, and a function such as ``clip_grad_norm_`` neither sees nor changes them: where it changed the anchor's,
    the next step is refused. Every worker makes the module, in the same place of its program. With ``Sync()``, all
    workers have to take equally many steps that have a gradient of it.

    Args:
        num_embeddings: The number of rows.
        embedding_dim: Elements of a row.
        optimizer: ``torch.optim.SGD`` without momentum, ``Adagrad`` or ``SparseAdam``, whose options are ``options``.
        mode: ``tw.store.Sync()``: an update has the gradients of all workers, and a pull waits for that of the worker's
            last push. ``Async()``: each worker's gradients are applied by themselves. ``SSP()``: the same, and a
            pull waits while this worker is more than ``staleness`` updates ahead of the slowest.
        reduce: ``"mean"`` or ``"sum"`` of the workers' gradients, with ``Sync()``.
        initial: How servers draw the first values: ``"normal"``, ``"uniform"`` or ``"zeros"``.
        scale: The standard deviation of ``"normal"``, the bound of ``"uniform"``.
        seed: From which they are drawn; None: torch's initial seed of worker 0.
        dtype: torch.float32 or torch.float64.
        publish: Whether other processes get versions of the table, as files: True, or ``tw.store.Every(buffers=)``.
            Each call of `publish` makes one. ``tw.store.connect()`` reads them, also some rows.
        **options: Options of the optimizer, such as ``lr``; `set_options` changes them.

    Attributes:
        anchor (torch.nn.Parameter): A zero, of which see above.

    Raises:
        ArgumentError: ``init()`` has not been called, or an argument is wrong.
        Unsupported: The dtype is another one. Or, in an optimizer's ``step()``: its gradients are scaled by a
            ``GradScaler``; or that optimizer has ``max_grad_norm`` or ``error_if_nonfinite``. Or, in any ``step()``:
            gradients were clipped or scaled by a function that was given the module's ``anchor``.
        PlanMismatch: The workers' tables differ.
        WaitTimeout: Another worker did not come in time.
        JobEnded: The job ended; the message says why.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        optimizer: type[torch.optim.Optimizer],
        *,
        mode: Sync | Async | SSP = Sync(),  # noqa: B008  # frozen
        reduce: str = "mean",
        initial: str = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        publish: Every | bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        worker = current_worker()
        every = publishing_of(publish)
        check_embedding({"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}, reduce, scale)
        rule = getattr(optimizer, "__name__", "")
        if rule not in ROW_OPTIMIZERS or getattr(torch.optim, rule) is not optimizer:
            names = ", ".join(f"torch.optim.{name}" for name in ROW_OPTIMIZERS)
            raise ArgumentError(f"servers update rows by {names}; not by {optimizer!r:.100}")
        if dtype not in (torch.float32, torch.float64):
            raise Unsupported(f"servers hold rows of torch.float32 or torch.float64, not {dtype!r:.100}")
        self.num_embeddings, self.embedding_dim, self.dtype = num_embeddings, embedding_dim, dtype
        self._table = embedding_table(
            worker,
            (num_embeddings, embedding_dim),
            str(dtype).removeprefix("torch."),
            drawn=torch.initial_seed() % 2**63,
            seed=seed,
            initial=initial,
            scale=scale,
            mode=mode,
            rule=rule,
            options=options,
            reduce=reduce,
        )
        self._versions = KeyVersions(worker, self._table.calls, every)
        self._sums = RowSums(worker, self._table, repr(self))
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self._seen: tuple[torch.Tensor, int] | None = None  # its gradient and the version of that, after backward
        _embeddings[next(_numbers)] = self
        _watch_steps()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Looks rows up.

        Args:
            indices: Integers from 0 to ``num_embeddings - 1``, of any shape. This waits for those on an accelerator.

        Returns:
            The rows, of the shape of ``indices`` and ``embedding_dim``, on the device of ``indices``.

        Raises:
            ArgumentError: An index is out of range.
            WaitTimeout: The servers did not answer in time, because another worker did not push its gradients.
            JobEnded: The job ended; the message says why.
        """
        unique, inverse = torch.unique(indices.detach().cpu(), return_inverse=True)
        rows, inverse = self._rows(unique).to(indices.device), inverse.to(indices.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(_Adder(self, unique))  # type: ignore[no-untyped-call]
        return torch.nn.functional.embedding(inverse, rows)

    def _rows(self, unique: torch.Tensor) -> torch.Tensor:
        pull = self._table.pull(unique.numpy())
        pull.finish(None)
        return torch.from_numpy(pull.result)

    def _note(self) -> None:
        """A gradient of rows has come: whoever changes all gradients from now on changes the anchor's."""
        if self.anchor.grad is None:
            self.anchor.grad = torch.zeros_like(self.anchor)
        self._seen = self.anchor.grad, self.anchor.grad._version

    def _check_unchanged(self) -> None:
        """Raises `Unsupported` where somebody did. When it has not, an optimizer may change the anchor's."""
        seen, found = self._seen, self.anchor.grad
        if seen is None or not self._sums.waiting:
            return
        if found is not None and (found is not seen[0] or found._version != seen[1]):
            raise Unsupported(
                f"gradients were clipped or scaled after backward(), and those of {self} were not, nor are they in "
                "the norm: clip the parameters of other modules alone"
            )
        self._seen = None

    def _served(self) -> Table:
        return self._table

    def _push(self) -> None:
        self._check_unchanged()
        self._sums.push()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last push, for a step that is to be left out.

        Args:
            set_to_none: As for every module.
        """
        self._sums.drop()
        self._seen = None
        super().zero_grad(set_to_none)

    def set_options(self, **options: float) -> None:
        """Changes numeric options of the optimizer, such as ``lr``, from the next push on.

        In a round of `Sync`, those of the first rank count.

        Args:
            **options: New values of options that were given at construction.

        Raises:
            ArgumentError: The optimizer was not given this option, or the value is not a number.
        """
        self._table.set_options(**options)

    def _published(self) -> list[RequestClient]:
        return [self._table.client]

    def _complete(self) -> None:
        self._table.wait()

    def _loaded(self) -> None:
        self._versions.loaded()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing of it is a model's state."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """So nothing is loaded either."""

    def __repr__(self) -> str:
        return f"StoreEmbedding({self.num_embeddings}, {self.embedding_dim}, dtype={self.dtype})"


class _Adder:
    """Takes the gradient of pulled rows away. Without effect in copies, which belong to no graph."""

    def __init__(self, embedding: StoreEmbedding, unique: torch.Tensor) -> None:
        self._embedding, self._unique = embedding, unique

    def __call__(self, rows: torch.Tensor) -> None:
        gradient, rows.grad = rows.grad, None  # nothing is added to it afterwards
        assert gradient is not None
        self._embedding._sums.add(self._unique.numpy(), gradient.detach().contiguous().cpu().numpy())
        self._embedding._note()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(lambda optimizer, *_: _refuse(optimizer))
    register_optimizer_step_post_hook(_step_all)  # after the step, because its closure may run backward


def _step_all(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _refuse(optimizer)
    for embedding in list(_embeddings.values()):
        embedding.step()


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raises `Unsupported` for a step whose gradients of rows would not be right."""
    waiting = next((e for e in list(_embeddings.values()) if e._sums.waiting), None)
    if waiting is None:
        return
    if _is_scaled():
        raise Unsupported(f"{waiting} goes without a GradScaler: use bfloat16, which needs no scaling")
    if getattr(optimizer, "max_grad_norm", None) is not None or getattr(optimizer, "error_if_nonfinite", False):
        raise Unsupported(f"the norm has no gradients of {waiting}: use no max_grad_norm, error_if_nonfinite")
    for embedding in list(_embeddings.values()):
        embedding._check_unchanged()


def _is_scaled() -> bool:
    """Whether a GradScaler calls this ``step()``, which of torch's own optimizers none is told."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
    return False
