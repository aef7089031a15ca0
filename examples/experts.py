"""A mixture of experts, each on a worker of its own. How many tokens go where changes in every step:

tensorwire run --workers 2 --servers 0 -- python examples/experts.py
"""

import torch
from torch import nn

import tensorwire as tw

WIDTH, STEPS = 32, 30

job = tw.init()
torch.manual_seed(0)
torch._dynamo.config.capture_dynamic_output_shape_ops = True  # or nonzero() ends the graph


class Mixture(nn.Module):
    """Each token goes to the one expert that the gate prefers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(experts)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.gate(tokens), 1)
        chosen = weights.argmax(1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == number).squeeze(1)  # of a length that nobody knows before
            with tw.worker(number):
                made = expert(tokens[mine])
            mixed = mixed.index_add(0, mine, made * weights[mine, number].unsqueeze(1))
        return nn.functional.mse_loss(self.head(tokens + mixed).squeeze(1), target)


model = Mixture(job.num_workers)
workers = {"": 0, **{f"experts.{n}": n for n in range(job.num_workers)}}
tw.torch.place(model, workers)
compiled = torch.compile(model, backend="tensorwire", fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(1)

for step in range(STEPS):
    tokens = torch.randn(48 + 4 * (step % 5), WIDTH, generator=generator)
    optimizer.zero_grad()
    loss = compiled(tokens, tokens.abs().sum(1))
    loss.backward()
    optimizer.step()
    if job.rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: {len(tokens)} tokens, loss {loss.item():.3f}")
