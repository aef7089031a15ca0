"""A whole training: checkpoints, resuming, early stopping, evaluation over all workers, and reports.

tensorwire run --workers 2 --servers 1 --tensorboard runs -- python examples/train_full.py --folder run

Interrupt it, and start it again with the same command: it goes on from the last finished epoch, with the bits of a
training that was never interrupted. The number of servers and the device may change, the number of workers not.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tensorwire as tw


def save(path: Path, state: dict) -> None:
    """Replaces the file at once: whoever is killed while saving leaves the one before."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@torch.no_grad()
def evaluate(job: tw.Job, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Loss and accuracy over all data; each worker computes its share."""
    model.eval()
    mine = slice(job.rank, None, job.num_workers)
    output = model(images[mine])
    loss = cross_entropy(output, labels[mine], reduction="sum").item()
    correct = int((output.argmax(1) == labels[mine]).sum())
    model.train()
    return job.all_reduce(loss) / len(labels), job.all_reduce(correct) / len(labels)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", type=Path, default=Path("run"), help="for checkpoint.pt and best.pt")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--patience", type=int, default=4, help="epochs without a better loss before it stops")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

job = tw.init()
checkpoint, best_model = args.folder / "checkpoint.pt", args.folder / "best.pt"

# Data, model, optimizer: the same on every worker, except that each draws random numbers of its own for dropout.
digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
data = TensorDataset(images[:1400], labels[:1400])
sampler = DistributedSampler(data, job.num_workers, job.rank, seed=args.seed)
batches = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
torch.manual_seed(args.seed)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(128, 10))
torch.manual_seed(args.seed + job.rank)

# Worker 0 reads the checkpoint, and all have it: the others need not see the file.
saved = job.broadcast(torch.load(checkpoint, weights_only=True) if job.rank == 0 and checkpoint.exists() else None)
if saved and len(saved["random"]) != job.num_workers:
    raise ValueError(f"this checkpoint is of {len(saved['random'])} workers: start as many")
if saved:
    model.load_state_dict(saved["model"])
optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-3, max_grad_norm=1.0)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
first, best, stale = 0, float("inf"), 0
if saved:
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first, best, stale = saved["epoch"], saved["best"], saved["stale"]
    torch.set_rng_state(saved["random"][job.rank])
    if job.rank == 0:
        print(f"resumed after epoch {first}")

for epoch in range(first, args.epochs):
    if job.broadcast(stale >= args.patience):
        break
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(batches, epoch * len(batches) + 1):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        job.report(step=number, total=args.epochs * len(batches), samples=len(x), loss=loss)
    scheduler.step()

    validation, accuracy = evaluate(job, model, images[1400:], labels[1400:])
    job.report(step=number, validation=validation, accuracy=accuracy)
    better = validation < best
    best, stale = min(best, validation), 0 if better else stale + 1

    # Every worker's random state goes into the checkpoint that worker 0 writes.
    states = [job.broadcast(torch.get_rng_state(), source=rank) for rank in range(job.num_workers)]
    if job.rank == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        if better:
            save(best_model, model.state_dict())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save(checkpoint, {**state, "epoch": epoch + 1, "best": best, "stale": stale, "random": states})
        print(f"epoch {epoch + 1}: validation loss {validation:.4f}, accuracy {accuracy:.3f}", flush=True)

if job.rank == 0:
    print(f"best validation loss {best:.4f}, its model is in {best_model}")
