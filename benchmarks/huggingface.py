"""Models of the package transformers for ``graph``: their configurations with random weights, no dropout.

Widths, depths and heads are those of models that people know, or near them; ``shrink`` divides the widths. Each is
wrapped, so that it takes a batch and returns its loss as the models of ``models.py`` do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorwire.bench.models import CLASSES, Model, images

_TOKENS = 64
_BERT_WORDS, _LLAMA_WORDS = 30522, 32000
_DRAWN = 1900  # words that a shrunken vocabulary has, too
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Loss(nn.Module):
    """``model``'s own loss; what it is given goes by the names ``names``."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """The mean loss of the batch."""
        loss: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).loss
        return loss


def _depth(shrink: int) -> int:
    return 12 if shrink == 1 else 2


def bert(shrink: int = 1) -> nn.Module:
    """BERT-base with its head for masked words, whose matrix is that of the embedding."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=_BERT_WORDS // shrink,
        hidden_size=768 // shrink,
        intermediate_size=3072 // shrink,
        num_hidden_layers=_depth(shrink),
        **_NO_DROPOUT,
    )
    return Loss(transformers.BertForMaskedLM(config), "input_ids", "labels")


def llama(shrink: int = 1) -> nn.Module:
    """Llama's layers in the size of GPT-2 small: 12 of width 768, 12 heads, 4 of keys and values."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=_LLAMA_WORDS // shrink,
        hidden_size=768 // shrink,
        intermediate_size=2048 // shrink,
        num_hidden_layers=_depth(shrink),
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        use_cache=False,
    )
    return Loss(transformers.LlamaForCausalLM(config), "input_ids", "labels")


def vit(shrink: int = 1) -> nn.Module:
    """ViT-small on 224 x 224: patches of 16, 12 layers of width 384, 6 heads."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=384 // shrink,
        intermediate_size=1536 // shrink,
        num_hidden_layers=_depth(shrink),
        num_attention_heads=6,
        **{"num_labels": CLASSES, **_NO_DROPOUT},
    )
    return Loss(transformers.ViTForImageClassification(config), "pixel_values", "labels")


def words(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Tokens by chance, int64 [size, 64], and the same once more as labels."""
    text = torch.randint(_DRAWN, (size, _TOKENS), generator=generator)
    return text, text.clone()


MODELS = {
    model.name: model
    for model in (
        Model("bert", "BERT-base", 1, bert, words),
        Model("llama", "Llama of GPT-2's size", 1, llama, words),
        Model("vit", "ViT-small", 2, vit, images(224)),
    )
}
