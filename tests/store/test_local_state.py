"""Saving and loading where workers train by themselves: also what the servers have, such as the outer momentum."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import EASGD, SGD, DiLoCo, LocalSGD
from tensorwire.store.modes import Local
from tests.harness.jobs import run_job
from tests.store.test_local_modes import first_values, gradients, named, tokens

SAVED, STEPS = 4, 9
MODES = [
    (LocalSGD(every=2), 2, 2),
    (DiLoCo(every=2), 2, 2),
    (DiLoCo(every=3, fragments=3, outer=SGD(lr=0.5, momentum=0.8), weight="tokens"), 2, 1),  # servers cut fragments
    (EASGD(every=4), 1, 2),  # of several workers, whose order nobody knows
]


def begin(params: dict[str, torch.nn.Parameter], mode: Local) -> tw.torch.StoreOptimizer:
    return tw.torch.StoreOptimizer(params.items(), torch.optim.AdamW, lr=0.05, mode=mode, bucket_bytes=8192)


def steps(store: tw.torch.StoreOptimizer, params: Any, rank: int, first: int, stop: int) -> None:
    for step in range(first, stop):
        gradients(params, rank, step)
        mode = store._settings.mode
        if isinstance(mode, DiLoCo) and mode.weight == "tokens":
            store.count(tokens(rank, step))
        store.step()


def go_through(job: tw.Job, mode: Local) -> tuple[bytes, dict[str, torch.Tensor]]:
    params = named(first_values(), job.rank)
    store = begin(params, mode)
    steps(store, params, job.rank, 0, SAVED)
    job.barrier()  # all have exchanged
    saved = io.BytesIO()
    torch.save(({k: p.detach() for k, p in params.items()}, store.state_dict()), saved)
    job.barrier()
    steps(store, params, job.rank, SAVED, STEPS)
    return saved.getvalue(), {k: p.detach().clone() for k, p in params.items()}


def go_on(job: tw.Job, mode: Local, saved: list[bytes]) -> dict[str, torch.Tensor]:
    params = named(first_values(), job.rank)
    store = begin(params, mode)
    steps(store, params, job.rank, 0, 2)  # to be forgotten
    values, state = torch.load(io.BytesIO(saved[job.rank]))
    store.load_state_dict(state)
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(values[name])
    assert store.state_dict()["store"]["steps"] == SAVED
    steps(store, params, job.rank, SAVED, STEPS)
    return {k: p.detach().clone() for k, p in params.items()}


@pytest.mark.parametrize(("mode", "workers", "servers"), MODES, ids=repr)
def test_a_job_goes_on_with_its_bits_and_other_servers(mode: Local, workers: int, servers: int) -> None:
    first = run_job(go_through, mode, workers=workers).ok()
    again = run_job(go_on, mode, [saved for saved, _ in first], workers=workers, servers=servers).ok()
    for (_, expected), found in zip(first, again, strict=True):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def misfits(job: tw.Job) -> list[str]:
    params = named(first_values())
    store = begin(params, DiLoCo(every=2, fragments=2))
    steps(store, params, job.rank, 0, 2)
    state = store.state_dict()
    found, good = [], state["store"]
    wide = good["parameters"]["wide"]
    for bad in (
        {"parameters": {}},
        {**good, "parameters": {"wide": wide}},
        {**good, "parameters": {**good["parameters"], "wide": wide[:3]}},
        {**good, "state": {"wide": {"momentum_buffer": torch.zeros(3)}}},
        {**good, "tokens": [0.0]},
    ):
        with pytest.raises(errors.ArgumentError) as refused:
            store.load_state_dict({**state, "store": bad})
        found.append(str(refused.value))
    steps(store, params, job.rank, 2, 4)
    return found


def test_what_does_not_fit_is_refused() -> None:
    strange, other, value, kept, count = run_job(misfits, workers=1).ok()[0]
    assert strange == "the state's entry 'store' was not made by a StoreOptimizer"
    assert other == "the state's entry 'store' is of a store with other parameters"
    assert value == "parameter 'wide' is float32 [3, 60] in the state's entry 'store'"
    assert kept == "'momentum_buffer' of 'wide' has the shape [3] in the entry 'store'"
    assert count == "the state is of 1 fragments, and this mode has 2"
