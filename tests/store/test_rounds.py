"""The head of a round: what was packed comes out, and nothing else is believed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.errors import ProtocolError
from tensorwire.store.rounds import Operation, head_bytes, pack_head, unpack_head


@settings(derandomize=True)
@given(
    st.sampled_from(list(Operation)),
    st.integers(0, 2**64 - 1),
    st.lists(st.floats(allow_nan=False), max_size=9),
    st.binary(max_size=30),
)
def test_round_trip(operation: Operation, step: int, options: list[float], present: bytes) -> None:
    block = pack_head(operation, step, options, present)
    assert len(block) == head_bytes(len(options), len(present))
    head = unpack_head(memoryview(block), len(options), len(present))
    assert (head.operation, head.step, list(head.options), head.present) == (operation, step, options, present)


@pytest.mark.parametrize("at", [0, 4, 6, 16, 20])
def test_other_bytes_are_refused(at: int) -> None:
    block = bytearray(pack_head(Operation.UPDATE, 5, [1.0, 2.0], b"\1\0\1"))
    block[at] ^= 0x40
    with pytest.raises(ProtocolError):
        unpack_head(memoryview(block), 2, 3)
