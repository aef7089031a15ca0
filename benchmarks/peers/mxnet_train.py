"""Training by MXNet: ``server|worker INDEX STORE DATA SHRINK DEVICE WORKERS SERVERS HOST``.

DATA: ``mnist`` or ``cifar``, random images of these shapes. The perceptrons are those of RDMA-MXNet, their hidden
layers divided by SHRINK. Every worker has a share of the images.
"""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np
from mxnet_job import run_program

from tensorwire.bench.actors.lines import Lines, timed
from tensorwire.bench.actors.transfer import counts, since

BATCH, CLASSES = 128, 10
_HIDDEN = (2048, 1024)
_LEARNING_RATE = 0.1
_INPUTS = {"mnist": 784, "cifar": 3072}
_RANDOM = 10_240  # images; over and over


def images(data: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Random images as rows of bytes, and their labels."""
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (_RANDOM, _INPUTS[data]), np.uint8)
    return rows, random.integers(0, CLASSES, _RANDOM, np.uint8)


class Trainer:
    """A worker's network, its share of the images, and Gluon's trainer."""

    def __init__(self, mx: Any, kv: Any, data: str, shrink: int) -> None:
        self._mx, self._together = mx, BATCH * kv.num_workers
        mx.random.seed(0)
        np.random.seed(0)
        self._net = net = mx.gluon.nn.HybridSequential()
        for width in _HIDDEN:
            net.add(mx.gluon.nn.Dense(width // shrink, activation="relu"))
        net.add(mx.gluon.nn.Dense(CLASSES))
        net.initialize(mx.init.Xavier())
        net.hybridize(static_alloc=True, static_shape=True)
        self._loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self._batches = itertools.cycle(self._cut(kv.rank, kv.num_workers, data))
        net(next(self._batches)[0])  # now all shapes are known
        options = {"learning_rate": _LEARNING_RATE}
        self._trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kv)
        self._loss: Any = None

    def _cut(self, rank: int, workers: int, data: str) -> list[tuple[Any, Any]]:
        rows, labels = (array[rank::workers] for array in images(data))
        starts = range(0, len(rows) - BATCH + 1, BATCH)
        array = self._mx.nd.array
        return [
            (array(rows[at : at + BATCH] / np.float32(255), dtype="float32"), array(labels[at : at + BATCH]))
            for at in starts
        ]

    def steps(self, count: int) -> None:
        """So many steps; all parameters have arrived at the end."""
        for _ in range(count):
            rows, labels = next(self._batches)
            with self._mx.autograd.record():
                self._loss = self._loss_of(self._net(rows), labels)
            self._loss.backward()
            self._trainer.step(self._together)
        self._mx.nd.waitall()

    def loss(self) -> float:
        """Of the last batch. Raises `SystemExit` where it is no number."""
        loss = float(self._loss.mean().asscalar())
        if not math.isfinite(loss):
            raise SystemExit(f"the loss is {loss}")
        return loss

    def values(self) -> int:
        """What tells these parameters from others."""
        code = 0
        for parameter in self._net.collect_params().values():
            code = zlib.crc32(parameter.data().asnumpy().tobytes(), code)
        return code


def work(lines: Lines, mx: Any, kv: Any, data: str, shrink: str) -> None:
    """A worker's rounds."""
    trainer = Trainer(mx, kv, data, int(shrink))
    for run in lines.runs():
        before = counts()
        seconds = timed(run, trainer.steps)
        lines.answer(seconds, loss=trainer.loss(), values=trainer.values(), **since(before))


if __name__ == "__main__":
    run_program(work, own=2)
