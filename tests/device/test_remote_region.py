"""A remote region's wire form: fixed, versioned, length-checked."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.device import RemoteRegion
from tensorwire.errors import ArgumentError
from tensorwire.testing.fixtures import SEEDED

U64 = st.integers(0, 2**64 - 1)
REGIONS = st.builds(
    RemoteRegion,
    st.sampled_from(["loopback", "shm", "tcp", "verbs"]),
    U64,
    U64,
    st.sampled_from(["read", "write"]),
    U64,
)


@SEEDED
@given(REGIONS)
def test_round_trip(region: RemoteRegion) -> None:
    data = region.pack()
    assert len(data) == 32
    for form in (data, bytearray(data), memoryview(data)):
        assert RemoteRegion.unpack(form) == region  # type: ignore[arg-type]


@SEEDED
@given(REGIONS, st.integers(0, 7), st.integers(0, 255))
def test_a_damaged_head_is_refused(region: RemoteRegion, at: int, value: int) -> None:
    data = bytearray(region.pack())
    data[at] = value
    try:
        got = RemoteRegion.unpack(bytes(data))
    except ArgumentError:
        return
    # Only the device and the access have other lawful values.
    assert got.pack() == data
    assert at in (6, 7) or got == region


def test_every_corrupt_form_is_refused() -> None:
    good = RemoteRegion("tcp", 1, 2, "write").pack()
    wrong = [good[:n] for n in range(32)] + [good + b"\0", good * 2, b"\0" * 32, pickle.dumps(good)]
    wrong += [good[:at] + bytes([value]) + good[at + 1 :] for at in range(6) for value in (0xFF, good[at] ^ 1)]
    wrong += [good[:6] + bytes([device]) + good[7:] for device in range(4, 256)]
    wrong += [good[:7] + bytes([access]) + good[8:] for access in range(2, 256)]
    for data in [*wrong, None, 32, "x" * 32, [0] * 32]:
        with pytest.raises(ArgumentError):
            RemoteRegion.unpack(data)  # type: ignore[arg-type]


def test_what_does_not_fit_is_not_packed() -> None:
    for region in (
        RemoteRegion("carrier pigeon", 1, 2, "write"),
        RemoteRegion("tcp", 2**64, 2, "write"),
        RemoteRegion("tcp", 1, -1, "write"),
        RemoteRegion("tcp", 1, 2, "write", 2**64),
    ):
        with pytest.raises(ArgumentError):
            region.pack()
