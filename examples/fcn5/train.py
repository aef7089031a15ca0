"""FCN-5 on 28x28 images: a plain torch script, and the four lines that make it train on several workers.

::

    tensorwire run --workers 2 --servers 1 -- python train.py --seconds 60
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import deque
from collections.abc import Iterator

import data
import torch
from modes import MODES, bucket_bytes, waits
from pace import Pace
from progress import Progress
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tensorwire as tw  # 1
from tensorwire.observe import spans

LEARNING_RATE, MOMENTUM, WARM_UP_STEPS = 0.02, 0.9, 10
POINTS = 200  # of the curve of losses


def fcn5(width: int) -> torch.nn.Sequential:
    """784 inputs, four hidden layers, 10 classes: 53,600,266 parameters at width 4096."""
    widths = [data.SIDE * data.SIDE] + 4 * [width]
    hidden = [layer for a, b in itertools.pairwise(widths) for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(width, data.CLASSES))
    for layer in model:  # torch's default loses the signal in five layers: the first thirty steps would learn nothing
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            torch.nn.init.zeros_(layer.bias)
    return model


def to_input(images: torch.Tensor) -> torch.Tensor:
    """Bytes become numbers from -1 to 1."""
    return images.float().div_(127.5).sub_(1.0)


def endless(loader: DataLoader, sampler: DistributedSampler) -> Iterator[list[torch.Tensor]]:
    """Epoch after epoch, each in a new order."""
    if len(loader) == 0:
        raise tw.errors.ArgumentError(f"a worker has only {len(sampler)} images to train on: use a smaller --batch")
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(job: tw.Job, model: torch.nn.Module, images: data.Data, args: argparse.Namespace) -> dict[str, object]:
    """Trains for ``args.seconds``; returns what there is to report of it."""
    train_set = TensorDataset(torch.from_numpy(images.train_images), torch.from_numpy(images.train_labels))
    sampler = DistributedSampler(train_set, job.num_workers, job.rank, seed=args.seed)  # 4
    loader = DataLoader(train_set, args.batch, sampler=sampler, drop_last=True)
    mode = MODES[args.mode]
    optimizer = tw.torch.StoreOptimizer(  # 3
        model.named_parameters(),
        torch.optim.SGD,
        mode=mode,
        bucket_bytes=bucket_bytes(mode),
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        fused=True,
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    if job.rank == 0:
        print(f"store: {optimizer.summary()}", flush=True)
    pace = Pace(job, args.seconds, together=waits(mode))
    losses: deque[float] = deque(maxlen=20)
    curve = []
    with Progress("training", "step", quiet=job.rank != 0) as progress:
        for batch, labels in pace.over(endless(loader, sampler)):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(to_input(batch)), labels)
            loss.backward()
            optimizer.step()
            warm_up.step()

            losses.append(loss.item())
            mean = sum(losses) / len(losses)
            curve.append((pace.steps + 1, pace.seconds, mean))
            rate = args.batch * job.num_workers * pace.steps_a_second
            text = f"loss {mean:.3f}, {rate:,.0f} samples/s, {pace.seconds_left:.0f} s left"
            progress.show(pace.steps + 1, pace.total, text)
    optimizer.wait()
    spans.facts["steady"] = {"steps": pace.steady_steps, **vars(pace.steady)}
    spans.facts["pace"] = {"steps": pace.steps, "samples_per_second": args.batch * pace.steps_a_second}
    curve = curve[:: 1 + len(curve) // POINTS]
    return {"mode": args.mode, "steps": pace.steps, "seconds": pace.seconds, "loss": mean, "curve": curve}


@torch.inference_mode()
def accuracy(model: torch.nn.Module, images: data.Data) -> float:
    """The share of test images classified right, on all cores: the other workers are waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    right = 0
    total = len(images.test_labels)
    with Progress("evaluating", "image") as progress:
        for at in range(0, total, 500):
            batch = torch.from_numpy(images.test_images[at : at + 500])
            labels = torch.from_numpy(images.test_labels[at : at + 500])
            right += int((model(to_input(batch)).argmax(1) == labels).sum())
            done = at + len(labels)
            progress.show(done, total, f"{right / done:.1%} right")
    torch.set_num_threads(threads)
    return right / total


def main() -> None:
    """Parses the options, joins the job, trains; worker 0 evaluates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a folder of IDX files, or 'digits'")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--batch", type=int, default=64, help="a worker's")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="sync", help="how the workers take turns")
    args = parser.parse_args()

    job = tw.init()  # 2
    torch.manual_seed(args.seed)
    images = data.load(args.data)
    model = fcn5(args.width)
    result = train(job, model, images, args)
    if job.rank == 0:
        result["accuracy"] = accuracy(model, images)
        result["parameters"] = sum(p.numel() for p in model.parameters())
        result["device"] = job.routes["server 0"].device
        print(f"test accuracy {result['accuracy']:.1%} after {result['steps']} steps", flush=True)
        spans.facts["result"] = result
    job.barrier()


if __name__ == "__main__":
    main()
