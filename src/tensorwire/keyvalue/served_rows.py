"""The calls that a ``StoreEmbedding`` has in every framework."""

from __future__ import annotations

import os

from tensorwire.keyvalue.row_table import Table
from tensorwire.keyvalue.table_files import load_on_all, save_table


class ServedRows:
    """Rows on the servers, whose gradients a worker pushes."""

    def _served(self) -> Table:
        raise NotImplementedError

    def _push(self) -> None:
        raise NotImplementedError

    def _loaded(self) -> None:
        """Rows were loaded."""

    def step(self) -> None:
        """Pushes the sum of the gradients since the last push, if there is one. Steps of optimizers do so, too.

        Raises:
            Unsupported: In PyTorch, gradients were clipped or scaled, and those of the rows were not.
            WaitTimeout: The servers did not take it in time, because another worker did not push.
            JobEnded: The job ended; the message says why.
        """
        self._push()

    def wait(self) -> None:
        """Returns when the servers have applied what this worker has pushed.

        Raises:
            WaitTimeout: They did not in time, because another worker did not push its gradients.
            JobEnded: The job ended; the message says why.
        """
        self._served().wait()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes all rows, and what the optimizer keeps for them, to a folder of npy files.

        Checkpoints of a model have none of it. One worker may call it alone, while the others wait at a barrier.

        Args:
            folder: The folder, which is replaced as a whole.

        Raises:
            ArgumentError: It cannot be written, or is no folder of a table.
            WaitTimeout: The servers did not answer in time.
            JobEnded: The job ended; the message says why.
        """
        save_table(self._served(), folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Sets all rows, and what the optimizer keeps for them. Every worker calls it; worker 0 reads the folder.

        Args:
            folder: A folder that `save` wrote, with any number of servers.

        Raises:
            ArgumentError: The folder cannot be read, or is of another table or optimizer. Nothing was changed.
            WaitTimeout: Another worker or a server did not come in time.
            JobEnded: The job ended; the message says why.
        """
        load_on_all(self._served(), folder)
        self._loaded()
