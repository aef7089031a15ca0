"""Trainings with Gluon: the parameters have the bits of MXNet's own store, or those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tests.harness.jobs import for_each, run_job
from tests.levels import long
from tests.mxnet.own import train_on_its_own

STATIC = {"static_alloc": True, "static_shape": True}
SETTINGS = [
    ({"optimizer": "sgd", "options": {"learning_rate": 0.05, "wd": 1e-3, "momentum": 0.9}}, "shm", 1),
    ({"optimizer": "adam"}, "tcp", 2),
    long(({"optimizer": "sgd", "hybridize": STATIC}, "shm", 2)),
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
    kinds = "dist_tensorwire_sync", "local"
    ((served, alone),) = run_job(for_each, train_on_ours, [(settings, kind) for kind in kinds], workers=1).ok()
    for mine, wanted in zip(served, alone, strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_array_equal(mine, wanted)


def test_gradients_that_are_pushed_while_others_are_computed_change_nothing() -> None:
    settings = {"optimizer": "adam", "environment": {"MXNET_EXEC_BULK_EXEC_TRAIN": "0"}}
    together = run_job(train_on_ours, {"optimizer": "adam"}).ok()
    for mine, wanted in zip(run_job(train_on_ours, settings).ok(), together, strict=True):
        for array, other in zip(mine, wanted, strict=True):
            np.testing.assert_array_equal(array, other)


def test_workers_that_update_have_the_parameters_of_servers_that_do() -> None:
    """MXNet's own store gives others from run to run: its pull may overwrite a gradient that is still summed."""
    cases = [
        ({"optimizer": "adam", "wide": wide, "update_on_kvstore": on},) for wide in (64, 2100) for on in (False, True)
    ]
    for narrow, narrow_served, wide, wide_served in run_job(for_each, train_on_ours, cases).ok():
        for mine, theirs in zip(narrow + wide, narrow_served + wide_served, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_evaluations_between_steps_change_nothing() -> None:
    """oneDNN rewrites the weights of a convolution in place, in a layout of its own."""
    settings = {"convolutions": True, "shape": [3, 8, 8], "workers": 1}
    cases = [({**settings, "hybridize": how, "evaluate": also},) for how in ({}, STATIC) for also in (False, True)]
    ((plain, evaluated, static, static_evaluated),) = run_job(for_each, train_on_ours, cases, workers=1).ok()
    for without, others in ((plain, evaluated), (static, static_evaluated)):
        trained = [n for n, array in enumerate(without) if not np.array_equal(array, without[n] * 0)]
        for number in trained[:4]:
            np.testing.assert_array_equal(others[number], without[number])
