"""The copies that a plan predicts for a step are those that a step makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensorwire as tw
from tensorwire.graph.plan import Plan
from tensorwire.observe import counters
from tensorwire.torch.graph.execution.job_group import group_of
from tensorwire.torch.graph.planning.plan_model import plan_model
from tensorwire.torch.graph.planning.trace_model import trace_model
from tests.harness.jobs import run_job

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WIDTH = 32
_TEXT = {"vocab_size": 200, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_TEXT, "intermediate_size": 64, "max_position_embeddings": 64}


class Wrapped(nn.Module):
    """A model of transformers that takes its tensors in order, and returns all that it has to say."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...], **more: Any) -> None:
        super().__init__()
        self.inner, self.names, self.more = inner, names, more

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        said = self.inner(**dict(zip(self.names, given, strict=True)), **self.more)
        return tuple(value for value in said.values() if isinstance(value, torch.Tensor))


class Experts(nn.Module):
    """As in examples/experts.py: how many tokens an expert gets is known only then."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = torch.softmax(self.gate(tokens), 1)
        chosen, mixed = weights.argmax(1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == number).squeeze(1)
            mixed = mixed.index_add(0, mine, expert(tokens[mine]) * weights[mine, number].unsqueeze(1))
        return (self.head(tokens + mixed).square().mean(),)


def t5() -> nn.Module:
    import transformers as hf

    sizes = {"vocab_size": 200, "d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    return Wrapped(hf.T5ForConditionalGeneration(config), ("input_ids", "labels"))


def clip() -> nn.Module:
    import transformers as hf

    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    sizes = {key: value for key, value in _TEXT.items() if key not in ("vocab_size", "max_position_embeddings")}
    text = {**_TEXT, **ids, "projection_dim": 16}
    vision = {**sizes, "image_size": 16, "patch_size": 8, "projection_dim": 16}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return Wrapped(hf.CLIPModel(config), ("input_ids", "pixel_values"), return_loss=True)


def mixtral() -> nn.Module:
    import transformers as hf

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "use_cache": False}
    return Wrapped(hf.MixtralForCausalLM(hf.MixtralConfig(**_TEXT, **experts)), ("input_ids", "labels"))


def gpt2() -> nn.Module:
    import transformers as hf

    ids = {"bos_token_id": 0, "eos_token_id": 1}
    sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "vocab_size": 200, "n_positions": 64}
    config = hf.GPT2Config(**sizes, **ids, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return Wrapped(hf.GPT2LMHeadModel(config), ("input_ids", "labels"))


def _draw(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _text(step: int) -> tuple[torch.Tensor, ...]:
    text = torch.randint(3, 200, (2, 16), generator=_draw(step))
    return text, text.clone()


def _pictures(step: int) -> tuple[torch.Tensor, ...]:
    return _text(step)[0], torch.randn(2, 3, 16, 16, generator=_draw(step))


def _tokens(step: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(24, WIDTH, generator=_draw(step)),)


Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]], dict[str, int]]
A, B = 0, 1
CASES: dict[str, Case] = {
    "t5": (t5, _text, {"": A, "inner.decoder": B, "inner.lm_head": B}),
    "clip": (clip, _pictures, {"": A, "inner.vision_model": B, "inner.visual_projection": B}),
    "mixtral": (mixtral, _text, {"": A, "inner.model.layers.1": B}),
    "gpt2": (gpt2, _text, {"": A, "inner.transformer.h.1": B}),
    "experts": (Experts, _tokens, {"": A, "experts.1": B}),
}


def predicted(these: list[Plan], worker: str) -> tuple[int, int]:
    """Copies and bytes of ``worker`` in a step that runs each of these plans once."""
    ours = [copies for plan in these for copies in plan.copies if copies.worker == worker]
    return sum(copies.count for copies in ours), sum(copies.nbytes for copies in ours)


def count(job: tw.Job, name: str) -> dict[str, tuple[int, int]]:
    """Copies and bytes of the last of some steps, and those that its plans predict."""
    make, inputs, workers = CASES[name]
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch.manual_seed(0)
    compiled = torch.compile(make(), backend="tensorwire", options={"workers": workers})
    made = counters.since(counters.snapshot())
    for step in range(5):
        before = counters.snapshot()
        compiled(*inputs(step))[0].backward()
        made = counters.since(before)
    group = group_of(job._worker)
    return {
        "made": (made.copies, made.copied_bytes),
        "planned": predicted([plan for plan, _ in group.made], group.me),
    }


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("experts", "shm"),
        pytest.param("t5", "shm", marks=pytest.mark.long),
        pytest.param("clip", "shm", marks=pytest.mark.long),
        pytest.param("mixtral", "tcp", marks=pytest.mark.long),
        pytest.param("gpt2", "tcp", marks=pytest.mark.long),
    ],
)
def test_a_step_makes_the_copies_that_its_plan_predicts(name: str, device: str) -> None:
    results = run_job(count, name, workers=2, servers=0, device=device).ok()
    for result in results:
        made, planned = result["made"], result["planned"]
        assert made[0] == planned[0]
        if name != "experts":  # the bytes of what has any size are not known before
            assert made[1] == planned[1]
    if name == "gpt2":  # and so they are planned without a job
        make, inputs, workers = CASES[name]
        before = [planned.analysis.plan for planned in plan_model(trace_model(make, lambda: inputs(0)), 2, workers)]
        assert [result["planned"] for result in results] == [predicted(before, worker) for worker in before[0].workers]
        for plan in before:
            written = json.loads(json.dumps(plan.to_json()))["copies"]
            assert [one["worker"] for one in written] == [one.worker for one in plan.copies]
            assert all(one["count"] == one["sent"] + one["received"] for one in written)
