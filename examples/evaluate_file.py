"""Evaluates the newest weights of examples/publish.py by safetensors alone. JOB is what publish.py prints:

tensorwire mount JOB job --daemon
python examples/evaluate_file.py job
"""

import os
import sys

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32)[1500:], torch.tensor(digits.target)[1500:]
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

path = os.path.realpath(f"{sys.argv[1]}/model.safetensors")  # names one version for ever
model.load_state_dict(load_file(path))
print(f"accuracy {(model(images).argmax(1) == labels).float().mean().item():.3f} of {path}")
