"""Trainings with Gluon: the parameters have the bits of MXNet's own store, or those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tests.harness.jobs import run_job
from tests.mxnet.own import train_on_its_own

STATIC = {"static_alloc": True, "static_shape": True}
SETTINGS = [
    ({"optimizer": "sgd", "options": {"learning_rate": 0.05, "wd": 1e-3, "momentum": 0.9}}, "shm", 1),
    ({"optimizer": "adam"}, "tcp", 2),
    ({"optimizer": "sgd", "hybridize": STATIC}, "shm", 2),
]


def train_on_ours(job: tw.Job, settings: dict[str, Any], kind: str = "dist_tensorwire_sync") -> list[Any]:
    os.environ.update(settings.get("environment", {}))
    import tensorwire.mxnet  # noqa: F401  # isort: skip  # before mxnet
    import mxnet as mx

    from tests.mxnet.training import train

    return train(mx, mx.kv.create(kind), settings)


@pytest.mark.parametrize(("settings", "device", "servers"), SETTINGS, ids=str)
def test_the_same_parameters_as_on_mxnets_own_store(
    settings: dict[str, Any], device: str, servers: int, tmp_path: Path
) -> None:
    own = train_on_its_own(tmp_path, settings)
    ours = run_job(train_on_ours, settings, servers=servers, device=device).ok()
    for rank in range(2):
        for mine, theirs in zip(ours[rank], own[rank], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_network_that_was_cast_trains_as_without_a_store() -> None:
    """MXNet's own store is no peer here: its servers compute in single precision."""
    settings = {"optimizer": "adam", "cast": "float64", "workers": 1}
    (served,), (alone,) = (
        run_job(train_on_ours, settings, kind, workers=1).ok() for kind in ("dist_tensorwire_sync", "local")
    )
    for mine, wanted in zip(served, alone, strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_array_equal(mine, wanted)


def test_gradients_that_are_pushed_while_others_are_computed_change_nothing() -> None:
    settings = {"optimizer": "adam", "environment": {"MXNET_EXEC_BULK_EXEC_TRAIN": "0"}}
    together = run_job(train_on_ours, {"optimizer": "adam"}).ok()
    for mine, wanted in zip(run_job(train_on_ours, settings).ok(), together, strict=True):
        for array, other in zip(mine, wanted, strict=True):
            np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("wide", [64, 2100])
def test_workers_that_update_have_the_parameters_of_servers_that_do(wide: int) -> None:
    """MXNet's own store gives others from run to run: its pull may overwrite a gradient that is still summed."""
    workers, servers = (
        run_job(train_on_ours, {"optimizer": "adam", "wide": wide, "update_on_kvstore": on}).ok()
        for on in (False, True)
    )
    for rank in range(2):
        for mine, theirs in zip(workers[rank], servers[rank], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("hybridize", [{}, STATIC], ids=str)
def test_evaluations_between_steps_change_nothing(hybridize: dict[str, bool]) -> None:
    """oneDNN rewrites the weights of a convolution in place, in a layout of its own."""
    settings = {"convolutions": True, "shape": [3, 8, 8], "hybridize": hybridize, "workers": 1}
    (without,) = run_job(train_on_ours, settings, workers=1).ok()
    (evaluated,) = run_job(train_on_ours, {**settings, "evaluate": True}, workers=1).ok()
    trained = [n for n, array in enumerate(without) if not np.array_equal(array, without[n] * 0)]
    for number in trained[:4]:
        np.testing.assert_array_equal(evaluated[number], without[number])
