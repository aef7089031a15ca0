"""Functions that are cut over two workers, each with the variables it changes: one process runs them, too.

``on(rank)`` is where variables are made and operators are traced: `tensorwire.tensorflow.worker`, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Made = tuple[Any, list[Any], Callable[[int], tuple[Any, ...]]]  # the function, its variables, and a step's arguments


def weight(tf: Any, *shape: int) -> Any:
    numbers = np.random.default_rng(shape).standard_normal(shape).astype("f4")
    return tf.Variable(numbers / np.float32(shape[0] ** 0.5))


def batch(tf: Any, *shape: int) -> Callable[[int], tuple[Any, ...]]:
    def arguments(step: int) -> tuple[Any, ...]:
        drawn = np.random.default_rng(step)
        return tf.constant(drawn.standard_normal(shape), tf.float32), tf.constant(
            drawn.standard_normal((shape[0], 3)), tf.float32
        )

    return arguments


def perceptron(tf: Any, on: Any) -> Made:
    """Two layers, momentum, and an update that waits for another one."""
    with on(0):
        first, bias, momentum = weight(tf, 12, 40), tf.Variable(tf.zeros(40)), tf.Variable(tf.zeros((12, 40)))
    with on(1):
        second = weight(tf, 40, 3)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with on(0):
                hidden = tf.nn.relu(x @ first + bias)
            with on(1):
                loss = tf.reduce_mean((hidden @ second - y) ** 2)
        gradients = tape.gradient(loss, [first, bias, second])
        momentum.assign(0.9 * momentum + gradients[0])
        first.assign_sub(0.1 * momentum)
        bias.assign_sub(0.1 * gradients[1])
        second.assign_sub(0.1 * gradients[2])
        return loss

    return step, [first, bias, momentum, second], batch(tf, 16, 12)


def there_and_back(tf: Any, on: Any) -> Made:
    """Tensors cross several times, one of them to be used twice; operators with several outputs; a result of many."""
    with on(0):
        w = weight(tf, 12, 12)
    with on(1):
        total = tf.Variable(tf.zeros(12))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with on(0):
            a = x @ w
            left, right = tf.split(a, 2, axis=1)
        with on(1):
            b = tf.concat([right, left], axis=1) * 2.0
            values, where = tf.math.top_k(b, 4)
            total.assign_add(tf.reduce_sum(b, axis=0))
        with on(0):
            c = tf.reduce_sum(values) + tf.reduce_sum(b) + tf.reduce_sum(a)
            w.assign(w * 0.5 + tf.transpose(w) * 0.5)
        return {"c": c, "where": where, "of arguments": tf.reduce_max(x), "constant": tf.constant([1, 2])}

    return step, [w, total], batch(tf, 8, 12)


def loops_and_branches(tf: Any, on: Any) -> Made:
    """A loop and a branch, each on one worker, of what crosses."""
    with on(0):
        counter = tf.Variable(0.0)
    with on(1):
        w = weight(tf, 12, 12)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with on(0):
            counter.assign_add(1.0)
            scaled = x * counter
        with on(1):
            state = scaled
            for _ in tf.range(3):
                state = tf.tanh(state @ w)
            if tf.reduce_sum(state) > 0:
                result = state * 2.0
            else:
                result = state - 1.0
            w.assign_sub(0.01 * tf.transpose(scaled) @ result)
        with on(0):
            counter.assign_add(tf.reduce_mean(result))
        return counter.read_value()

    return step, [counter, w], batch(tf, 8, 12)


def control_dependencies(tf: Any, on: Any) -> Made:
    """What one worker does waits for what the other one did, without a tensor between them."""
    with on(0):
        a = tf.Variable(tf.ones(5))
    with on(1):
        b = tf.Variable(tf.ones(5))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with on(0):
            first = a.assign_add(tf.ones(5))
        with tf.control_dependencies([first]), on(1):
            second = b.assign(b * 2.0)
        with tf.control_dependencies([tf.group(second)]), on(0):
            a.assign(a * 3.0)
        return tf.reduce_sum(x)

    return step, [a, b], batch(tf, 2, 3)


def convolutions(tf: Any, on: Any) -> Made:
    """Keras layers, with batch normalization, dropout of a fixed seed, and Adam."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    with on(0):
        front = keras.Sequential([keras.layers.Conv2D(4, 3, padding="same"), keras.layers.BatchNormalization()])
        front.build((None, 6, 6, 2))
    with on(1):
        back = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
        back.build((None, 6, 6, 4))
    variables = [v.value for v in (*front.variables, *back.variables)]

    @tf.function
    def step(x: Any, y: Any) -> Any:
        images = tf.reshape(x, [8, 6, 6, 2])
        with tf.GradientTape() as tape:
            with on(0):
                hidden = front(images, training=True)
            with on(1):
                dropped = tf.nn.experimental.stateless_dropout(hidden, 0.2, seed=[1, 2])
                loss = tf.reduce_mean((back(dropped, training=True) - y) ** 2)
        weights = [v.value for v in (*front.trainable_variables, *back.trainable_variables)]
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    return step, variables, batch(tf, 8, 72)


