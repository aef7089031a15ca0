"""The parameter store: names, shards, buckets, push and pull, the rules that servers apply, and the training modes."""

from tensorwire.store.modes import EASGD, SGD, SSP, Async, DiLoCo, LocalSGD, Sync

__all__ = ["EASGD", "SGD", "SSP", "Async", "DiLoCo", "LocalSGD", "Sync"]
