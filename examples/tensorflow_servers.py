"""Variables on two servers: each of two workers computes the gradients of half of every batch, in one function.

tensorwire run --workers 2 --servers 2 -- python examples/tensorflow_servers.py
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf

import tensorwire as tw
from tensorwire.tensorflow import distribute, server

BATCH, INPUTS, WIDTH, STEPS, RATE = 32, 20, 64, 200, 0.1


def weight(rows: int, columns: int) -> tf.Variable:
    """A matrix of small random numbers."""
    return tf.Variable(np.random.default_rng(rows).standard_normal((rows, columns)).astype("float32") / rows**0.5)


def main() -> None:
    """Trains, and prints the loss on worker 0."""
    with tw.init() as job:
        with server(0):
            w0 = weight(INPUTS, WIDTH)
        with server(1):
            w1 = weight(WIDTH, 1)

        @distribute
        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            sums = [tf.zeros_like(w0), tf.zeros_like(w1)]
            for rank, (part, wanted) in enumerate(zip(tf.split(x, 2), tf.split(y, 2), strict=True)):
                with tf.GradientTape() as tape, tf.device(f"/job:worker/task:{rank}"):
                    loss = tf.reduce_mean((tf.nn.relu(part @ w0) @ w1 - wanted) ** 2)
                gradients = tape.gradient(loss, [w0, w1])
                sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
            for number, (w, gradient) in enumerate(zip((w0, w1), sums, strict=True)):
                with server(number):
                    w.assign_sub(RATE / 2 * gradient)
            return loss

        drawn = np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype("float32")
        for number, x in enumerate(drawn, start=1):
            loss = step(tf.constant(x), tf.constant(x.sum(axis=1, keepdims=True)))
            if job.rank == 0 and (number == 1 or number % 50 == 0):
                print(f"step {number}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
