"""Numbers of bytes, written and rounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.sizes import round_up, size_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (12.5, "12.5 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (22 * 1024 + 20, "22 KiB"),
        (1_683_460, "1.61 MiB"),
        (10 * 2**20 - 1, "10 MiB"),
        (100 * 2**20 - 1, "100 MiB"),
        (2**20 - 1, "1 MiB"),
        (3 << 30, "3 GiB"),
        (1 << 52, "4096 TiB"),
    ],
)
def test_three_digits_and_a_unit(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_rounding_up_gives_the_nearest_multiple(number: int, multiple: int) -> None:
    rounded = round_up(number, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - number < multiple
