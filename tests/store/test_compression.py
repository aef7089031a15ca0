"""Codes: their sizes, what comes back, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensorwire import errors
from tensorwire.store.compression import (
    Blocks,
    Compression,
    TopK,
    TwoBits,
    parse_compression,
    saturated,
)
from tensorwire.store.half_precision import half_to_single

NAMES = ["fp16", "bf16", "2bit(0.5)", "topk(0.1)", "topk(0.01)", "int8(256)", "int8(7)"]
Array = np.ndarray[Any, Any]
rows = hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32, allow_subnormal=True))


def made(name: str) -> Compression:
    found = parse_compression(name)
    assert found is not None
    return found


def round_trip(compression: Compression, values: Array) -> Array:
    code = np.full(compression.nbytes(len(values)), 0xAA, np.uint8)
    back = np.full(len(values), 7, np.float32)
    with np.errstate(all="ignore"):
        compression.encode(values, code)
        again = np.zeros_like(code)
        compression.encode(values.copy(), again)
        compression.decode(code, back)
    assert bytes(code) == bytes(again), "every byte is written, the same each time"
    return back


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(values=rows)
@example(values=np.array([1, np.finfo(np.float32).max], np.float32))
@example(values=np.array([9.08e-43], np.float32))
def test_what_comes_back_is_near_and_as_finite_as_what_went(name: str, values: Array) -> None:
    compression = made(name)
    back = round_trip(compression, values)
    finite = np.isfinite(values)
    if not finite.all():
        assert not np.isfinite(back).all()
    if not name.startswith("topk"):
        assert not np.isfinite(back[~finite]).any()
    if not name.startswith("int8"):  # where a whole block turns into NaN
        assert np.isfinite(back[finite]).all()
    both = np.isfinite(back) & finite
    error = np.abs(back[both].astype("f8") - values[both])
    size = np.abs(values[both].astype("f8"))
    largest = size.max(initial=0)
    bounds = {
        "fp16": np.maximum(np.maximum(size * 2**-11, 2**-25), size - 65504),
        "bf16": np.maximum(size * 2**-8, 2.0**-134),
        "2bit(0.5)": np.where(size < 0.5, size, np.abs(size - 0.5)),
    }
    scaled = largest * 1.0001 / 254 + 127 * 2.0**-150  # half a step, and 127 times the rounding of a subnormal scale
    bound = bounds.get(name, scaled if name.startswith("int8") else largest)
    assert (error <= bound).all()


def test_sizes() -> None:
    counts = (0, 1, 15, 16, 17, 1000)
    assert [made("fp16").nbytes(n) for n in counts] == [2 * n for n in counts]
    assert [made("bf16").nbytes(n) for n in counts] == [2 * n for n in counts]
    assert [made("2bit(1)").nbytes(n) for n in counts] == [0, 4, 4, 4, 8, 252]
    assert [made("topk(0.01)").nbytes(n) for n in counts] == [0, 8, 8, 8, 8, 80]
    assert [made("int8").nbytes(n) for n in counts] == [0, 5, 19, 20, 21, 1016]


def test_16_bit_floats_are_those_of_torch() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    tensor = torch.from_numpy(values)
    with np.errstate(all="ignore"):
        for kind in (torch.bfloat16, torch.float16):
            ours = half_to_single(saturated(values, str(kind).removeprefix("torch.")))
            theirs = tensor.to(kind).float().numpy()
            same = np.isfinite(theirs) | ~np.isfinite(values)  # torch lets large values become inf
            np.testing.assert_array_equal(ours.astype(np.float32)[same], theirs[same])
            assert np.isfinite(ours[np.isfinite(values)]).all()
    largest = np.array([3.4028e38, -3.4028e38, 1e6], np.float32)
    assert saturated(largest, "bfloat16").tolist()[:2] == [0x7F7F, 0xFF7F]
    assert saturated(largest, "float16").tolist() == [65504, -65504, 65504]


def test_2bit_says_below_above_or_between() -> None:
    values = np.array([0.5, -0.5, 0.49, -0.49, 3, -3, np.nan, np.inf, 0], np.float32)
    expected = np.array([0.5, -0.5, 0, 0, 0.5, -0.5, np.nan, np.nan, 0], np.float32)
    np.testing.assert_array_equal(round_trip(TwoBits(0.5), values), expected)


def test_topk_takes_the_first_of_equals() -> None:
    values = np.array([1, -2, 2, 0, 2, -2, 1, 0.5, 3, 1], np.float32)
    expected = np.array([0, -2, 2, 0, 0, 0, 0, 0, 3, 0], np.float32)
    np.testing.assert_array_equal(round_trip(TopK(0.3), values), expected)
    np.testing.assert_array_equal(round_trip(TopK(0.01), np.zeros(5, np.float32)), np.zeros(5))
    nan = round_trip(TopK(0.2), np.array([np.inf, 1, np.nan, 9, 1, 1], np.float32))
    np.testing.assert_array_equal(nan, [np.inf, 0, np.nan, 0, 0, 0])


def test_topk_refuses_an_index_that_is_none() -> None:
    code = np.array([5, 0], np.uint32).view(np.uint8)
    with pytest.raises(errors.ProtocolError, match="names value 5, and there are 5"):
        TopK(0.1).decode(code, np.zeros(5, np.float32))


def test_a_block_of_int8_has_its_own_scale() -> None:
    values = np.array([127, -1, 1270, 10, 0, 0, 0.127], np.float32)
    np.testing.assert_allclose(round_trip(Blocks(2), values), values, rtol=1e-6)
    values[1] = np.inf
    back = round_trip(Blocks(2), values)
    assert np.isnan(back[:2]).all()
    np.testing.assert_allclose(back[2:], values[2:], rtol=1e-6)


# ---- names


@pytest.mark.parametrize("name", [*NAMES, "2bit(1e-3)", "topk(0.123456789)", "int8(1)"])
def test_a_name_gives_the_same_code_again(name: str) -> None:
    compression = made(name)
    assert made(str(compression)) == compression


def test_names_that_mean_the_same_are_the_same() -> None:
    assert parse_compression(None) is None
    assert str(made("int8")) == "int8(256)"
    assert made("topk(1e-2)") == made("topk(0.01)")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zip", "compression must be 'fp16', 'bf16', '2bit(threshold)', 'topk(fraction)' or 'int8(block)', or None"),
        (2, "or None, not 2"),
        ("fp16(2)", "compression='fp16' has no setting, and there is '2'"),
        ("2bit", "2bit needs a threshold above 0, as in '2bit(0.5)', not '2bit'"),
        ("2bit(0)", "2bit needs a threshold above 0, as in '2bit(0.5)', not '2bit(0)'"),
        ("2bit(-1)", "2bit needs a threshold above 0"),
        ("2bit(1e-300)", "2bit needs a threshold above 0"),
        ("2bit(inf)", "2bit needs a threshold above 0"),
        ("topk", "topk needs a fraction above 0 and below 1, as in 'topk(0.01)', not 'topk'"),
        ("topk(0)", "topk needs a fraction above 0 and below 1"),
        ("topk(1)", "topk needs a fraction above 0 and below 1"),
        ("topk(nan)", "topk needs a fraction above 0 and below 1"),
        ("topk(a)", "topk needs a fraction above 0 and below 1"),
        ("int8(0)", "int8 needs a block of 1 or more values, as in 'int8(256)', not '0'"),
        ("int8(2.5)", "int8 needs a block of 1 or more values"),
    ],
)
def test_what_is_no_compression_is_refused(name: Any, message: str) -> None:
    with pytest.raises(errors.ArgumentError) as refused:
        parse_compression(name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_fraction_is_rounded_up() -> None:
    for count in range(1, 300):
        assert made("topk(0.01)").nbytes(count) == 8 * math.ceil(0.01 * count)
