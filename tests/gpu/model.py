"""The models that are trained: a GPT-2 of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """How large it is. ``checkpoints``: backward computes the layers again, which saves memory."""

    layers: int = 48
    width: int = 1600
    heads: int = 25
    vocabulary: int = 50257
    length: int = 1024
    checkpoints: bool = False


XL = Shape()
TINY = Shape(layers=2, width=64, heads=2, vocabulary=512, length=16)


class Block(nn.Module):
    """A layer: attention and what follows it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(heads.transpose(1, 2).reshape(x.shape))
        y: Tensor = x + self.narrow(F.gelu(self.wide(self.between(x)), approximate="tanh"))
        return y


class GPT(nn.Module):
    """The embedding is the last layer's weight, too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.checkpoints = shape.checkpoints
        self.words, self.places = nn.Embedding(shape.vocabulary, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        for p in (self.words.weight, self.places.weight):
            nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """The loss."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        scores = F.linear(self.last(x), self.words.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten())


def build(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GPT:
    """A model on the device, made there."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return GPT(shape)
    finally:
        torch.set_default_dtype(before)


def tokens(shape: Shape, batch: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens, and those that are to follow."""
    drawn = torch.randint(shape.vocabulary, (batch, shape.length + 1), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1].contiguous().to(device), drawn[:, 1:].contiguous().to(device)
