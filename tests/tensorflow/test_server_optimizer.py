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
from tests.harness.jobs import for_each, run_job
from tests.tensorflow.test_operators import load
from tests.tensorflow.test_store_optimizer import BATCH, Spec, alone, fit, together

OPTIMIZERS: dict[str, Spec] = {
    "sgd": ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam with a schedule": ("Adam", {"learning_rate": (0.02, 2, 0.5), "amsgrad": True, "loss_scale_factor": 4.0}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1, "clipvalue": 0.5}),
    "nadam": ("Nadam", {"learning_rate": 0.01}),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}),
    "rmsprop with clipnorm": ("RMSprop", {"learning_rate": 0.01, "clipnorm": 0.5, "momentum": 0.5}),
    "adafactor": ("Adafactor", {"learning_rate": 0.05}),
}


@pytest.mark.parametrize(("device", "servers", "traced"), [("shm", 2, True), ("tcp", 1, False)])
def test_in_sync_all_workers_have_the_values_of_one_process(device: str, servers: int, traced: bool) -> None:
    (wanted,) = run_job(for_each, alone, [(spec, 2, True) for spec in OPTIMIZERS.values()], workers=1, servers=0).ok()
    cases = [(spec, traced, tw.store.Sync(), True) for spec in OPTIMIZERS.values()]
    results = run_job(for_each, together, cases, device=device, servers=servers).ok()
    for name, (first, _), (second, _), (values, _) in zip(OPTIMIZERS, *results, wanted, strict=True):
        for mine, same, other in zip(first, second, values, strict=True):
            np.testing.assert_array_equal(mine, same, name)
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_worker_has_the_values_of_one_process_in_other_modes() -> None:
    """On the servers, or in the worker."""
    modes = tw.store.Async(), tw.store.SSP(1), tw.store.LocalSGD(2)
    ((wanted, _),) = run_job(alone, OPTIMIZERS["adamw"], 1, True, workers=1, servers=0).ok()
    cases = [(OPTIMIZERS["adamw"], True, mode, where) for mode in modes for where in (False, True)][:-1]
    (found,) = run_job(for_each, together, cases, workers=1, servers=2).ok()
    for values, _ in found:
        for mine, other in zip(values, wanted, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


# ---- files


def saved(job: tw.Job, folder: str) -> None:
    _, twt = load()
    import keras

    found = fit(job, tw.store.Sync(), 2, executions=2, on_servers=True, bucket_bytes=4096)
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
