"""Keras models that several workers train through the store: bits of one process, modes, callbacks, and refusals."""

from __future__ import annotations

import gc
import os
import signal
import threading
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.errors import ArgumentError
from tensorwire.observe import counters, pickles_counted
from tests.harness.jobs import for_each, run_job
from tests.levels import long, mostly_long
from tests.tensorflow.test_operators import load

SAMPLES, FEATURES, BATCH = 96, 12, 8
STEPS = 6
Spec = tuple[str, dict[str, Any]]  # an optimizer of Keras, and its options
OPTIMIZERS: dict[str, Spec] = {
    "sgd": ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam with clipnorm": ("Adam", {"learning_rate": 0.01, "clipnorm": 0.5}),
    "adamw with a global norm": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1, "global_clipnorm": 0.7}),
    "rmsprop with averages": ("RMSprop", {"learning_rate": 0.01, "use_ema": True, "ema_overwrite_frequency": 3}),
    "accumulation": ("Adam", {"learning_rate": 0.01, "gradient_accumulation_steps": 2}),
}


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return x, (x @ rng.normal(size=(FEATURES, 1)) + 0.3).astype(np.float32)


def share(job: tw.Job) -> tuple[Any, Any]:
    x, y = data()
    return x[job.rank :: job.num_workers], y[job.rank :: job.num_workers]


def model(keras: Any, seed: int, width: int = 40) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, activation="relu"), keras.layers.Dense(1)]
    made = keras.Sequential([keras.Input((FEATURES,)), *layers])
    made(np.zeros((1, FEATURES), np.float32))
    return made


def made(keras: Any, spec: Spec) -> Any:
    cls, options = spec
    rate = options["learning_rate"]
    if isinstance(rate, tuple):
        rate = keras.optimizers.schedules.ExponentialDecay(*rate)
    return getattr(keras.optimizers, cls)(**{**options, "learning_rate": rate})


