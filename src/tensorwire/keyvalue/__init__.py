"""The key-value client of the store, for programs without a framework. It imports none."""

from tensorwire.keyvalue.handle import Handle
from tensorwire.keyvalue.key_value import KeyValue

__all__ = ["Handle", "KeyValue"]
