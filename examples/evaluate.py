"""Draws the accuracy of a model while examples/publish.py trains it, in a process that is no part of the job:

python examples/evaluate.py
"""

import sys

import torch
from sklearn.datasets import load_digits

import tensorwire as tw

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32)[1500:], torch.tensor(digits.target)[1500:]
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

with tw.store.connect(*sys.argv[1:]) as reader:
    for version in reader.follow(model):
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
        print(f"step {version.step:6,}  {'█' * round(50 * accuracy):50}  {accuracy:.3f}", flush=True)
