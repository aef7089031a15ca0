"""``StoreOptimizer(compression=)``: digits are learned as without it; what is refused; what is not finite."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import EASGD, SGD, SSP, Async, DiLoCo, LocalSGD, Sync
from tensorwire.store.modes import Mode
from tests.harness.jobs import in_turn, run_job
from tests.levels import mostly_long

CODES = ["fp16", "bf16", "2bit(0.02)", "topk(0.01)", "int8"]
MODES: list[Mode] = [
    Sync(),
    Async(),
    SSP(staleness=2),
    LocalSGD(every=4),
    EASGD(every=4),
    DiLoCo(every=4, outer=SGD(lr=0.7, momentum=0.5)),
]
MARGIN = 0.03, 0.06  # of the share of test images that are told right: where rounds are those of all, and elsewhere
EPOCHS = 8
Data = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


def digits() -> Data:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(1).permutation(len(found.target))
    return (found.data[order] / 16).astype("f4"), found.target[order]


def learn(job: tw.Job, mode: Mode, data: Data) -> list[float]:
    """The share of 360 test images that are told right: without compression, then with each code."""
    images, labels = map(torch.from_numpy, data)
    mine = torch.arange(360 + job.rank, len(labels), job.num_workers)
    shares = []
    for name in (None, *CODES):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
        optimizer = tw.torch.StoreOptimizer(model, torch.optim.SGD, lr=0.2, mode=mode, compression=name)
        generator = torch.Generator().manual_seed(job.rank)
        for _ in range(EPOCHS):
            for batch in mine[torch.randperm(len(mine), generator=generator)].split(16):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
        optimizer.wait()
        with torch.no_grad():
            shares.append(float((model(images[:360]).argmax(1) == labels[:360]).float().mean()))
    return shares


@pytest.mark.parametrize("mode", mostly_long(MODES, MODES[:1]), ids=repr)
def test_digits_are_learned_as_without_compression(mode: Mode) -> None:
    margin = MARGIN[not isinstance(mode, (Sync, LocalSGD, DiLoCo))]
    for plain, *coded in run_job(learn, mode, digits()).ok():
        assert plain > 0.9
        for name, share in zip(CODES, coded, strict=True):
            assert share >= plain - margin, name


def ends(job: tw.Job, overlap: bool) -> list[float]:
    """Overlap changes no bits of what is coded."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300))
    options = {"overlap": overlap, "compression": "topk(0.05)", "bucket_bytes": 64 << 10}
    optimizer = tw.torch.StoreOptimizer(model, torch.optim.SGD, lr=0.5, **options)
    torch.manual_seed(job.rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    optimizer.wait()
    return [x for p in model.parameters() for x in p.flatten().tolist()]


# ---- what is not finite, and values that users set


def not_finite(job: tw.Job, name: str) -> None:
    """A gradient that is not finite is found, and leaves nothing behind."""
    p = torch.nn.Parameter(torch.zeros(600))
    options = {"compression": name, "error_if_nonfinite": True}
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, **options)
    p.grad = torch.zeros(600)
    p.grad[7] = float("nan") if job.rank else 0.0
    with pytest.raises(errors.NonFiniteGradient):
        optimizer.step()
    p.grad = torch.full((600,), 0.02)
    optimizer.step()
    assert p.detach().isfinite().all()
    assert float(p.detach().abs().max()) == pytest.approx(0.02, rel=0.01)


def write(job: tw.Job, mode: Mode) -> None:
    """Half of the threshold is left out; of values that are set, nothing."""
    p = torch.nn.Parameter(torch.zeros(64))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, mode=mode, compression="2bit(1)")
    seen = []
    for step in range(3):
        p.grad = torch.full((64,), -0.5)
        if step == 1:
            with torch.no_grad():
                p.fill_(10.0 + job.rank)
            optimizer.write_parameters()
        optimizer.step()
        seen.append(p.tolist()[:2])
    assert seen == [[0.0] * 2, [10.0] * 2, [11.0] * 2]


def load(job: tw.Job) -> None:
    """Nor of state that is loaded."""
    p = torch.nn.Parameter(torch.zeros(64))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, compression="2bit(1)")
    seen = []
    for _ in range(3):
        p.grad = torch.full((64,), -0.5)
        optimizer.step()
        seen.append(float(p[0]))
        if len(seen) == 1:
            optimizer.load_state_dict(optimizer.state_dict())
            job.barrier()
    assert seen == [0.0, 0.0, 1.0]


def set_centre(job: tw.Job) -> None:
    """An estimate follows values that are set."""
    p = torch.nn.Parameter(torch.zeros(64))
    options = {"mode": EASGD(every=1, alpha=0.5), "compression": "fp16"}
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, **options)
    with torch.no_grad():
        p.fill_(4096.0)
    optimizer.write_parameters()
    p.grad = torch.full((64,), -1.0)
    optimizer.step()  # from 4,096 to 4,097, which fp16 could not tell apart as values
    assert p[:2].tolist() == [4096.5, 4096.5]


# ---- what is refused


REFUSED = [
    ("2bit(0)", torch.float32, errors.ArgumentError, "^2bit needs a threshold above 0"),
    ("topk(1.5)", torch.float32, errors.ArgumentError, "^topk needs a fraction above 0 and below 1"),
    ("zip", torch.float32, errors.ArgumentError, "^compression must be 'fp16', 'bf16'"),
    ("fp16", torch.float64, errors.Unsupported, "^compression computes in float32, and 'p' is of float64"),
]


def refused(job: tw.Job) -> None:
    """What is no compression, or cannot be coded; and nothing is left behind."""
    for name, dtype, kind, says in REFUSED:
        for mode in (Sync(), LocalSGD()):
            named = [("p", torch.nn.Parameter(torch.zeros(3, dtype=dtype)))]
            with pytest.raises(kind, match=says):
                tw.torch.StoreOptimizer(named, torch.optim.SGD, lr=0.1, mode=mode, compression=name)
    named = [("p", torch.nn.Parameter(torch.zeros(3)))]
    tw.torch.StoreOptimizer(named, torch.optim.SGD, lr=0.1, compression="fp16").step()


def test_what_users_do() -> None:
    run_job(in_turn, set_centre, refused, workers=1).ok()
    finite = [partial(not_finite, name=name) for name in CODES]
    modes = [Sync(), LocalSGD(every=1), DiLoCo(every=1, outer=SGD(1.0, 0.0, False))]
    written = [partial(write, mode=mode) for mode in modes]
    ended = [partial(ends, overlap=overlap) for overlap in (False, True)]
    first, second = run_job(in_turn, *ended, *finite, *written, load, device="tcp").ok()
    assert first[0] == first[1] == second[1]
