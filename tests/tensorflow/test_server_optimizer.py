"""Keras optimizers that run on the servers: values of one process, what is kept where, files, and refusals."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters, pickles_counted
from tests.harness.jobs import for_each, run_job
from tests.levels import mostly_long
from tests.tensorflow.test_operators import load
from tests.tensorflow.test_store_optimizer import BATCH, SAMPLES, backed_up, half_batches, model, share

OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam with a schedule": ("Adam", {"learning_rate": (0.02, 2, 0.5), "amsgrad": True, "loss_scale_factor": 4.0}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1, "clipvalue": 0.5}),
    "nadam": ("Nadam", {"learning_rate": 0.01}),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}),
    "rmsprop with clipnorm": ("RMSprop", {"learning_rate": 0.01, "clipnorm": 0.5, "momentum": 0.5}),
    "adafactor": ("Adafactor", {"learning_rate": 0.05}),
}


def made(keras: Any, name: str) -> Any:
    cls, given = OPTIMIZERS[name]
    options: dict[str, Any] = dict(given)  # type: ignore[call-overload]
    if isinstance(options["learning_rate"], tuple):
        options["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(*options["learning_rate"])
    return getattr(keras.optimizers, cls)(**options)


def alone(job: tw.Job, name: str, steps: int, workers: int) -> list[Any]:
    tf, _ = load()
    import keras

    trained, optimizer = model(keras, 0), made(keras, name)
    optimizer.build(trained.trainable_variables)
    step = tf.function(lambda gradients: optimizer.apply(gradients, trained.trainable_variables))
    for batch in range(steps):
        drawn = half_batches(keras, tf, trained, batch)[:workers]
        step([tf.add_n(each) / workers for each in zip(*drawn, strict=True)])
    return [v.numpy() for v in trained.trainable_variables]


def on_servers(job: tw.Job, name: str, steps: int, mode: Any, traced: bool) -> list[Any]:
    tf, twt = load()
    import keras

    trained = model(keras, job.rank)
    inner = made(keras, name)
    optimizer = twt.StoreOptimizer(inner, mode=mode, on_servers=True, bucket_bytes=4096)
    optimizer.build(trained.trainable_variables)

    def step(gradients: Any) -> None:
        optimizer.apply(gradients, trained.trainable_variables)

    step = tf.function(step) if traced else step
    for batch in range(steps):
        step(half_batches(keras, tf, trained, batch)[job.rank])
    assert int(optimizer.iterations) == steps
    assert not any(v.shape.rank for v in inner.variables)  # the optimizer's state is not here
    return [v.numpy() for v in trained.trainable_variables]


@pytest.mark.parametrize(("device", "servers", "traced"), [("shm", 2, True), ("tcp", 1, False)])
def test_in_sync_all_workers_have_the_values_of_one_process(device: str, servers: int, traced: bool) -> None:
    (wanted,) = run_job(for_each, alone, [(name, 6, 2) for name in OPTIMIZERS], workers=1, servers=0).ok()
    cases = [(name, 6, tw.store.Sync(), traced) for name in OPTIMIZERS]
    results = run_job(for_each, on_servers, cases, device=device, servers=servers).ok()
    for name, first, second, values in zip(OPTIMIZERS, *results, wanted, strict=True):
        for mine, same, other in zip(first, second, values, strict=True):
            np.testing.assert_array_equal(mine, same, name)
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_worker_has_the_values_of_one_process_in_other_modes() -> None:
    (wanted,) = run_job(alone, "adamw", 6, 1, workers=1, servers=0).ok()
    cases = [("adamw", 6, mode, True) for mode in (tw.store.Async(), tw.store.SSP(1))]
    (found,) = run_job(for_each, on_servers, cases, workers=1, servers=2).ok()
    for values in found:
        for mine, other in zip(values, wanted, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def fit(job: tw.Job, mode: Any, epochs: int, compression: str | None = None) -> dict[str, Any]:
    _, twt = load()
    import keras

    trained = model(keras, job.rank)
    inner = keras.optimizers.Adam(0.01)
    optimizer = twt.StoreOptimizer(inner, mode=mode, on_servers=True, bucket_bytes=4096, compression=compression)
    trained.compile(optimizer, "mse", steps_per_execution=2)
    x, y = share(job)
    history = trained.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return {"loss": history.history["loss"], "values": trained.get_weights(), "model": trained, "x": x, "y": y}


def fitted(job: tw.Job, mode: Any, compression: str | None) -> tuple[list[float], list[Any]]:
    found = fit(job, mode, 8, compression)
    return found["loss"], found["values"]


def test_every_mode_learns() -> None:
    cases = [(tw.store.Sync(), "bf16"), (tw.store.Async(), None), (tw.store.SSP(1), "int8")]
    for worker in run_job(for_each, fitted, cases, servers=2).ok():
        for case, (losses, _) in zip(cases, worker, strict=True):
            assert losses[-1] < 0.2 * losses[0], (case, losses)


def steady(job: tw.Job) -> tuple[Any, int, int]:
    found = fit(job, tw.store.Sync(), 1)
    before, bytes_of = counters.snapshot(), sum(v.nbytes for v in found["values"])
    with pickles_counted() as counted:
        found["model"].fit(found["x"], found["y"], batch_size=BATCH, shuffle=False, verbose=0)
        return counters.since(before), bytes_of, counted.pickles


def test_a_step_copies_each_gradient_and_each_value_once_and_does_nothing_else_that_costs() -> None:
    for spent, nbytes, pickles in run_job(steady, device="shm").ok():
        nbytes += 4 * 8 // 2  # of which variables there are gradients: nobody asks
        assert spent.copied_bytes == 2 * (SAMPLES // 2 // BATCH) * nbytes
        assert (spent.rpcs, spent.registrations, pickles) == (0, 0, 0)


# ---- files


@pytest.mark.parametrize("dies", mostly_long([0, 1], [1]))
def test_a_training_that_was_killed_goes_on_with_what_the_servers_kept(tmp_path: Path, dies: int) -> None:
    whole = run_job(backed_up, str(tmp_path / "whole"), -1, True).ok()
    folder = str(tmp_path / "backup")
    killed = run_job(backed_up, folder, dies, True)
    assert killed.cause is not None
    assert f"worker {dies}" in str(killed.cause)
    again = run_job(backed_up, folder, -1, True, servers=2).ok()  # another number of servers
    assert [epochs for epochs, _ in again] == [2, 2]
    for value, other in zip(again[0][1] + again[1][1], whole[0][1] + whole[1][1], strict=True):
        np.testing.assert_array_equal(value, other)


def saved(job: tw.Job, folder: str) -> None:
    _, twt = load()
    import keras

    found = fit(job, tw.store.Sync(), 2)
    path = f"{folder}/{job.rank}.keras"
    found["model"].save(path)
    loaded = keras.models.load_model(path)
    assert isinstance(loaded.optimizer, twt.StoreOptimizer)
    assert loaded.optimizer.get_config()["on_servers"] is True
    for each in (found["model"], loaded):
        each.fit(found["x"], found["y"], batch_size=BATCH, shuffle=False, verbose=0)
    for mine, other in zip(loaded.get_weights(), found["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_model_that_is_loaded_trains_on_as_the_one_that_was_saved(tmp_path: Path) -> None:
    run_job(saved, str(tmp_path), servers=2).ok()


# ---- what goes wrong


def refusals(job: tw.Job) -> None:
    tf, twt = load()
    import keras

    def refused(optimizer: Any, why: str, mode: Any = tw.store.Sync(), dtype: str = "float32") -> None:  # noqa: B008
        with pytest.raises(errors.TensorwireError, match=why):
            twt.StoreOptimizer(optimizer, mode=mode, on_servers=True).build([tf.Variable([1.0], dtype=dtype)])

    optimizers = keras.optimizers
    refused(optimizers.SGD(0.1, global_clipnorm=1.0), "SGD with global_clipnorm looks at more than one variable")
    refused(optimizers.SGD(0.1, use_ema=True), "leave use_ema out")
    refused(optimizers.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps")
    refused(optimizers.Muon(), "servers do not run Muon; they run Adadelta,")
    refused(optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), "do not scale losses")
    refused(optimizers.SGD(0.1), "runs the optimizer in the workers", tw.store.LocalSGD())
    refused(optimizers.SGD(0.1), "damping=0", tw.store.Async(damping=1))
    refused(optimizers.SGD(0.1), "no optimizer of Keras on bfloat16", dtype="bfloat16")
    decays = optimizers.AdamW(0.1)
    decays.exclude_from_weight_decay(var_names=["bias"])
    refused(decays, "exclude_from_weight_decay")


def test_what_servers_cannot_run_is_refused() -> None:
    run_job(refusals, workers=1).ok()


OWN = """
import keras
class Doubled(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)
@keras.saving.register_keras_serializable("own")
class Registered(Doubled):
    pass
