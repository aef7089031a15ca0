"""Reduced models, with random weights and inputs, whose graphs are what users' models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Inputs = dict[str, torch.Tensor]


class Convolutions(nn.Module):
    """Convolutions, pooling, batch norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)),
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.features(x), labels)


class Cells(nn.Module):
    """LSTM and GRU, as written-out cells."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(16, 16), nn.GRUCell(16, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h, c, g = (torch.zeros(len(x), 16, dtype=x.dtype) for _ in range(3))
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
        return F.cross_entropy(self.head(g), labels)


def _words(seed: int = 0) -> Inputs:
    ids = torch.randint(0, 500, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def _pictures(*shape: int, name: str = "x") -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator),
        "labels": torch.randint(0, 10, shape[:1], generator=generator),
    }


_SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT = {**_SMALL, "vocab_size": 500, "max_position_embeddings": 128}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "use_cache": False}


def _transformer(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "convolutions": (Convolutions, _pictures(4, 3, 64, 64)),
    "cells": (Cells, _pictures(4, 3, 16)),
    "gpt2": (
        _transformer(
            *("GPT2Config", "GPT2LMHeadModel"),
            n_layer=2,
            n_embd=64,
            n_head=4,
            vocab_size=500,
            n_positions=128,
            use_cache=False,
        ),
        _words(),
    ),
    "bert": (_transformer("BertConfig", "BertForMaskedLM", **_TEXT), _words()),
    "llama": (_transformer("LlamaConfig", "LlamaForCausalLM", **_GROUPED), _words()),
    "mixtral": (
        _transformer("MixtralConfig", "MixtralForCausalLM", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
        _words(),
    ),
    "vit": (
        _transformer("ViTConfig", "ViTForImageClassification", **_SMALL, image_size=32, patch_size=8, num_labels=10),
        _pictures(2, 3, 32, 32, name="pixel_values"),
    ),
}
TRANSFORMERS = {"gpt2", "bert", "llama", "mixtral", "vit"}
