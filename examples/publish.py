"""Trains a small network, and publishes versions of its weights for processes that are no part of the job:

tensorwire run --workers 2 --servers 1 -- python examples/publish.py

Meanwhile, in another terminal: python examples/evaluate.py
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tensorwire as tw

job = tw.init()
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
data = TensorDataset(images[:1500], labels[:1500])
sampler = DistributedSampler(data, job.num_workers, job.rank)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
publish = tw.store.Every(20)
optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-4, publish=publish)
if job.rank == 0:
    print(f"job {job.name} publishes a version of its weights every {publish.steps} steps", flush=True)

for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
