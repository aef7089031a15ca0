"""The shape of Llama 3 70B, built on the meta device, without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorwire.errors import ArgumentError

_VOCABULARY, _TOKENS = 128256, 2048


class _Loss(nn.Module):
    """The loss alone: scores that were returned would get gradients, too."""

    def __init__(self, llama: nn.Module) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, tokens: Tensor) -> Any:
        return self.llama(input_ids=tokens, labels=tokens, use_cache=False).loss


def model(layers: int = 80) -> nn.Module:
    """Makes a module that computes, of a batch of tokens, the mean loss of the next token.

    Args:
        layers: How many there are.

    Raises:
        ArgumentError: ``transformers`` is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ArgumentError("llama-70b needs transformers: pip install transformers") from None

    shape = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=_VOCABULARY,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    return _Loss(LlamaForCausalLM(shape))


def tokens(size: int) -> tuple[Tensor, ...]:
    """int64 [size, 2048]."""
    return (torch.zeros(size, _TOKENS, dtype=torch.int64),)