def half_batches(keras: Any, tf: Any, trained: Any, batch: int) -> list[Any]:
    """The gradients of two workers, of one batch each."""
    x, y = data()
    found = []
    for rank in range(2):
        mine = slice(batch * BATCH, (batch + 1) * BATCH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((trained(x[rank::2][mine], training=True) - y[rank::2][mine]) ** 2)
        found.append(tape.gradient(loss, trained.trainable_variables))
    return found


def take_steps(optimizer: Any, variables: Any, traced: bool, gradients: Any) -> None:
    """Applies ``gradients(batch)`` for each of some batches."""
    import tensorflow as tf

    def step(found: Any) -> None:
        optimizer.apply(found, variables)

    called = tf.function(step) if traced else step
    for batch in range(STEPS):
        called(gradients(batch))


def alone(job: tw.Job, spec: Spec, workers: int, traced: bool) -> tuple[list[Any], list[Any]]:
    """The variables of the model, and those of its optimizer, in one process with the gradients of so many workers."""
    tf, _ = load()
    import keras

    trained, optimizer = model(keras, 0), made(keras, spec)
    optimizer.build(trained.trainable_variables)

    def mean(batch: int) -> list[Any]:
        drawn = half_batches(keras, tf, trained, batch)[:workers]
        return [tf.add_n(each) / workers for each in zip(*drawn, strict=True)]

    take_steps(optimizer, trained.trainable_variables, traced, mean)
    return [v.numpy() for v in trained.trainable_variables], [v.numpy() for v in optimizer.variables]


def together(
    job: tw.Job, spec: Spec, traced: bool, mode: tw.store.modes.Mode, on_servers: bool
) -> tuple[list[Any], list[Any]]:
    tf, twt = load()
    import keras

    trained, inner = model(keras, job.rank), made(keras, spec)
    optimizer = twt.StoreOptimizer(inner, mode=mode, on_servers=on_servers, bucket_bytes=4096)
    optimizer.build(trained.trainable_variables)
    take_steps(
        optimizer, trained.trainable_variables, traced, lambda batch: half_batches(keras, tf, trained, batch)[job.rank]
    )
    if on_servers:
        assert int(optimizer.iterations) == STEPS
        assert not any(v.shape.rank for v in inner.variables)  # the optimizer's state is not here
    return [v.numpy() for v in trained.trainable_variables], [v.numpy() for v in inner.variables]


@pytest.mark.parametrize(("device", "servers", "traced"), [("shm", 2, True), ("tcp", 1, False)])
def test_in_sync_all_workers_have_the_bits_of_one_process(device: str, servers: int, traced: bool) -> None:
    (wanted,) = run_job(for_each, alone, [(spec, 2, traced) for spec in OPTIMIZERS.values()], workers=1, servers=0).ok()
    cases = [(spec, traced, tw.store.Sync(), False) for spec in OPTIMIZERS.values()]
    for worker in run_job(for_each, together, cases, device=device, servers=servers).ok():
        for name, found, values in zip(OPTIMIZERS, worker, wanted, strict=True):
            for mine, other in zip(found[0] + found[1], values[0] + values[1], strict=True):
                np.testing.assert_array_equal(mine, other, name)


def fit(job: tw.Job, mode: Any, epochs: int, executions: int = 1, **options: Any) -> dict[str, Any]:
    _, twt = load()
    import keras

    trained = model(keras, job.rank)
    optimizer = twt.StoreOptimizer(keras.optimizers.SGD(0.02, momentum=0.5), mode=mode, **options)
    trained.compile(optimizer, "mse", steps_per_execution=executions)
    x, y = share(job)
    history = trained.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return {"loss": history.history["loss"], "values": trained.get_weights(), "model": trained, "x": x, "y": y}


def fitted(job: tw.Job, mode: Any, epochs: int, options: dict[str, Any]) -> tuple[list[float], list[Any]]:
    found = fit(job, mode, epochs, **options)
    return found["loss"], found["values"]


def fit_whole(job: tw.Job, epochs: int) -> tuple[list[float], list[Any]]:
    """One process, whose batches are those of two workers."""
    load()
    import keras

    trained = model(keras, 0)
    trained.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse")
    x, y = data()
    history = trained.fit(x, y, batch_size=2 * BATCH, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"], trained.get_weights()


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_fit_on_two_workers_is_fit_in_one_process_within_a_millionth(device: str) -> None:
    ((losses, wanted),) = run_job(fit_whole, 4, workers=1, servers=0).ok()
    first, second = run_job(fitted, tw.store.Sync(), 4, {}, device=device).ok()
    np.testing.assert_allclose(np.mean([first[0], second[0]], axis=0), losses, rtol=1e-5)
    for mine, same, other in zip(first[1], second[1], wanted, strict=True):
        np.testing.assert_array_equal(mine, same)
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


MODES = {
    "Async": (tw.store.Async(), {}),
    "Async, int8": (tw.store.Async(max_staleness=50), {"compression": "int8"}),
    "SSP": (tw.store.SSP(1), {}),
    "EASGD": (tw.store.EASGD(every=3, delay=1), {}),
    "DiLoCo": (tw.store.DiLoCo(every=3, outer=tw.store.SGD(lr=0.7, momentum=0.5)), {}),
    "LocalSGD": (tw.store.LocalSGD(every=4), {"compression": "fp16"}),
    "Sync, bf16": (tw.store.Sync(), {"compression": "bf16"}),
    "servers, Sync, bf16": (tw.store.Sync(), {"compression": "bf16", "on_servers": True, "executions": 2}),
    "servers, Async": (tw.store.Async(), {"on_servers": True}),
    "servers, SSP, int8": (tw.store.SSP(1), {"compression": "int8", "on_servers": True}),
}


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["tcp"]))
def test_every_mode_learns(device: str) -> None:
    cases = [(mode, 6, {"bucket_bytes": 4096, **options}) for mode, options in MODES.values()]
    for (mode, *_), *found in zip(cases, *run_job(for_each, fitted, cases, device=device, servers=2).ok(), strict=True):
        for losses, _ in found:
            assert losses[-1] < 0.2 * losses[0], (mode, losses)
        if isinstance(mode, (tw.store.Sync, tw.store.LocalSGD)):  # 36 steps: the last one ends with an exchange
            for mine, same in zip(found[0][1], found[1][1], strict=True):
                np.testing.assert_array_equal(mine, same)


