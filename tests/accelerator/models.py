"""The model whose training shows missing waits, and its data.

The model decides whether a missing wait can show at all: this one has a tied weight, a layer that workers leave out in
turn, which has buckets of its own, and another one that shares a bucket; a parameter that nobody uses, one that is
frozen; and its parameters are read between backward and step. Where no bucket lacks a gradient, nothing waits for that.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

TOKENS, WIDTH, LENGTH = 32, 16, 8


class Block(nn.Module):
    """Attention and a perceptron, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small GPT, and what real models have beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2048))
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", torch.full((), 0.5))
        self.extra = nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH))  # buckets of its own

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        y = self.embedding(x) * self.frozen
        for block in self.blocks:
            y = block(y)
        y = y + self.extra(y) * self.scale if extra else y + self.shift
        return self.head(y)


def built(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the next ones."""
    found = torch.randint(0, TOKENS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return found[:, :-1], found[:, 1:]


def loss(model: nn.Module, step: int, rank: int, on: torch.device | str) -> torch.Tensor:
    x, y = (each.to(on) for each in batch(step, rank))
    return loss_of(model, x, y, (step + rank) % 2 == 0)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, extra: bool) -> torch.Tensor:
    return F.cross_entropy(model(x, extra).reshape(-1, TOKENS).float(), y.reshape(-1))


def read(model: nn.Module) -> list[torch.Tensor]:
    """A use of all parameters, one after another, that nothing waits for."""
    return [p.detach().double().sum() for p in model.parameters()]
