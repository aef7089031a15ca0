"""A training step that is cut over two workers: each layer, its gradient and its update run on one of them.

tensorwire run --workers 2 -- python examples/tensorflow_cut.py
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf

import tensorwire as tw
from tensorwire.tensorflow import distribute, worker

BATCH, INPUTS, WIDTH, STEPS, RATE = 32, 20, 64, 200, 0.1


def weight(rows: int, columns: int) -> tf.Variable:
    """A matrix of small random numbers."""
    return tf.Variable(np.random.default_rng(rows).standard_normal((rows, columns)).astype("float32") / rows**0.5)


def main() -> None:
    """Trains, and prints the loss on worker 0."""
    with tw.init() as job:
        with worker(0):
            w0 = weight(INPUTS, WIDTH)
        with worker(1):
            w1 = weight(WIDTH, 1)

        @distribute
        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with tf.device("/job:worker/task:0"):
                    hidden = tf.nn.relu(x @ w0)
                with tf.device("/job:worker/task:1"):
                    loss = tf.reduce_mean((hidden @ w1 - y) ** 2)
            for w, gradient in zip((w0, w1), tape.gradient(loss, [w0, w1]), strict=True):
                w.assign_sub(RATE * gradient)
            return loss

        drawn = np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype("float32")
        for number, x in enumerate(drawn, start=1):
            loss = step(tf.constant(x), tf.constant(x.sum(axis=1, keepdims=True)))
            if job.rank == 0 and (number == 1 or number % 50 == 0):
                print(f"step {number}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