def steady(job: tw.Job, on_servers: bool) -> tuple[Any, int, int]:
    found = fit(job, tw.store.Sync(), 1, on_servers=on_servers, bucket_bytes=4096, executions=1 + on_servers)
    before, bytes_of = counters.snapshot(), sum(v.nbytes for v in found["values"])
    with pickles_counted() as counted:
        found["model"].fit(found["x"], found["y"], batch_size=BATCH, shuffle=False, verbose=0)
        return counters.since(before), bytes_of, counted.pickles


@pytest.mark.parametrize("on_servers", [False, True])
def test_a_step_copies_each_gradient_twice_or_it_and_the_value_once_and_costs_nothing_else(on_servers: bool) -> None:
    for spent, nbytes, pickles in run_job(steady, on_servers, device="shm").ok():
        steps = SAMPLES // 2 // BATCH
        nbytes += 4 * 8 // (1 + on_servers)  # of which variables there are gradients; servers are not asked
        assert spent.copied_bytes == 2 * steps * nbytes  # into the slot, and out of the window
        assert (spent.rpcs, spent.registrations, pickles) == (0, 0, 0)
        assert on_servers or spent.pushes == steps


# ---- gradients that some workers lack


def heads(job: tw.Job, traced: bool, on_servers: bool) -> list[list[Any]]:
    """Two heads, one of which a worker trains in a step, and one that none does; and the same in one process."""
    tf, twt = load()
    import keras

    def made() -> tuple[list[Any], Any]:
        variables = [tf.Variable(np.eye(3, dtype="f4")), *(tf.Variable(np.ones((3, 1), "f4") * n) for n in (1, 2, 3))]
        return variables, keras.optimizers.SGD(0.1, momentum=0.9)

    def gradients(variables: Any, step: int, rank: int) -> list[Any]:
        x = np.random.RandomState(step * 10 + rank).randn(5, 3).astype("f4")
        chosen = (step + rank) % 2 if step % 3 else 0  # every third step, both train the same
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variables[0] @ variables[1 + chosen] - 1) ** 2)
        return list(tape.gradient(loss, variables))

    def mean(found: Any) -> Any:
        there = [each for each in found if each is not None]
        return sum(there) / np.float32(2) if there else None

    variables, inner = made()
    optimizer = twt.StoreOptimizer(inner, on_servers=on_servers)
    optimizer.build(variables)
    wanted, alone = made()
    alone.build(wanted)
    for step in range(5):

        def own(step: int = step) -> None:
            optimizer.apply(gradients(variables, step, job.rank), variables)

        (tf.function(own) if traced else own)()
        means = [mean(each) for each in zip(*(gradients(wanted, step, rank) for rank in range(2)), strict=True)]
        there = [n for n, each in enumerate(means) if each is not None]
        alone.apply([means[n] for n in there], [wanted[n] for n in there])
    return [[v.numpy() for v in each] for each in (variables, wanted)]


def test_a_gradient_that_one_worker_lacks_counts_as_zero() -> None:
    for worker in run_job(for_each, heads, [(False, False), (True, False), (True, True)]).ok():
        for found, wanted in worker:
            for mine, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(mine, other, rtol=1e-5)
            np.testing.assert_array_equal(found[3], wanted[3])


# ---- mixed precision


def overflows(job: tw.Job) -> list[Any]:
    """Worker 1's gradients are infinite in the second of three steps."""
    _, twt = load()
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    trained = model(keras, job.rank)
    trained.compile(twt.StoreOptimizer(keras.optimizers.SGD(0.02)), "mse")
    assert trained.optimizer.inner_optimizer.initial_scale == 2.0**15
    x, y = share(job)
    seen = []
    for step in range(3):
        wrong = np.float32(np.inf if step == 1 and job.rank == 1 else 1e-3)
        trained.train_on_batch(x[:BATCH] * np.float32(1e-2), y[:BATCH] * wrong)
        scale = float(trained.optimizer.inner_optimizer.dynamic_scale.numpy())
        seen.append((trained.get_weights(), scale, int(trained.optimizer.iterations.numpy())))
    return seen


