"""Each worker's part of a data set, for torch's DataLoader, in a job whose workers come and go."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from tensorwire.launch.shares import share_of_epoch
from tensorwire.launch.worker import current_worker


class ShardSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` whose parts are those of `Job.shard`: as many as there are workers when an epoch begins.

    As with its base class, call ``set_epoch(epoch)`` on every worker before each epoch.

    Args:
        dataset: A data set with a length.
        shuffle: Whether each epoch has an order of its own.
        seed: For that, the same on all workers.
        drop_last: Whether to leave samples out so that parts are of one length, instead of taking some twice.

    Raises:
        ArgumentError: `tensorwire.init` was not called before.
    """

    def __init__(self, dataset: Any, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        self._member = current_worker().member
        self._divide(dataset, shuffle, seed, drop_last, 0)

    def _divide(self, dataset: Any, shuffle: bool, seed: int, drop_last: bool, epoch: int) -> None:
        part, parts = share_of_epoch(self._member, epoch)
        super().__init__(dataset, parts, part, shuffle, seed, drop_last)
        super().set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Divides the data set anew.

        Args:
            epoch: Which epoch, from 0.

        Raises:
            JobEnded: The job ended; the message says why.
        """
        self._divide(self.dataset, self.shuffle, self.seed, self.drop_last, epoch)