def other_shapes(tf: Any, on: Any) -> Made:
    """The last batches are smaller: the function is traced again."""
    step, variables, arguments = perceptron(tf, on)
    return step, variables, lambda number: tuple(each[: 16 if number < 3 else 5] for each in arguments(number))


def rows(tf: Any, width: int) -> Callable[[int], tuple[Any, ...]]:
    """Batches of another size in every step, one of them empty, another one of many chunks."""

    def arguments(step: int) -> tuple[Any, ...]:
        return batch(tf, (7, 0, 40_000, 1, 20)[step], width)(step)

    return arguments


def unknown_batches(tf: Any, on: Any) -> Made:
    """The perceptron, traced once for batches of all sizes."""
    with on(0):
        first = weight(tf, 12, 40)
    with on(1):
        second, calls = weight(tf, 40, 3), tf.Variable(0)

    @tf.function(input_signature=[tf.TensorSpec([None, 12]), tf.TensorSpec([None, 3])])
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with on(0):
                hidden = tf.nn.relu(x @ first)
            with on(1):
                error = hidden @ second - y
                loss = tf.reduce_sum(error**2)
        for w, gradient in zip((first, second), tape.gradient(loss, [first, second]), strict=True):
            w.assign_sub(1e-6 * gradient)
        calls.assign_add(1)
        return loss, error

    return step, [first, second, calls], rows(tf, 12)


def unknown_sizes(tf: Any, on: Any) -> Made:
    """Sizes that depend on values, a rank that is not known, strings, and a list of tensors, which cross."""
    with on(0):
        longest = tf.Variable(0)
    with on(1):
        total = tf.Variable(tf.zeros(5))

    @tf.function(input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec(None)])
    def step(x: Any, y: Any) -> Any:
        with on(0):
            positive = tf.boolean_mask(x, x[:, 0] > 0)
            distinct, index = tf.unique(tf.cast(tf.reshape(x, [-1]) * 3.0, tf.int32))
            said = tf.strings.as_string(distinct)
            doubled = y * 2.0
            listed = tf.raw_ops.TensorListFromTensor(tensor=positive, element_shape=[5])
        with on(1):
            total.assign_add(tf.reduce_sum(positive, axis=0))
            joined = tf.strings.reduce_join(said, separator=",")
            back = tf.strings.join(["<", joined, ">"])
            again = tf.gather(distinct, index)
            most = tf.reduce_max(tf.concat([doubled, [[0.0] * 3]], axis=0))
            listed = tf.raw_ops.TensorListPushBack(input_handle=listed, tensor=total * 1.0)
        with on(0):
            longest.assign(tf.maximum(longest, tf.strings.length(back)))
            stacked = tf.raw_ops.TensorListStack(input_handle=listed, element_shape=[5], element_dtype=tf.float32)
        return {"back": back, "again": again, "most": most, "stacked": stacked, "said": said}

    return step, [longest, total], rows(tf, 5)


FUNCTIONS = [
    perceptron,
    there_and_back,
    loops_and_branches,
    control_dependencies,
    convolutions,
    other_shapes,
    unknown_batches,
    unknown_sizes,
]
