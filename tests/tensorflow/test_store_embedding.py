"""Embeddings of Keras whose tables are on the servers: values of one process, order, files, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters
from tests.harness.jobs import for_each, in_turn, run_job
from tests.levels import mostly_long
from tests.tensorflow.test_operators import load

ROWS, WIDTH, SAMPLES, LENGTH, BATCH = 3000, 6, 64, 4, 8
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.5}),
    "adagrad": ("Adagrad", {"learning_rate": 0.3, "initial_accumulator_value": 0.2}),
}


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    x = rng.integers(0, ROWS, size=(SAMPLES, LENGTH))
    x[:, 1] = x[:, 2] = x[:, 0] % 3  # some rows come often, and twice in a sample
    return x, (x.sum(1, keepdims=True) % 5).astype(np.float32)


def optimizer(keras: Any, name: str) -> Any:
    cls, options = OPTIMIZERS[name]
    return getattr(keras.optimizers, cls)(**options)


def model(keras: Any, embedding: Any) -> Any:
    """Looks two inputs up in one layer: the halves of what it is given."""
    keras.utils.set_random_seed(0)
    given = keras.Input((LENGTH,), dtype="int64")
    found = [keras.layers.Flatten()(embedding(given[:, at : at + LENGTH // 2])) for at in (0, LENGTH // 2)]
    return keras.Model(given, keras.layers.Dense(1, use_bias=False)(keras.layers.Concatenate()(found)))


def alone(job: tw.Job, name: str, first: Any) -> Any:
    tf, _ = load()
    import keras

    embedding = keras.layers.Embedding(ROWS, WIDTH)
    trained, updates = model(keras, embedding), optimizer(keras, name)
    embedding.set_weights([first])
    x, y = data()
    for _ in range(3):
        for start in range(0, SAMPLES, 2 * BATCH):
            batch = slice(start, start + 2 * BATCH)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((trained(x[batch]) - y[batch]) ** 2)
            gradients = tape.gradient(loss, trained.trainable_variables)
            # Keras takes each time that a row is named for itself, which Adagrad tells from their sum.
            updates.apply([tf.convert_to_tensor(each) for each in gradients], trained.trainable_variables)
    return embedding.get_weights()[0]


def trained_on_servers(job: tw.Job, name: str, mode: Any, executions: int) -> tuple[Any, Any]:
    _, twt = load()
    import keras

    embedding = twt.StoreEmbedding(ROWS, WIDTH, optimizer(keras, name), mode=mode, seed=5)
    trained = model(keras, embedding)
    first = embedding(np.arange(ROWS)).numpy()
    inner = optimizer(keras, name)
    trained.compile(twt.StoreOptimizer(inner, mode=mode), "mse", steps_per_execution=executions)
    x, y = data()
    # A batch of one process is made of a batch of every worker.
    order = np.arange(SAMPLES).reshape(-1, job.num_workers, BATCH)[:, job.rank].reshape(-1)
    trained.fit(x[order], y[order], batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    assert len(trained.trainable_variables) == 1
    embedding.wait()
    job.barrier()
    return first, embedding(np.arange(ROWS)).numpy()


@pytest.mark.parametrize(("device", "servers", "executions"), [("shm", 2, 1), ("tcp", 1, 4)])
def test_in_sync_rows_have_the_values_of_one_process(device: str, servers: int, executions: int) -> None:
    cases = [(name, tw.store.Sync(), executions) for name in OPTIMIZERS]
    results = run_job(for_each, trained_on_servers, cases, device=device, servers=servers).ok()
    begun = [(name, first) for name, (first, _) in zip(OPTIMIZERS, results[0], strict=True)]
    (alone_,) = run_job(for_each, alone, begun, workers=1, servers=0).ok()
    for worker in results:
        for (name, start), (_, same), (first, values), wanted in zip(begun, results[0], worker, alone_, strict=True):
            np.testing.assert_array_equal(first, start, name)
            np.testing.assert_array_equal(values, same, name)
            # Batches in another order move one process's float32 values by up to 6e-6 from those of float64.
            np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=2e-5, err_msg=name)
            assert np.abs(first).max() <= 0.05


def test_other_modes_change_the_rows_that_were_named_and_no_other() -> None:
    named = np.unique(data()[0])
    cases = [("adagrad", mode, 1) for mode in (tw.store.Async(), tw.store.SSP(1))]
    for worker in run_job(for_each, trained_on_servers, cases).ok():
        for first, values in worker:
            changed = np.flatnonzero((first != values).any(1))
            np.testing.assert_array_equal(changed, named)


def reads(job: tw.Job) -> tuple[Any, Any]:
    tf, twt = load()
    import keras

    embedding = twt.StoreEmbedding(ROWS, WIDTH, "adam", mode=tw.store.Async(), initial="normal", scale=2.0, seed=1)
    for shape in ((), (0,), (2, 0), (3, 2, 1)):
        numbers = np.full(shape, 7, np.int32)
        assert embedding(numbers).shape == (*shape, WIDTH)
    row = embedding(np.array(7)).numpy()
    embedding(np.array([7]))  # outside of any tape, and in one that differentiates nothing
    with tf.GradientTape():
        embedding(np.array([7]))
    before = counters.snapshot()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding(np.array([[7, 7, 8]])))
    assert tape.gradient(loss, []) == []
    assert counters.since(before).pushes == 0
    embedding.step()
    embedding.wait()
    assert counters.since(before).pushes == 1
    np.testing.assert_allclose(embedding(np.array(7)).numpy(), row - 0.001, atol=1e-5)
    for dtype in ("float64", "mixed_bfloat16"):
        other = twt.StoreEmbedding(9, 2, "sgd", dtype=dtype, mode=tw.store.Async())
        assert other(np.array([1])).dtype.name == {"mixed_bfloat16": "bfloat16"}.get(dtype, dtype)
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(errors.Unsupported, match="do not scale losses"):
        twt.StoreEmbedding(9, 2, "sgd")(np.array([1]))
    keras.config.set_dtype_policy("float32")
    wrong = twt.StoreEmbedding(9, 2, "sgd")
    with pytest.raises(errors.ArgumentError, match="'embedding' has rows 0 to 8, and no row 9"):
        wrong(np.array([9]))
    with pytest.raises(tf.errors.UnknownError, match="ArgumentError: 'embedding' has rows 0 to 8, and no row 9"):
        tf.function(wrong)(np.array([9]))
    again = twt.StoreEmbedding.from_config(embedding.get_config())
    assert again.get_config() == embedding.get_config()
    return row, embedding(np.arange(10)).numpy()


def kept(job: tw.Job, folder: str, loads: bool) -> Any:
    tf, twt = load()
    import keras

    embedding = twt.StoreEmbedding(ROWS, WIDTH, keras.optimizers.Adam(0.1), seed=1)
    embedding.build((None,))
    if loads:
        embedding.load(folder)
    for step in range(3, 5) if loads else range(5):
        if step == 3 and not loads:
            embedding.wait()
            job.barrier()
            if job.rank == 0:
                embedding.save(folder)
            job.barrier()
        with tf.GradientTape() as tape:
            rows = embedding(np.arange(step, step + 1400 * (1 + step % 2), 2))
            loss = tf.reduce_sum(rows * rows * (job.rank + 1))
        tape.gradient(loss, [])
        embedding.step()
    embedding.wait()
    job.barrier()
    return embedding(np.arange(ROWS)).numpy()


@pytest.mark.parametrize(("before", "after"), mostly_long([(1, 2), (2, 1)], [(2, 1)]))
def test_rows_are_saved_and_loaded_with_what_the_optimizer_keeps(tmp_path: Path, before: int, after: int) -> None:
    folder = str(tmp_path / "rows")
    wanted, _ = run_job(kept, folder, False, servers=before).ok()
    for found in run_job(kept, folder, True, servers=after).ok():
        np.testing.assert_array_equal(found, wanted)


def refusals(job: tw.Job) -> None:
    _, twt = load()
    import keras

    def refused(why: str, optimizer: Any = "sgd", rows: Any = 9, **options: Any) -> None:
        with pytest.raises(errors.TensorwireError, match=why):
            twt.StoreEmbedding(rows, 2, optimizer, **options).build((None,))

    refused("input_dim must be a whole number of at least 1", rows=0)
    refused("scale must be a number", scale=float("nan"))
    refused("'mean' or their 'sum'", reduce="max")
    refused("initial must be one of", initial="ones")
    refused("does not treat each element by itself", keras.optimizers.SGD(0.1, clipnorm=1.0))
    refused("does not treat each element by itself", keras.optimizers.Lamb())
    refused("leave weight_decay out", keras.optimizers.AdamW())
    refused("do not support damping", mode=tw.store.Async(damping=1))
    refused("has dtype float16", dtype="float16")
    with pytest.raises(errors.ArgumentError, match="not built"):
        twt.StoreEmbedding(9, 2, "sgd").wait()


def test_any_shape_is_looked_up_only_a_gradient_is_pushed_and_what_cannot_be_is_refused() -> None:
    run_job(in_turn, reads, refusals, workers=1).ok()


def without_servers(job: tw.Job) -> None:
    _, twt = load()
    with pytest.raises(errors.ArgumentError, match="no servers"):
        twt.StoreEmbedding(9, 2, "sgd").build((None,))


def test_a_job_without_servers_has_no_tables() -> None:
    run_job(without_servers, workers=1, servers=0).ok()
