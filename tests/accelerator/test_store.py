"""Parameters on a device: the bits of the CPU, in any order of the device's work, and no wait too few."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import tensorwire as tw
from tensorwire.observe import counters
from tensorwire.store.sharding import Bucket
from tensorwire.store.store_client import StoreClient
from tensorwire.torch.device_copies import DeviceCopies
from tests.accelerator import features, models, simulated
from tests.accelerator.features import FEATURES, named, saved_and_loaded
from tests.accelerator.left_out import WAITS, without
from tests.accelerator.programs import Driver, Found, prepare, same, train
from tests.harness.jobs import in_turn, run_job
from tests.levels import mostly_long

if why := simulated.unavailable():
    pytest.skip(why, allow_module_level=True)

SCHEDULES = range(10)
KINDS: list[dict[str, Any]] = [
    {"dtype": torch.float32, "driver": Driver.ALL, "held": True},
    {"dtype": torch.bfloat16, "driver": Driver.NONE, "held": True},
    {"dtype": torch.bfloat16, "driver": Driver.WRITABLE},
    {"dtype": torch.float32, "driver": Driver.ALL, "overlap": False},
]
OFTEN = KINDS[:2]  # directly, and with a copy more


def schedules(job: tw.Job, whole: bool) -> list[str]:
    """What has other bits than on the CPU."""
    wrong = []
    for kind in KINDS:
        stock = train(job, "cpu", **kind)
        seeds = SCHEDULES if whole or kind in OFTEN else SCHEDULES[:1]
        wrong += [f"{kind} {seed}" for seed in seeds if not same(train(job, seed=seed, **kind), stock)]
    return wrong


@pytest.mark.parametrize(
    ("device", "whole"), mostly_long([("shm", False), ("shm", True), ("tcp", True)], [("shm", False)])
)
def test_every_schedule_has_the_bits_of_the_cpu(device: str, whole: bool) -> None:
    assert run_job(schedules, whole, device=device, servers=2 if whole else 1, fresh=True).ok() == [[], []]


def compare(job: tw.Job, names: list[str], seeds: list[int]) -> list[str]:
    """The features, of those with such names, that have other bits on the device than on the CPU."""
    prepare(0)
    wrong = []
    for name, program, options in FEATURES:
        if name in names:
            with named(name):
                stock = program(job, "cpu", **options)
                for seed in seeds:
                    prepare(seed)
                    wrong += [] if same(program(job, "sim:0", **options), stock) else [f"{name}, schedule {seed}"]
    return wrong


NAMES = [name for name, _, _ in FEATURES]
OTHERS = {
    *("accumulated, overlap=False", "clipped, overlap=False", "compiled, whole=True", "compiled by us", "in SSP, bf16"),
    *("in EASGD", "in LocalSGD", "by topk(0.25)", "by int8(64)", "on several devices, overlap=False", "by sums"),
    "by Adafactor",
}
assert set(NAMES) > OTHERS
FAST = [name for name in NAMES if name not in OTHERS]


@pytest.mark.parametrize(
    ("names", "device"), mostly_long([(FAST, "tcp"), (NAMES, "shm")], [(FAST, "tcp")]), ids=["fast", "all"]
)
def test_what_users_do_has_the_bits_of_the_cpu(names: list[str], device: str) -> None:
    seeds = list(SCHEDULES) if names is NAMES else [0]
    assert run_job(compare, names, seeds, device=device, fresh=True).ok() == [[], []]


# Short programs, in one job


def checkpoints(job: tw.Job) -> list[str]:
    """Saved on one device and loaded on another, also on the CPU."""
    prepare(0)
    wrong = []
    stock = saved_and_loaded(job, "cpu", "cpu", torch.bfloat16)
    for on, to in (("sim:0", "sim:1"), ("sim:0", "cpu"), ("cpu", "sim:0")):
        wrong += [] if same(saved_and_loaded(job, on, to, torch.bfloat16), stock) else [f"{on} to {to}"]
    return wrong


def autocast(job: tw.Job) -> list[bool]:
    """With autocast, whose operators on a device are others than on the CPU: beside torch's optimizer on the device.

    All workers have the same gradients, whose mean has the same bits.
    """
    prepare(0)
    found = []
    for dtype, scaled in ((torch.bfloat16, False), (torch.float16, True)):
        ends = []
        for ours in (True, False):
            model = models.built().to("sim:0")
            kind = torch.optim.SGD
            optimizer: torch.optim.Optimizer = (
                features.made(model, kind, overlap=not scaled) if ours else kind(model.parameters(), lr=0.01)
            )
            scaler = torch.amp.GradScaler("sim", enabled=scaled, init_scale=256.0)
            for n in range(4):
                optimizer.zero_grad()
                with torch.autocast("sim", dtype=dtype):
                    loss = models.loss(model, n, 0, "sim:0")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            ends.append([p.detach().cpu() for p in model.parameters()])
        found.append(same(*ends))
    return found


TRIES = 5  # whether the lazy schedule shows that the seventh is left out depends on when the server comes to an update


def left_out(job: tw.Job) -> dict[str, tuple[bool, bool]]:
    """By wait: whether the lazy schedule has the right bits with it, and on any worker others without."""
    found = {}
    for wait, (_, options) in WAITS.items():
        stock = train(job, "cpu", **options)
        right = same(train(job, **options), stock)
        shows = False
        for _ in range(TRIES):
            with without(wait):
                wrong = not same(train(job, **options), stock)
            if shows := bool(job.all_reduce(int(wrong), "max")):
                break
        found[wait] = right, shows
    return found


def waits(job: tw.Job, overlap: bool) -> tuple[list[int], list[int], list[int]]:
    """Waits for the device of the thread that trains, in whole steps, as the device and as our counter count them."""
    prepare(0)
    model = models.built().to("sim:0")
    optimizer = features.made(model, overlap=overlap)
    batches = [[each.to("sim:0") for each in models.batch(n, job.rank)] for n in range(4)]
    theirs, ours, copies = [], [], []
    for n, (x, y) in enumerate(batches):
        before, counted = simulated.host_waits(), counters.snapshot()
        optimizer.zero_grad()
        models.loss_of(model, x, y, n % 2 == 0).backward()
        optimizer.step()
        theirs.append(simulated.host_waits() - before)
        ours.append(counters.since(counted).host_waits)
        copies.append(counters.since(counted).copies)
    optimizer.wait()
    optimizer.close()
    return theirs, ours, copies


def test_the_thread_that_trains_waits_for_nothing_but_new_values(short: Short) -> None:
    for theirs, ours, copies in short("waits"):
        assert theirs == [0] * 4
        assert ours[0] == 0  # there is nothing to wait for yet; later it depends on when values come
        assert copies == [0] * 4


BUCKETS = 17  # of the model


def test_without_overlap_it_waits_for_each_bucket(short: Short) -> None:
    for _, ours, _ in short("waits, overlap=False"):
        assert ours == [BUCKETS] * 4


LINEAR_STEPS = 4


def counted(job: tw.Job) -> tuple[int, int]:
    """Waits and copies of a layer, in one bucket, on a device for which nothing is page-locked.

    Copies up begin only once the thread that trains waits for them.
    """
    prepare(0, driver=Driver.NONE)
    model = torch.nn.Linear(4, 4).to("sim:0")
    before, pulls, begin = counters.snapshot(), itertools.count(1), DeviceCopies.up

    def up(copies: DeviceCopies, bucket: Bucket, version: int) -> None:
        if threading.current_thread().name == "tensorwire-pull":
            n, end = next(pulls), time.monotonic() + 10
            while counters.since(before).host_waits < n and time.monotonic() < end:
                time.sleep(0.001)
        begin(copies, bucket, version)

    optimizer = features.made(model, overlap=True)
    with mock.patch.object(DeviceCopies, "up", up), mock.patch.object(StoreClient, "has", return_value=False):
        for _ in range(LINEAR_STEPS):
            optimizer.zero_grad()
            model(torch.ones(1, 4, device="sim:0")).sum().backward()
            optimizer.step()
        optimizer.wait()
    optimizer.close()
    found = counters.since(before)
    return found.host_waits, found.copies


def test_waits_for_values_and_copies_more_are_counted(short: Short) -> None:
    ups, downs = 2 * (1 + LINEAR_STEPS), 2 * LINEAR_STEPS  # weight and bias; values also when it is made
    assert short("counted") == [(1 + LINEAR_STEPS, ups + downs + 2), (LINEAR_STEPS, ups + downs)]


def lagging(job: tw.Job, on: str) -> Found:
    """The thread that pulls is held up with version 3 until the one that trains has begun the copies of the next."""
    prepare(0)
    model = features.Split(("cpu", on, on))
    optimizer = features.made(model, bucket_bytes=1 << 20, overlap=True)
    (part,) = optimizer._parts
    begin, late, overtaken, used = DeviceCopies.up, threading.Event(), threading.Event(), threading.Event()

    def up(copies: DeviceCopies, bucket: Bucket, version: int) -> None:
        pulls = threading.current_thread().name == "tensorwire-pull"
        if pulls and version == 3:
            overtaken.wait(30)
        begin(copies, bucket, version)
        if pulls and version == 3:
            late.set()
            used.wait(30)
        if version == 4:
            overtaken.set()

    with mock.patch.object(DeviceCopies, "up", up):
        for n in range(6):
            optimizer.zero_grad()
            while not all(part.client.has(bucket, part.latest) for bucket in part.client.order):
                time.sleep(0.001)  # then the thread that trains need not wait for the other one
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * n + job.rank))
            if part.latest == 4 and on != "cpu":
                part.arrive(range(len(part.params)))
                assert late.wait(30)
                simulated.settle()
            model(x).square().sum().backward()
            if part.latest == 4 and on != "cpu":
                simulated.settle()
                used.set()
            optimizer.step()
    return features.ended(optimizer, model)


def compare_lagging(job: tw.Job) -> bool:
    torch.manual_seed(0)
    stock = lagging(job, "cpu")
    torch.manual_seed(0)
    return same(lagging(job, "sim:0"), stock)


def test_a_thread_that_pulls_late_brings_no_old_values(short: Short) -> None:
    assert short("lagging") == [True, True]


def test_a_checkpoint_goes_from_any_device_to_any(short: Short) -> None:
    assert short("checkpoints") == [[], []]


def test_autocast_has_the_bits_of_the_device_alone(short: Short) -> None:
    assert short("autocast") == [[True, True]] * 2


def test_each_wait_that_is_left_out_shows(short: Short) -> None:
    for found in short("left out"):
        assert found == dict.fromkeys(WAITS, (True, True))


SHORT: dict[str, Callable[[tw.Job], Any]] = {
    "left out": left_out,
    "checkpoints": checkpoints,
    "autocast": autocast,
    "waits": partial(waits, overlap=True),
    "waits, overlap=False": partial(waits, overlap=False),
    "counted": counted,
    "lagging": compare_lagging,
}
Short = Callable[[str], list[Any]]  # what each worker found


@pytest.fixture(scope="module")
def short() -> Short:
    """They run when the first is asked for: processes of a job take longer to begin than most take to run."""
    found = [dict(zip(SHORT, each, strict=True)) for each in run_job(in_turn, *SHORT.values(), fresh=True).ok()]
    return lambda name: [each[name] for each in found]