def test_where_one_worker_overflows_all_leave_the_step_out() -> None:
    first, second = run_job(overflows).ok()
    for (values, scale, steps), (others, same, theirs) in zip(first, second, strict=True):
        assert (scale, steps) == (same, theirs)
        for value, other in zip(values, others, strict=True):
            np.testing.assert_array_equal(value, other)
    assert [scale for _, scale, _ in first] == [2.0**15, 2.0**14, 2.0**14]
    assert [steps for _, _, steps in first] == [1, 1, 2]
    np.testing.assert_array_equal(first[0][0][0], first[1][0][0])


# ---- callbacks


def decides(job: tw.Job) -> tuple[int, list[float], list[float]]:
    _, twt = load()
    import keras

    trained = model(keras, 0)
    trained.compile(twt.StoreOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x, y = share(job)
    callbacks = [
        twt.AverageMetrics(),
        keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
        keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.05),
    ]
    history = trained.fit(x, y, batch_size=BATCH, epochs=60, callbacks=callbacks, shuffle=False, verbose=0).history
    return len(history["loss"]), history["loss"], history["learning_rate"]


def test_callbacks_decide_alike_on_all_workers() -> None:
    first, second = run_job(decides).ok()
    assert first == second
    assert first[0] < 60
    assert first[2][-1] < 0.5 * first[2][0]


def backed_up(job: tw.Job, folder: str, dies: int, on_servers: bool) -> tuple[int, list[Any]]:
    """Five epochs; worker ``dies`` is killed in the middle of the fourth, unless it is -1."""
    _, twt = load()
    import keras

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations.numpy()) == 20 and job.rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)

    trained = model(keras, job.rank)
    trained.compile(twt.StoreOptimizer(keras.optimizers.Adam(0.01), on_servers=on_servers), "mse")
    x, y = share(job)
    callbacks = [twt.BackupAndRestore(folder), Dies()]
    history = trained.fit(x, y, batch_size=BATCH, epochs=5, shuffle=False, verbose=0, callbacks=callbacks)
    assert job.rank or not Path(folder).exists()
    return len(history.history["loss"]), trained.get_weights()


@pytest.mark.parametrize(
    ("on_servers", "dies"), mostly_long([*product((False, True), (0, 1))], [(False, 0), (True, 1)])
)
def test_a_training_that_was_killed_goes_on_from_its_backup_with_the_same_bits(
    tmp_path: Path, on_servers: bool, dies: int
) -> None:
    whole = run_job(backed_up, str(tmp_path / "whole"), -1, on_servers).ok()
    folder = str(tmp_path / "backup")
    killed = run_job(backed_up, folder, dies, on_servers)
    assert killed.cause is not None
    assert f"worker {dies}" in str(killed.cause)
    again = run_job(backed_up, folder, -1, on_servers, servers=1 + on_servers).ok()  # maybe another number of servers
    assert [epochs for epochs, _ in again] == [2, 2]
    for value, other in zip(again[0][1] + again[1][1], whole[0][1] + whole[1][1], strict=True):
        np.testing.assert_array_equal(value, other)


def saved(job: tw.Job, folder: str) -> list[Any]:
    """A model that is saved, loaded, and trained on."""
    _, twt = load()
    import keras

    found = fit(job, tw.store.SSP(2), 1, compression="fp16")
    path = f"{folder}/{job.rank}.keras"
    found["model"].save(path)
    loaded = keras.models.load_model(path)
    optimizer = loaded.optimizer
    assert isinstance(optimizer, twt.StoreOptimizer)
    assert optimizer.get_config() == {**found["model"].optimizer.get_config(), "name": optimizer.name}
    for mine, other in zip(loaded.get_weights(), found["values"], strict=True):
        np.testing.assert_array_equal(mine, other)
    loaded.fit(found["x"], found["y"], batch_size=BATCH, shuffle=False, verbose=0)
    return [v.numpy() for v in loaded.trainable_variables]


def test_a_model_is_saved_and_loaded_with_its_optimizer(tmp_path: Path) -> None:
    run_job(saved, str(tmp_path)).ok()


# ---- what goes wrong


def one_changes(job: tw.Job, mode: Any, on_servers: bool, writes: bool) -> list[Any]:
    found = fit(job, mode, 1, on_servers=on_servers)
    if job.rank == 1:
        found["model"].trainable_variables[0].assign_add(np.ones((FEATURES, 40), np.float32))
    if writes:
        found["model"].optimizer.write_parameters()
    found["model"].fit(found["x"], found["y"], batch_size=BATCH, shuffle=False, verbose=0)
    return list(found["model"].get_weights())


