"""``python -m benchmarks mxnet``, training: RDMA-MXNet's two perceptrons, with MXNet's own store and with ours.

A step's seconds are what the slowest worker took. The stores take turns, and train on the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import links
from benchmarks.links import Places
from benchmarks.mxnet import OWN, find_python, mxnet_job
from benchmarks.options import Options
from benchmarks.steps import check_losses, mean, step_records
from tensorwire.bench.compare import Settings, Stages, Workload, take_turns
from tensorwire.bench.programs import HERE, OURS, Answer, ProgramFailed, Stage
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.sizes import counted

BATCH = 128  # of each worker
WARM = 2  # steps of a round that nobody times
FASTER = Target(shares={OWN: 1.0})


@dataclass(frozen=True)
class Network:
    """A perceptron. ``data``: the shape of its images. ``images``: how many make an epoch."""

    title: str
    data: str
    images: int

    def epoch(self, workers: int, step: float) -> float:
        """Seconds of an epoch, whose steps take ``step`` each."""
        return math.ceil(self.images / (BATCH * workers)) * step


NETWORKS = (
    Network("784-2048-1024-10 on random images of 28 x 28", "mnist", 60_000),
    Network("3072-2048-1024-10 on random images of 32 x 32 x 3", "cifar", 50_000),
)


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Both networks by each number of workers, on one machine or over links."""
    counts, devices = options.counts or (1, 2), ("tcp",) if options.links else options.devices

    def over(rate: str, places: Places) -> list[Record]:
        some = [(network, n) for n in counts for network in NETWORKS]
        return [r for each in some for r in contest(*each, devices, rate, places, options, settings, notes)]

    return links.over_each(options.links, notes, over) if options.links else over("", HERE)


def contest(
    network: Network,
    workers: int,
    devices: Sequence[str],
    rate: str,
    places: Places,
    options: Options,
    settings: Settings,
    notes: Notes,
) -> list[Record]:
    """One network by one number of workers: for each device, ours beside MXNet's own. Raises `ProgramFailed`."""
    python, words = find_python(), (network.data, options.shrink)
    contenders = {
        name: mxnet_job("mxnet_train.py", python, OWN if name == OWN else OURS, device, workers, places, *words)
        for name, device in (*((device, device) for device in devices), (OWN, "tcp"))
    }
    title = network.title + (f" / {options.shrink}" if options.shrink > 1 else "")
    label = f"{title}, {counted(workers, 'worker')}{f' over {rate}' if rate else ''}"

    def steps(name: str, stage: Stage) -> list[Answer]:
        answers = stage.run(WARM, options.steps)
        if len({answer["values"] for answer in answers if "values" in answer}) != 1:
            raise ProgramFailed("the workers' parameters differ")
        return answers

    with Stages(settings.cores) as stages:
        told = take_turns(stages, contenders, settings.rounds, steps, label=label, notes=notes, peers=(OWN,))
    losses = {name: mean(rounds[-1], "loss") for name, rounds in told.items()}
    check_losses(label, losses)
    own = {OWN: told[OWN]} if OWN in told else {}
    made = []
    for device in devices:
        place = f"tcp over a link of {rate}" if rate else device
        name = f"MXNet, {title}, batch {workers} x {BATCH}, {place}"
        target = FASTER if options.shrink == 1 else None
        shape = Workload("mxnet", device, name, 0, "training-step", (), (OWN,), target)

        def details(peer: str, seconds: float, device: str = device) -> dict[str, float]:
            return {
                "loss": losses[OWN if peer == OWN else device],
                "samples_per_second": BATCH * workers / seconds,
                "epoch": network.epoch(workers, seconds),
            }

        made += step_records(shape, {OURS: told[device], **own}, WARM, options.steps, details)
    return made
