"""The parameter store: names, shards, buckets, push and pull, and the rules that servers apply."""

from tensorwire.store.modes import SSP, Async, Sync
from tensorwire.store.sharding import Bucket, ParameterSpec, Piece, StorePlan, make_plan
from tensorwire.store.store_client import StoreClient

__all__ = ["SSP", "Async", "Bucket", "ParameterSpec", "Piece", "StoreClient", "StorePlan", "Sync", "make_plan"]
