"""Rows of `StoreEmbedding` get the sum of a step's gradients, as an ordinary embedding does, or the step is refused."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters
from tests.harness.jobs import for_each, in_turn, run_job
from tests.tensorflow.test_operators import load

ROWS, WIDTH, BATCH, LENGTH, STEPS = 40, 3, 6, 4, 3
WAYS = {
    "two passes": {"passes": 2},
    "two lookups": {"lookups": 2},
    "two passes of two lookups in a function": {"passes": 2, "lookups": 2, "traced": True},
    "an optimizer of Keras": {"passes": 2, "step": "keras"},
    "one of Keras in a function": {"passes": 2, "step": "keras", "traced": True},
    "its own step": {"passes": 2, "step": "own"},
    "its own step in a function": {"passes": 2, "step": "own", "traced": True},
    "clipped values": {"passes": 2, "options": {"clipvalue": 0.05}},
    "a scaled loss": {"lookups": 2, "options": {"loss_scale_factor": 1024.0}, "traced": True},
    "the optimizer on the servers": {"lookups": 2, "passes": 2, "servers": True},
}


def batch(step: int, rank: int, number: int) -> tuple[Any, Any]:
    rng = np.random.default_rng([step, rank, number])
    return rng.integers(0, ROWS, (BATCH, LENGTH)), rng.normal(size=(BATCH, 1)).astype(np.float32)


def loss_of(tf: Any, embedding: Any, w: Any, given: tuple[Any, Any], lookups: int) -> Any:
    x, y = given
    parts = [tf.reduce_sum(embedding(each), 1) for each in tf.split(x, lookups, axis=1)]
    found = tf.add_n([part * (number + 1.0) for number, part in enumerate(parts)]) @ w
    return tf.reduce_mean((found - y) ** 2)


def adagrad(keras: Any, options: dict[str, Any]) -> Any:
    return keras.optimizers.Adagrad(0.3, **options)


def of_weights(keras: Any, way: dict[str, Any]) -> Any:
    return keras.optimizers.SGD(0.1 if way.get("step") is None else 0.0, **way.get("options", {}))


def alone(job: tw.Job, way: dict[str, Any], first: Any) -> tuple[Any, Any]:
    tf, _ = load()
    import keras

    embedding, w = keras.layers.Embedding(ROWS, WIDTH), tf.Variable(tf.ones((WIDTH, 1)))
    embedding.build(())
    embedding.set_weights([first])
    updates = adagrad(keras, way.get("options", {})), of_weights(keras, way)
    for step in range(STEPS):
        sums: list[Any] = [0.0, 0.0]
        for number in range(way.get("passes", 1)):
            for rank in range(2):
                with tf.GradientTape() as tape:
                    loss = loss_of(tf, embedding, w, batch(step, rank, number), way.get("lookups", 1))
                    loss = updates[1].scale_loss(loss)
                found = tape.gradient(loss, [embedding.embeddings.value, w])
                sums = [total + tf.convert_to_tensor(each) / 2 for total, each in zip(sums, found, strict=True)]
        for update, total, variable in zip(updates, sums, [embedding.embeddings, w], strict=True):
            update.apply([total], [variable])
    return embedding.get_weights()[0], w.numpy()


def on_servers(job: tw.Job, way: dict[str, Any]) -> tuple[Any, Any, Any, int]:
    tf, twt = load()
    import keras

    embedding = twt.StoreEmbedding(ROWS, WIDTH, adagrad(keras, way.get("options", {})), seed=5)
    w = tf.Variable(tf.ones((WIDTH, 1)))
    first = embedding(np.arange(ROWS)).numpy()
    optimizer = of_weights(keras, way)
    if way.get("step") is None:
        optimizer = twt.StoreOptimizer(optimizer, on_servers=way.get("servers", False))
    optimizer.build([w])

    def step(batches: Any) -> None:
        total = 0.0
        for given in batches:
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(loss_of(tf, embedding, w, given, way.get("lookups", 1)))
            total = total + tape.gradient(loss, w)
        if way.get("step") == "own":
            embedding.step()
        else:
            optimizer.apply([total], [w])

    called = tf.function(step) if way.get("traced") else step
    for number in range(STEPS):
        called([batch(number, job.rank, each) for each in range(way.get("passes", 1))])
    embedding.wait()
    job.barrier()
    return first, embedding(np.arange(ROWS)).numpy(), w.numpy(), int(embedding.optimizer.iterations)


def test_a_step_has_the_sum_of_its_gradients_as_in_one_process() -> None:
    first, second = run_job(for_each, on_servers, [(way,) for way in WAYS.values()]).ok()
    begun = [(way, found[0]) for way, found in zip(WAYS.values(), first, strict=True)]
    (alone_,) = run_job(for_each, alone, begun, workers=1, servers=0).ok()
    for name, *found, (wanted, weights) in zip(WAYS, first, second, alone_, strict=True):
        for _, values, mine, count in found:
            np.testing.assert_array_equal(values, found[0][1], name)
            np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(mine, weights, rtol=1e-4, atol=1e-5, err_msg=name)
            assert count == STEPS


def refused(job: tw.Job) -> None:
    tf, twt = load()
    import keras

    embedding, w = twt.StoreEmbedding(ROWS, WIDTH, "sgd"), tf.Variable(tf.ones((WIDTH, 1)))
    embedding.build(())
    kept = embedding(np.arange(ROWS)).numpy()

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(tf, embedding, w, batch(0, 0, 0), 1)
        return tape.gradient(loss, w)

    scaled = keras.optimizers.LossScaleOptimizer
    for why, made in {
        "do not scale losses": lambda: scaled(keras.optimizers.SGD(0.1)),
        "give both optimizers the same loss_scale_factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
        "use no clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=1.0),
        "use no global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0),
        "use no gradient_accumulation_steps": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        "give both optimizers the same clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=1.0),
    }.items():
        for wrap in (lambda inner: inner, twt.StoreOptimizer):
            optimizer = wrap(made())
            optimizer.build([w])
            before = w.numpy()
            optimizer.apply([tf.zeros_like(w)], [w])  # without rows, all of them may be used
            with pytest.raises(errors.Unsupported, match=why):
                optimizer.apply([gradient()], [w])
            np.testing.assert_array_equal(w.numpy(), before)
            step = tf.function(lambda optimizer=optimizer: optimizer.apply([gradient()], [w]))
            with pytest.raises(tf.errors.UnknownError, match=rf"Unsupported: .*{why}"):
                step()
            embedding.drop_gradients()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(tf, embedding, w, batch(0, 0, 0), 1)
    tape.gradient(loss, w)
    with pytest.raises(errors.Unsupported, match="a second time"):
        tape.gradient(loss, w)
    embedding.drop_gradients()

    @tf.function
    def twice() -> None:
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(tf, embedding, w, batch(0, 0, 0), 1)
        w.assign_sub(0.0 * (tape.gradient(loss, w) + tape.gradient(loss, w)))

    with pytest.raises(tf.errors.UnknownError, match=r"Unsupported: .*a second time"):
        twice()
    embedding.drop_gradients()
    tf.function(embedding.drop_gradients)()
    before = counters.snapshot()
    keras.optimizers.SGD(0.1).apply([tf.zeros_like(w)], [w])
    assert counters.since(before).pushes == 0
    np.testing.assert_array_equal(embedding(np.arange(ROWS)).numpy(), kept)


def left_over(job: tw.Job) -> str:
    tf, twt = load()
    embedding = twt.StoreEmbedding(ROWS, WIDTH, "sgd")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding(np.arange(3)))
    tape.gradient(loss, [])
    with contextlib.redirect_stderr(io.StringIO()) as said:
        job.close()
    return said.getvalue()


def test_what_would_change_gradients_otherwise_is_refused_and_those_without_a_step_are_told() -> None:
    ((_, said),) = run_job(in_turn, refused, left_over, workers=1).ok()
    assert "warning: gradients of StoreEmbedding 'store_embedding_1' from 1 backward passes were not pushed" in said
