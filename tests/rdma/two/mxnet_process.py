"""A process of a job of MXNet that ``DMLC_`` variables describe. A worker trains, and prints how it went."""

from __future__ import annotations

import hashlib

import tensorwire.mxnet  # noqa: F401  # isort: skip  # before mxnet, and does not return in schedulers and servers
import mxnet as mx

from tests.mxnet.training import train

if __name__ == "__main__":
    kv = mx.kv.create("dist_tensorwire_sync")
    digest = hashlib.sha256(b"".join(array.tobytes() for array in train(mx, kv, {"optimizer": "adam"})))
    print(kv._worker.member.channel("server 0").device.name, digest.hexdigest(), flush=True)
