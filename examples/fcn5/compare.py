"""FCN-5 for a number of steps, its parameters in Tensorwire's store or in one on gRPC; the demo starts it for both.

The same images in the same order, the same values to begin with, SGD with momentum at one learning rate.
"""

from __future__ import annotations

import argparse
import itertools

import data
import torch
from progress import Progress
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train import MOMENTUM, endless, fcn5, to_input

import tensorwire as tw
from tensorwire.observe import spans
from tensorwire.observe.spans import clock

LEARNING_RATE = 0.005  # without a warm-up, because the store on gRPC keeps the options it began with
WARM_UP_STEPS = 3  # not in the samples a second: memory is touched for the first time


def optimizer_of(args: argparse.Namespace, job: tw.Job, model: torch.nn.Module) -> tw.torch.StoreOptimizer:
    """The one of the store that was asked for; both have ``step()``."""
    options = {"lr": LEARNING_RATE, "momentum": MOMENTUM, "fused": True}
    if args.grpc is None:
        return tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, **options)
    from grpc_train import GrpcOptimizer

    return GrpcOptimizer(model.named_parameters(), args.grpc.split(","), job.rank, **options)


def train(args: argparse.Namespace, job: tw.Job, model: torch.nn.Module, images: data.Data) -> dict[str, object]:
    """Trains for ``args.steps``; returns what there is to report of it."""
    train_set = TensorDataset(torch.from_numpy(images.train_images), torch.from_numpy(images.train_labels))
    sampler = DistributedSampler(train_set, job.num_workers, job.rank, seed=args.seed)
    loader = DataLoader(train_set, args.batch, sampler=sampler, drop_last=True)
    optimizer = optimizer_of(args, job, model)
    ends = []
    with Progress("training", "step", quiet=job.rank != 0) as progress:
        for number, (batch, labels) in enumerate(itertools.islice(endless(loader, sampler), args.steps), 1):
            model.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(to_input(batch)), labels)
            loss.backward()
            optimizer.step()
            ends.append(clock())
            progress.show(number, args.steps, f"loss {loss.item():.3f}")
    timed = len(ends) - WARM_UP_STEPS
    rate = args.batch * job.num_workers * timed / (ends[-1] - ends[WARM_UP_STEPS - 1])
    return {"steps": args.steps, "loss": loss.item(), "samples_per_second": rate}


def main() -> None:
    """Parses the options, joins the job, trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a folder of IDX files, or 'digits'")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=64, help="a worker's")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grpc", help="the servers of the store on gRPC: HOST:PORT, commas between them")
    args = parser.parse_args()

    job = tw.init()
    torch.manual_seed(args.seed)
    images = data.load(args.data)
    model = fcn5(args.width)
    spans.facts["result"] = train(args, job, model, images)
    if job.rank == 0:
        spans.facts["parameters"] = sum(p.numel() for p in model.parameters())
        if args.grpc is None:
            spans.facts["device"] = job.routes["server 0"].device
    job.barrier()


if __name__ == "__main__":
    main()
