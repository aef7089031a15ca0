"""MXNet trains on the store: ``import tensorwire.mxnet``, then ``mx.kv.create("dist_tensorwire_sync")``.

MXNet 1.9.1, its last release, needs Python 3.10 or 3.11 and numpy before 2. Import this module before ``mxnet``: it
gives numpy the name ``np.bool``, which MXNet needs, and follows a job's ``DMLC_`` variables.
"""

from __future__ import annotations

from tensorwire.mxnet.load import load_mxnet

load_mxnet()

from tensorwire.mxnet import choice, whole_steps  # noqa: E402, F401  # need mxnet
from tensorwire.mxnet.kvstore import KVStore  # noqa: E402

__all__ = ["KVStore"]
