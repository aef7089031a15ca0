"""The models have the papers' sizes; no memory is made for them."""

from __future__ import annotations

from tensorwire.models import MODELS, TINY

# MiB, variables, parameters.
TABLE = {
    "alexnet": (176.42, 16, 46_247_882),
    "inception": (92.90, 196, 24_353_332),
    "vgg16": (512.32, 32, 134_301_514),
    "lstm": (35.93, 14, 9_417_704),
    "gru": (27.92, 11, 7_319_528),
    "fcn5": (204.47, 10, 53_600_266),
    "gpt2": (474.70, 148, 124_439_808),
}


def test_the_papers_table() -> None:
    found = {name: (round(m.nbytes / 2**20, 2), len(m.tensors), m.parameters) for name, m in MODELS.items()}
    assert found == TABLE


def test_tiny_has_odd_sizes() -> None:
    assert any(t.elements % 16 for t in TINY.tensors)
