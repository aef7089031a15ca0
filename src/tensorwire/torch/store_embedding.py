"""``StoreEmbedding``: an embedding whose table is on the servers alone."""

from __future__ import annotations

import os
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.keyvalue.row_table import Table, check_embedding, embedding_table
from tensorwire.keyvalue.table_files import load_on_all, save_table
from tensorwire.launch import current_worker
from tensorwire.store.modes import SSP, Async, Sync
from tensorwire.store.row_rules import ROW_OPTIMIZERS


class StoreEmbedding(torch.nn.Module):
    """An embedding whose table no worker has to hold: rows are pulled in forward and pushed in backward.

    ::

        embedding = tw.torch.StoreEmbedding(10**8, 64, torch.optim.Adagrad, lr=0.1)
        loss = model(embedding(indices)).sum()
        loss.backward()

    It has no parameters: servers apply the optimizer as soon as gradients come. Each row travels once per pass, however
    often it is named. Every worker makes the module, in the same place of its program. With ``Sync()``, all workers
    have to run backward through it equally often.

    Args:
        num_embeddings: The number of rows.
        embedding_dim: Elements of a row.
        optimizer: ``torch.optim.SGD`` without momentum, ``Adagrad`` or ``SparseAdam``, whose options are ``options``.
        mode: ``tw.store.Sync()``: an update has the gradients of all workers, and a pull waits for that of the worker's
            last backward. ``Async()``: each worker's gradients are applied by themselves. ``SSP()``: the same, and a
            pull waits while this worker is more than ``staleness`` updates ahead of the slowest.
        reduce: ``"mean"`` or ``"sum"`` of the workers' gradients, with ``Sync()``.
        initial: How servers draw the first values: ``"normal"``, ``"uniform"`` or ``"zeros"``.
        scale: The standard deviation of ``"normal"``, the bound of ``"uniform"``.
        seed: From which they are drawn; None: torch's initial seed of worker 0.
        dtype: torch.float32 or torch.float64.
        **options: Options of the optimizer, such as ``lr``; `set_options` changes them.

    Raises:
        ArgumentError: ``init()`` has not been called, or an argument is wrong.
        Unsupported: The dtype is another one.
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
        **options: Any,
    ) -> None:
        super().__init__()
        worker = current_worker()
        check_embedding({"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}, reduce, scale)
        rule = getattr(optimizer, "__name__", "")
        if rule not in ROW_OPTIMIZERS or getattr(torch.optim, rule) is not optimizer:
            names = ", ".join(f"torch.optim.{name}" for name in ROW_OPTIMIZERS)
            raise ArgumentError(f"servers update rows by {names}; not by {optimizer!r:.100}")
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

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Looks rows up.

        Args:
            indices: Integers from 0 to ``num_embeddings - 1``, of any shape, on the CPU.

        Returns:
            The rows, of the shape of ``indices`` and ``embedding_dim``.

        Raises:
            ArgumentError: An index is out of range.
            WaitTimeout: The servers did not answer in time, because another worker did not run backward.
            JobEnded: The job ended; the message says why.
        """
        unique, inverse = torch.unique(indices.detach(), return_inverse=True)
        rows = self._rows(unique)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_hook(_Pusher(self._table, unique))  # type: ignore[no-untyped-call]
        return torch.nn.functional.embedding(inverse, rows)

    def _rows(self, unique: torch.Tensor) -> torch.Tensor:
        pull = self._table.pull(unique.numpy())
        pull.finish(None)
        return torch.from_numpy(pull.result)

    def set_options(self, **options: float) -> None:
        """Changes numeric options of the optimizer, such as ``lr``, for the gradients that follow.

        In a round of `Sync`, those of the first rank count.

        Args:
            **options: New values of options that were given at construction.

        Raises:
            ArgumentError: The optimizer was not given this option, or the value is not a number.
        """
        self._table.set_options(**options)

    def wait(self) -> None:
        """Returns when the servers have applied this worker's gradients.

        Raises:
            WaitTimeout: They did not in time, because another worker did not run backward.
            JobEnded: The job ended; the message says why.
        """
        self._table.wait()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes all rows, and what the optimizer keeps for them, to a folder of npy files.

        ``state_dict()`` has none of it. One worker may call it alone, while the others wait at a barrier.

        Args:
            folder: The folder, which is replaced as a whole.

        Raises:
            ArgumentError: It cannot be written, or is no folder of a table.
            WaitTimeout: The servers did not answer in time.
            JobEnded: The job ended; the message says why.
        """
        save_table(self._table, folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Sets all rows, and what the optimizer keeps for them. Every worker calls it; worker 0 reads the folder.

        Args:
            folder: A folder that `save` wrote, with any number of servers.

        Raises:
            ArgumentError: The folder cannot be read, or is of another table or optimizer. Nothing was changed.
            WaitTimeout: Another worker or a server did not come in time.
            JobEnded: The job ended; the message says why.
        """
        load_on_all(self._table, folder)

    def __repr__(self) -> str:
        return f"StoreEmbedding({self.num_embeddings}, {self.embedding_dim}, dtype={self.dtype})"


class _Pusher:
    """Pushes the gradient of pulled rows. Without effect in copies, which belong to no graph."""

    def __init__(self, table: Table, unique: torch.Tensor) -> None:
        self._table, self._unique = table, unique

    def __call__(self, gradient: torch.Tensor) -> None:
        rows = gradient.detach().contiguous().numpy()
        self._table.push(*self._table.given(self._unique.numpy(), rows))
