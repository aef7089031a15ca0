"""The parameter store: names, shards, buckets, push and pull, and the rules that servers apply."""

from tensorwire.store.client import StoreClient
from tensorwire.store.plan import Bucket, Piece, Plan, TensorSpec, make_plan

__all__ = ["Bucket", "Piece", "Plan", "StoreClient", "TensorSpec", "make_plan"]
