"""What a Keras model has besides its trained variables begins as worker 0's."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorwire as tw
from tests.harness.jobs import for_each, run_job
from tests.tensorflow.test_operators import load


def started(job: tw.Job, how: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Weights before and after the first step, whose learning rate is 0; and the state of a seed."""
    _, twt = load()
    import keras

    keras.utils.set_random_seed(job.rank)
    frozen = keras.layers.Dense(4, name="frozen", trainable=False)
    norm = keras.layers.BatchNormalization(name="norm", momentum=1.0)
    last = keras.layers.Dense(1, name="last")
    dropout = keras.layers.Dropout(0.5, seed=job.rank)
    model = keras.Sequential([keras.Input((3,)), frozen, norm, dropout, last])
    norm.moving_mean.assign(np.full(4, job.rank + 1.0))
    before = {v.path: v.numpy() for v in model.weights}
    optimizer = twt.StoreOptimizer(keras.optimizers.SGD(0.0), on_servers=how == "servers")
    x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
    if how == "apply":
        optimizer.build(model.trainable_variables)
    else:
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=4, verbose=0)
    return before, {v.path: v.numpy() for v in model.weights}, dropout.seed_generator.state.numpy()


def test_weights_that_are_not_trained_begin_as_worker_0s() -> None:
    for (wanted, first, seed), (other, second, own) in zip(
        *run_job(for_each, started, [("fit",), ("servers",), ("apply",)]).ok(), strict=True
    ):
        assert len(wanted) == 8
        differ = [name for name in wanted if not np.array_equal(wanted[name], other[name])]
        assert {name.rpartition("/")[2] for name in differ} == {"kernel", "moving_mean"}
        for name in wanted:
            np.testing.assert_array_equal(first[name], wanted[name])
            np.testing.assert_array_equal(second[name], wanted[name])
        assert not np.array_equal(seed, own)
