"""Callbacks for ``model.fit`` on several workers: one backup for all, and the same metrics on all."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tensorwire.control.settings import step_timeout
from tensorwire.errors import ArgumentError
from tensorwire.launch.worker import Worker, current_worker


class BackupAndRestore(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """Keras's ``BackupAndRestore`` with one backup for all workers: worker 0 writes it, and all continue from it.

    Give it to ``fit`` on every worker, with the same ``backup_dir``, which all machines must see. Its arguments are
    those of Keras's.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Continues from the backup, if there is one. Every worker comes before any of them trains."""
        worker = current_worker()
        worker.collectives.barrier(step_timeout())  # nobody writes while others read
        super().on_train_begin(logs)
        epoch = int(self.model._initial_epoch or 0)
        theirs = worker.collectives.broadcast(epoch, 0, step_timeout())
        if theirs != epoch:
            raise ArgumentError(
                f"worker {worker.rank} goes on with epoch {epoch + 1}, and worker 0 with epoch {theirs + 1}: give all "
                "workers one backup_dir, on a file system that all machines see"
            )

    def _save_model(self) -> None:
        if current_worker().rank == 0:
            super()._save_model()

    def on_train_end(self, logs: Any = None) -> None:
        """Removes the backup, when all workers have ended their training."""
        worker = current_worker()
        worker.collectives.barrier(step_timeout())
        if worker.rank == 0:
            super().on_train_end(logs)


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of every epoch, replaces each metric by its mean over all workers.

    So all workers see the same loss, and callbacks that decide by it, such as ``EarlyStopping``, decide alike. Put it
    first in the list of callbacks, on every worker; the workers must take the same number of epochs.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Waits for the other workers' metrics."""
        worker: Worker = current_worker()
        numbers = {name: float(value) for name, value in sorted((logs or {}).items()) if np.ndim(value) == 0}
        if logs is None or not numbers:
            return
        found = worker.collectives.all_reduce(np.array(list(numbers.values())), "mean", step_timeout())
        logs.update(zip(numbers, map(float, found), strict=True))