@pytest.mark.parametrize(
    ("mode", "on_servers"), [(tw.store.Sync(), False), (tw.store.Sync(), True), long((tw.store.Async(), False))]
)
def test_parameters_that_changed_on_one_worker_are_found(mode: Any, on_servers: bool) -> None:
    cause = run_job(one_changes, mode, on_servers, False).cause
    assert cause is not None
    assert "write_parameters() on " in str(cause)
    first, second = run_job(one_changes, mode, on_servers, True).ok()
    if isinstance(mode, tw.store.Sync):
        for mine, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(mine, other)


def stops_early(job: tw.Job, uneven: bool) -> None:
    def steps() -> None:
        found = fit(job, tw.store.Sync(), 1)
        if job.rank == 0:
            found["model"].fit(found["x"], found["y"], batch_size=BATCH, shuffle=False, verbose=0)

    if uneven:
        with job.uneven():
            steps()
    else:
        steps()


@pytest.mark.parametrize(("uneven", "why"), [(False, "worker 1 finished after step 6"), (True, "not for a Keras")])
def test_in_sync_all_workers_take_as_many_steps(uneven: bool, why: str) -> None:
    ended = run_job(stops_early, uneven)
    assert ended.cause is not None
    assert why in str(ended.cause)


def refusals(job: tw.Job) -> None:
    tf, twt = load()
    import keras

    store, sgd = twt.StoreOptimizer, keras.optimizers.SGD(0.1)
    with pytest.raises(errors.ArgumentError, match="not a StoreOptimizer"):
        store(store(sgd))
    with pytest.raises(errors.ArgumentError, match=r"mode must be one of tw\.store"):
        store(sgd, mode="async")
    with pytest.raises(errors.ArgumentError, match="'mean' or their 'sum'"):
        store(sgd, reduce="max")
    with pytest.raises(errors.Unsupported, match="damping=0"):
        store(sgd, mode=tw.store.Async(damping=1)).build([tf.Variable([1.0])])
    with pytest.raises(errors.Unsupported, match="floating-point"):
        store(keras.optimizers.SGD(0.1)).build([tf.Variable([1])])
    with pytest.raises(errors.ArgumentError, match="no servers"):
        store(keras.optimizers.SGD(0.1)).build([tf.Variable([1.0])])
    with pytest.raises(errors.ArgumentError, match=r"count\(\) is for"):
        store(sgd).count(3)


def test_what_cannot_be_is_refused() -> None:
    run_job(refusals, workers=1, servers=0).ok()


# ---- the end of an optimizer


def sweeps(job: tw.Job, mode: Any) -> list[Any]:
    """Trains models one after the other; returns descriptors, threads and what came of the calls after the last."""
    _, twt = load()
    import keras

    x, y = share(job)
    held = []
    for _ in range(4):
        trained = model(keras, 0)
        trained.compile(twt.StoreOptimizer(keras.optimizers.SGD(0.01), mode=mode), "mse")
        trained.train_on_batch(x[:BATCH], y[:BATCH])
        before = trained.get_weights()
        trained.optimizer.close()
        trained.optimizer.close()
        for mine, kept in zip(trained.get_weights(), before, strict=True):
            np.testing.assert_array_equal(mine, kept)
        job.barrier()
        threads = [each.name for each in threading.enumerate() if each.name.startswith("tensorwire store")]
        gc.collect()
        held.append((len(list(Path("/proc/self/fd").iterdir())), len(threads)))
    with pytest.raises(Exception, match="this optimizer was closed"):
        trained.train_on_batch(x[:BATCH], y[:BATCH])
    with pytest.raises(ArgumentError, match="this optimizer was closed"):
        trained.optimizer.write_parameters()
    return held


def test_closed_optimizers_hold_nothing() -> None:
    for worker in run_job(for_each, sweeps, [(tw.store.Sync(),), (tw.store.Async(),)]).ok():
        for held in worker:
            assert held[1] == held[2] == held[3]
            assert {threads for _, threads in held} == {0}