"""


def own(job: tw.Job, folder: str, name: str) -> Any:
    tf, twt = load()
    sys.path.insert(0, folder)
    variable = tf.Variable([1.0, 2.0])
    cls = getattr(importlib.import_module("own_optimizers"), name)
    optimizer = twt.StoreOptimizer(cls(0.5), on_servers=True)
    optimizer.build([variable])
    optimizer.apply([tf.constant([1.0, -1.0])], [variable])
    return variable.numpy().tolist()


def test_servers_run_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_optimizers.py").write_text(OWN)
    cases = [(str(tmp_path), name) for name in ("Doubled", "Registered")]
    assert run_job(for_each, own, cases, workers=1).ok() == [[[0.0, 3.0]] * 2]


def unknown(job: tw.Job) -> None:
    from tensorwire.store import KeyValue
    from tensorwire.tensorflow.keras_rules import RULE

    text = '{"module": "keras.layers", "class_name": "Dense", "config": {"units": 1}, "registered_name": null}'
    kv = KeyValue(rule=RULE, optimizer=text, learning_rate=0.1)
    kv.init("a", np.zeros(2, "f4"))
    kv.push("a", np.zeros(2, "f4")).wait()


def test_a_server_takes_nothing_but_an_optimizer() -> None:
    cause = run_job(unknown, workers=1).cause
    assert cause is not None
    assert "takes an optimizer of Keras, not a Dense" in str(cause)
