"""Trains a small network on scikit-learn's digits with DistributedDataParallel, for comparison with minimal.py:

torchrun --nproc-per-node 2 examples/minimal_ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
data = TensorDataset(images[:1500], labels[:1500])
sampler = DistributedSampler(data, workers, rank)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(8):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

if rank == 0:
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"workers: {workers}, test accuracy: {accuracy:.3f}")
dist.destroy_process_group()
