"""A model in two halves: a layer on each of two workers, whose tensor and gradient cross by `send` and `recv`.

tensorwire run --workers 2 -- python examples/tensorflow_halves.py
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf

import tensorwire as tw
from tensorwire.tensorflow import recv, send

BATCH, INPUTS, WIDTH, STEPS, RATE = 32, 20, 64, 200, 0.1


def weight(rows: int, columns: int) -> tf.Variable:
    """A matrix of small random numbers."""
    return tf.Variable(np.random.default_rng(rows).standard_normal((rows, columns)).astype("float32") / rows**0.5)


def batches() -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Random inputs, and their sums, which the model learns; the same on both workers."""
    drawn = np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype("float32")
    return [(tf.constant(x), tf.constant(x.sum(axis=1, keepdims=True))) for x in drawn]


def train_first_half() -> None:
    """On worker 0."""
    w = weight(INPUTS, WIDTH)

    @tf.function
    def first_half(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            token = send(tf.nn.relu(x @ w), "hidden", to=1)
        w.assign_sub(RATE * tape.gradient(token, w))

    for x, _ in batches():
        first_half(x)


def train_second_half() -> None:
    """On worker 1, which has the loss."""
    w = weight(WIDTH, 1)

    @tf.function
    def second_half(y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = recv("hidden", [BATCH, WIDTH], source=0)
            loss = tf.reduce_mean((hidden @ w - y) ** 2)
        w.assign_sub(RATE * tape.gradient(loss, w))
        return loss

    for step, (_, y) in enumerate(batches(), start=1):
        loss = second_half(y)
        if step == 1 or step % 50 == 0:
            print(f"step {step}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    with tw.init() as job:
        train_first_half() if job.rank == 0 else train_second_half()
