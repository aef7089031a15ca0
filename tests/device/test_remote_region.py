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
NAMES = st.sampled_from(["loopback", "shm", "tcp", "verbs"]) | st.from_regex(r"[a-z][a-z0-9_-]{0,7}", fullmatch=True)
REGIONS = st.builds(
    RemoteRegion,
    NAMES,
    U64,
    st.integers(0, 2**48 - 1),
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
@given(REGIONS, st.integers(0, 15), st.integers(0, 255))
def test_a_damaged_head_is_refused(region: RemoteRegion, at: int, value: int) -> None:
    data = bytearray(region.pack())
    data[at] = value
    try:
        got = RemoteRegion.unpack(bytes(data))
    except ArgumentError:
        return
    # Only the access, the length and the name have other lawful values.
    assert got.pack() == data
    assert at > 0 or got == region


def test_every_corrupt_form_is_refused() -> None:
    good = RemoteRegion("tcp", 1, 2, "write").pack()
    wrong = [good[:n] for n in range(32)] + [good + b"\0", good * 2, b"\0" * 32, pickle.dumps(good)]
    wrong += [bytes([version]) + good[1:] for version in range(256) if version != 2]
    wrong += [good[:1] + bytes([access]) + good[2:] for access in range(2, 256)]
    names = (b"", b"TCP", b"1tcp", b"-tcp", b"t p", b"tc\0p", b"\0tcp", b"tcp\n", b"t\xe9p", b"\xc3\xa9", b"\xff" * 8)
    wrong += [good[:8] + name.ljust(8, b"\0") + good[16:] for name in names]
    for data in [*wrong, None, 32, "x" * 32, [0] * 32]:
        with pytest.raises(ArgumentError):
            RemoteRegion.unpack(data)  # type: ignore[arg-type]


def test_what_does_not_fit_is_not_packed() -> None:
    for region in (
        RemoteRegion("carrier pigeon", 1, 2, "write"),
        RemoteRegion("nine_char", 1, 2, "write"),
        RemoteRegion("", 1, 2, "write"),
        RemoteRegion("t\u00e9l\u00e9", 1, 2, "write"),
        RemoteRegion("tcp", 2**64, 2, "write"),
        RemoteRegion("tcp", 1, 2**48, "write"),
        RemoteRegion("tcp", 1, -1, "write"),
        RemoteRegion("tcp", 1, 2, "write", 2**64),
    ):
        with pytest.raises(ArgumentError):
            region.pack()
