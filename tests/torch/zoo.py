"""Small models that use their parameters in unusual ways, each with inputs; used by several tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 24


class Tied(nn.Module):
    """One parameter in two modules: the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x.argsort(-1))).tanh())


class Functional(nn.Module):
    """A parameter that its module's forward never sees: the parent uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.first(x).tanh() * self.scale, self.second.weight, self.second.bias)


class Detached(nn.Module):
    """A weight used detached in an earlier layer than where it learns: its gradient is there while that one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.first(x), self.last.weight.detach()).tanh()
        return self.last(y)


class Shared(nn.Module):
    """One layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.inner(x).tanh()).tanh())


class Checkpointed(nn.Module):
    """Blocks that run again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Recurrent(nn.Module):
    """torch's own LSTM, and attention, whose output projection is used past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x.view(2, -1, WIDTH))
        return self.attention(y, y, y)[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old, and still in use
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 16)), nn.Tanh(), nn.Linear(16, 4))  # type: ignore[no-untyped-call]


def new_weight_norm() -> nn.Module:
    weight_norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(weight_norm(nn.Linear(WIDTH, 16)), nn.Tanh(), weight_norm(nn.Linear(16, 4)))


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 16)), nn.Tanh(), nn.Linear(16, 4))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "tied": Tied,
    "functional": Functional,
    "detached": Detached,
    "shared": Shared,
    "old weight norm": old_weight_norm,
    "weight norm": new_weight_norm,
    "spectral norm": spectral_norm,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "recurrent": Recurrent,
    "convolution": convolution,
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A model with values that depend on ``seed`` alone."""
    torch.manual_seed(seed)
    return MODELS[name]()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of worker ``rank`` in a step."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))
    return model(x).square().mean()
