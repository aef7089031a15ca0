"""The parameter store: sharding, buckets, push and pull, the servers' rules, and the training modes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorwire.store.modes import EASGD, SGD, SSP, Async, DiLoCo, LocalSGD, Sync
from tensorwire.store.versions.every import Every

if TYPE_CHECKING:
    from tensorwire.keyvalue import Handle as Handle
    from tensorwire.keyvalue import KeyValue as KeyValue
    from tensorwire.launch.reading import connect as connect
    from tensorwire.store.versions.listing import Listing as Listing
    from tensorwire.store.versions.listing import ReaderState as ReaderState
    from tensorwire.store.versions.listing import VersionState as VersionState
    from tensorwire.store.versions.loader import Loader as Loader
    from tensorwire.store.versions.reader import Reader as Reader
    from tensorwire.store.versions.staging import Staged as Staged

__all__ = [
    "EASGD",
    "SGD",
    "SSP",
    "Async",
    "DiLoCo",
    "Every",
    "Handle",
    "KeyValue",
    "Listing",
    "Loader",
    "LocalSGD",
    "Reader",
    "ReaderState",
    "Staged",
    "Sync",
    "VersionState",
    "connect",
]
_LATE = {  # they stand on the launcher or on PyTorch, as the store itself does not
    "Handle": "tensorwire.keyvalue",
    "KeyValue": "tensorwire.keyvalue",
    "Loader": "tensorwire.store.versions.loader",
    "Reader": "tensorwire.store.versions.reader",
    "Staged": "tensorwire.store.versions.staging",
    **dict.fromkeys(("Listing", "ReaderState", "VersionState"), "tensorwire.store.versions.listing"),
    "connect": "tensorwire.launch.reading",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'tensorwire.store' has no attribute {name!r}")
