"""Trains a small transformer whose later half is on another worker. No send or receive is written anywhere:

tensorwire run --workers 2 --servers 0 -- python examples/two_workers.py
tensorwire run --workers 2 --servers 0 --device tcp -- python examples/two_workers.py
"""

import torch
from torch import nn

import tensorwire as tw

WIDTH, CLASSES, STEPS = 64, 16, 40

job = tw.init()
torch.manual_seed(0)


class Classifier(nn.Module):
    """Which of 16 tokens is the most frequent of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, text: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), answer)


model = Classifier()
# Layers 2 and 3 live on worker 1, everything else on worker 0. Parameters of the other worker take no memory here.
tw.torch.place(model, {"": 0, "layers.2": 1, "layers.3": 1})
compiled = torch.compile(model, backend="tensorwire")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(1)

for step in range(STEPS):
    text = torch.randint(0, CLASSES, (32, 24), generator=generator)
    answer = nn.functional.one_hot(text, CLASSES).sum(1).argmax(1)
    optimizer.zero_grad()
    loss = compiled(text, answer)
    loss.backward()
    tw.torch.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if job.rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}")
