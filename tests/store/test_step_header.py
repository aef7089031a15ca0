"""The head of a round: what was packed comes out, and nothing else is believed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.errors import ProtocolError
from tensorwire.store.step_header import StepHeader, StepOperation, clipping, header_bytes, pack_header, unpack_header


@settings(derandomize=True)
@given(
    st.sampled_from(list(StepOperation)),
    st.integers(0, 2**64 - 1),
    st.lists(st.floats(allow_nan=False), max_size=9).map(tuple),
    st.floats(0, allow_infinity=False),
)
def test_round_trip(operation: StepOperation, step: int, options: tuple[float, ...], max_norm: float) -> None:
    head = StepHeader(operation, step, options, max_norm)
    block = pack_header(head)
    assert len(block) == header_bytes(len(options))
    assert unpack_header(memoryview(block), len(options)) == head


@pytest.mark.parametrize("at", [0, 4, 6, 23, 31, 36])
def test_other_bytes_are_refused(at: int) -> None:
    block = bytearray(pack_header(StepHeader(StepOperation.UPDATE, 5, (1.0, 2.0), 1.0)))
    block[at] ^= 0xC0
    with pytest.raises(ProtocolError):
        unpack_header(memoryview(block), 2)


def test_clipping_is_as_in_torch() -> None:
    assert clipping(0.5, 1.0) == 1.0
    assert clipping(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clipping(math.inf, 1.0) == 0.0
    assert math.isnan(clipping(math.nan, 1.0))
