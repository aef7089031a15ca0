"""The models have the papers' sizes; no memory is made for them."""

from __future__ import annotations

import pytest

from tensorwire.bench.models import MODELS, TINY, find

KIB, MIB = 2**10, 2**20

# MiB, variables, parameters, mean MiB, median KiB, largest MiB, below 4 KiB, from 1 MiB on: as far as a table tells.
TABLE = {
    "alexnet": ("176.42", 16, 46_247_882, "11.03", "53", "100", 6, 6),
    "inception": ("92.90", 196, 24_353_332, "0.474", "3.2", "9.4", 99, 21),
    "vgg16": ("512.32", 32, 134_301_514, "16.0", "16", "392", 14, 11),
    "lstm": ("35.93", 14, 9_417_704, "2.57", "4096", "4", 1, 9),
    "gru": ("27.92", 11, 7_319_528, "2.54", "4096", "4", 1, 7),
    "fcn5": ("204.47", 10, 53_600_266, "20.4", "88", "64", 1, 4),
}


def like(value: float, text: str) -> bool:
    """Whether ``value``, rounded to as many digits, is ``text``."""
    return f"{value:.{len(text.partition('.')[2])}f}" == text


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_table(name: str) -> None:
    size, variables, parameters, mean, median, largest, small, large = TABLE[name]
    model = find(name)
    assert like(model.nbytes / MIB, size), model.nbytes / MIB
    assert (len(model.tensors), model.parameters) == (variables, parameters)
    assert like(model.mean / MIB, mean), model.mean / MIB
    assert like(model.median / KIB, median), model.median / KIB
    assert like(model.largest / MIB, largest), model.largest / MIB
    assert (model.small, model.large) == (small, large)


def test_gpt2_small_has_its_parameters() -> None:
    assert (MODELS["gpt2"].parameters, len(MODELS["gpt2"].tensors)) == (124_439_808, 148)


def test_tiny_has_odd_sizes() -> None:
    assert any(t.elements % 16 for t in TINY.tensors)
