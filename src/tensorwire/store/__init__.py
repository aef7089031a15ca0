"""The parameter store: names, shards, buckets, push and pull, the rules that servers apply, and the training modes."""

from tensorwire.store.modes import SSP, Async, Sync

__all__ = ["SSP", "Async", "Sync"]
