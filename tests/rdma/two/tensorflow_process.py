"""A worker of a job that ``TF_CONFIG`` describes. It trains by a function that is cut over both, and prints how."""

from __future__ import annotations

import hashlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import tensorwire as tw
import tensorwire.tensorflow as twt
from tensorwire.control.names import member_name
from tensorwire.launch.worker import current_worker

BATCH, INPUTS, WIDTH, STEPS = 16, 8, 32, 5


def drawn(rows: int, columns: int) -> tf.Variable:
    """A matrix of random numbers."""
    return tf.Variable(np.random.default_rng(rows).standard_normal((rows, columns)).astype("float32"))


def main() -> None:
    """The losses have the bits that they have over every device."""
    with tw.init() as job:
        with twt.worker(0):
            w0 = drawn(INPUTS, WIDTH)
        with twt.worker(1):
            w1 = drawn(WIDTH, 1)

        @twt.distribute
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with tf.device("/job:worker/task:0"):
                    hidden = tf.nn.relu(x @ w0)
                with tf.device("/job:worker/task:1"):
                    loss = tf.reduce_mean((hidden @ w1 - tf.reduce_sum(x, axis=1, keepdims=True)) ** 2)
            for w, gradient in zip((w0, w1), tape.gradient(loss, [w0, w1]), strict=True):
                w.assign_sub(0.01 * gradient)
            return loss

        inputs = np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype("float32")
        losses = np.array([float(step(tf.constant(x))) for x in inputs])
        device = current_worker().member.channel(member_name("worker", 1 - job.rank)).device.name
        assert losses[-1] < losses[0]
        print(device, hashlib.sha256(losses.tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
