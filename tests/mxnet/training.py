"""A training with Gluon's Trainer, which MXNet's own store and ours run alike: ``training.py KIND OUT SETTINGS``.

Run as a program, it trains on MXNet's own store, in a job that ``DMLC_`` variables describe, and writes the parameters.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

STEPS = 6


def train(mx: Any, store: Any, settings: dict[str, Any]) -> list[Any]:
    """Trains a network on a worker's own data, and returns its parameters. ``store``: the KVStore."""
    mx.random.seed(1)
    np.random.seed(1)
    net, ids = network(mx, settings), None
    params = net.collect_params()
    optimizer = dict(settings.get("options", {"learning_rate": 0.05, "wd": 1e-3}))
    trainer = mx.gluon.Trainer(
        params,
        settings.get("optimizer", "sgd"),
        optimizer,
        kvstore=store,
        update_on_kvstore=settings.get("update_on_kvstore"),
    )
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    drawn = np.random.RandomState(store.rank)
    for _ in range(STEPS):
        x = mx.nd.array(drawn.rand(8, *settings.get("shape", [30])), dtype=settings.get("cast", "float32"))
        ids = mx.nd.array(np.arange(8) % 4)
        with mx.autograd.record():
            loss = loss_of(net(x), ids)
        loss.backward()
        trainer.step(8 * settings.get("workers", 2))
        if settings.get("evaluate"):
            net(x).wait_to_read()
    mx.nd.waitall()
    return [param.data().asnumpy() for param in params.values()]


def network(mx: Any, settings: dict[str, Any]) -> Any:
    """The network: dense layers, or convolutions and batch normalization before them."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    inputs = 30
    if settings.get("convolutions"):
        net.add(nn.Conv2D(64, 3, padding=1, in_channels=3, activation="relu"))
        net.add(nn.Conv2D(64, 3, padding=1, in_channels=64, activation="relu"))
        net.add(nn.BatchNorm(in_channels=64), nn.Flatten())
        inputs = 64 * 8 * 8
    wide = settings.get("wide", 64)
    net.add(nn.Dense(wide, in_units=inputs, activation="relu"))
    if wide > 64:
        net.add(nn.Dense(wide, in_units=wide, activation="relu"))
    net.add(nn.Dense(4, in_units=wide))
    net.initialize(mx.init.Xavier())
    net.cast(settings.get("cast", "float32"))
    if settings.get("hybridize"):
        net.hybridize(**settings["hybridize"])
    return net


if __name__ == "__main__":
    vars(np)["bool"] = bool
    import mxnet

    kind, out, text = sys.argv[1:]
    own = mxnet.kv.create(kind)
    np.savez(f"{out}{own.rank}.npz", *train(mxnet, own, json.loads(text)))
    own._barrier()
