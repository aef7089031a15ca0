"""Models that are cut: the papers' six with reduced widths, and transformers with random weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from tensorwire import models as papers

Inputs = Callable[[torch.Generator], dict[str, torch.Tensor]]
_TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT = {**_TINY, "vocab_size": 200, "max_position_embeddings": 64}

DROPPING = ("alexnet", "vgg16")  # some values, by chance
SHRINK = {"alexnet": 32, "inception": 16, "vgg16": 32, "lstm": 32, "gru": 32, "fcn5": 64}
TRANSFORMERS: tuple[str, ...] = ("gpt2", "bert", "llama", "t5", "vit")
if Version(version("transformers")) >= Version("5.23"):  # before, torch could not capture its experts as one graph
    TRANSFORMERS += ("mixtral",)
ALL = (*SHRINK, *TRANSFORMERS)


def build(name: str, dropout: float = 0.0) -> nn.Module:
    """A model in training mode; it takes keyword arguments and returns its loss, alone or as ``.loss``."""
    torch.manual_seed(0)
    model = papers.MODELS[name].build(SHRINK[name]) if name in SHRINK else _transformer(name, dropout)
    return model.train()


def _transformer(name: str, dropout: float) -> nn.Module:
    import transformers as hf

    drop: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if name == "gpt2":
        sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 200, "n_positions": 64}
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, use_cache=False))
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**_TEXT, **drop))
    if name == "vit":
        sizes = {"image_size": 16, "patch_size": 8, "num_labels": 10}
        return hf.ViTForImageClassification(hf.ViTConfig(**_TINY, **sizes, **drop))
    if name == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 200}
        config = hf.T5Config(**sizes, dropout_rate=dropout, use_cache=False, decoder_start_token_id=0)
        return hf.T5ForConditionalGeneration(config)
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, num_key_value_heads=2, use_cache=False))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "use_cache": False}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_TEXT, **experts))


def inputs(name: str, step: int, size: int = 2) -> dict[str, torch.Tensor]:
    """The arguments of step ``step``."""
    generator = torch.Generator().manual_seed(step)
    if name in SHRINK:
        batch, *labels = papers.MODELS[name].inputs(size, generator)
        return {"batch": batch, **({"labels": labels[0]} if labels else {})}
    if name == "vit":
        pixels = torch.randn(size, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 10, (size,), generator=generator)}
    text = torch.randint(0, 200, (size, 16), generator=generator)
    return {"input_ids": text, "labels": text.clone()}


def loss_of(result: Any) -> torch.Tensor:
    """The loss, of a tensor or of what transformers return."""
    return result if isinstance(result, torch.Tensor) else result.loss


def cut(model: nn.Module, workers: int, seed: int) -> dict[str, int]:
    """Random modules on random workers; where nothing else is said, the first."""
    draw = random.Random(seed)
    placed = {"": 0}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if path and id(module) not in seen and draw.random() < 0.4:
            placed[path] = draw.randrange(workers)
        seen.add(id(module))
    return placed
