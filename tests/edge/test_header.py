"""Headers: what was packed comes out again, and nothing else is believed."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tensorwire.device import RemoteRegion
from tensorwire.edge import Spec
from tensorwire.edge.header import HEADER, MOST_DIMENSIONS, TENSOR, pack_number, pack_tensor, step_of, unpack
from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, ProtocolError

PROPERTY = settings(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
AT = 64
NBYTES = AT + HEADER + 8
ANY = 2**63


def room() -> memoryview:
    return memoryview(bytearray(b"\xa5" * NBYTES))


def packed(value: Any, step: int = 1) -> memoryview:
    slot = room()
    pack_number(slot, AT, step, value)
    return slot


dtypes = st.sampled_from(list(DTYPES))
shapes = st.lists(st.integers(0, 40), max_size=MOST_DIMENSIONS).map(tuple)
values = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans())


@PROPERTY
@given(shape=shapes, dtype=dtypes, step=st.integers(1, 2**64 - 1), key=st.integers(0, 2**64 - 1), at=st.integers(0, 99))
def test_tensors_come_out_as_they_went_in(shape: tuple[int, ...], dtype: str, step: int, key: int, at: int) -> None:
    spec, slot = Spec(shape, dtype), room()
    assert pack_tensor(slot, AT, step, spec) == HEADER
    header = unpack(slot, AT, spec.nbytes)
    assert (header.kind, header.step, header.nbytes, header.spec) == (TENSOR, step, spec.nbytes, spec)
    assert header.region is None
    region = RemoteRegion("tcp", key, at + spec.nbytes, "read", 4096)
    pack_tensor(slot, AT, step, spec, region=region.pack(), offset=at)
    header = unpack(slot, AT, ANY)
    assert (header.spec, header.region, header.offset) == (spec, region, at)
    assert set(slot[:AT]) == {0xA5}, "it wrote in front of the header"


@PROPERTY
@given(data=st.data(), shape=shapes, dtype=dtypes)
def test_strides_come_out_as_they_went_in(data: st.DataObject, shape: tuple[int, ...], dtype: str) -> None:
    lengths = st.lists(st.integers(0, 2**20), min_size=len(shape), max_size=len(shape)).map(tuple)
    spec, slot = Spec(shape, dtype, data.draw(lengths)), room()
    pack_tensor(slot, AT, 1, spec, offset=192)
    header = unpack(slot, AT, ANY, memory=192 + spec.nbytes)
    assert (header.spec, header.nbytes, header.offset) == (spec, spec.nbytes, 192)
    with pytest.raises(ProtocolError):
        unpack(slot, AT, ANY, memory=191 + spec.nbytes)


def test_strides_of_a_contiguous_tensor_are_none() -> None:
    assert Spec((2, 0, 3), "int8", (3, 3, 1)) == Spec((2, 0, 3), "int8")
    assert Spec((2, 3), "float32", (1, 2)).nbytes == 24
    assert Spec((2, 3), "float32", (8, 1)).nbytes == 44  # gaps included
    assert Spec((4, 3), "float32", (0, 1)).nbytes == 12  # expanded: its memory, once
    assert Spec((4, 0), "float32", (9, 1)).nbytes == 0
    for strides in ((1,), (1, -1), (1, 1, 1)):
        with pytest.raises(ArgumentError, match="one stride per dimension"):
            Spec((2, 2), "int8", strides)


def test_the_step_can_be_read_alone() -> None:
    slot = packed(7, 2**64 - 1)
    assert step_of(slot, AT) == 2**64 - 1


@PROPERTY
@given(value=values, step=st.integers(1, 2**64 - 1))
def test_numbers_come_out_as_they_went_in(value: Any, step: int) -> None:
    header = unpack(packed(value, step), AT, 0)
    assert header.step == step
    assert type(header.value) is type(value)
    assert header.value == value or (math.isnan(value) and math.isnan(header.value))  # type: ignore[arg-type]


def test_the_sign_of_zero_and_infinities() -> None:
    for value in (-0.0, math.inf, -math.inf):
        found: Any = unpack(packed(value), AT, 0).value
        assert struct.pack("<d", found) == struct.pack("<d", value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**63, "64 bits"),
        (-(2**63) - 1, "64 bits"),
        ("text", "not str"),
        (None, "not NoneType"),
        (b"bytes", "not bytes"),
        ([1], "not list"),
        (1j, "not complex"),
        (np.float64(1), r"item\(\)"),
    ],
)
def test_numbers_that_are_refused(value: Any, why: str) -> None:
    slot = room()
    with pytest.raises(ArgumentError, match=why):
        pack_number(slot, AT, 1, value)
    assert set(slot) == {0xA5}, "something was written"


@pytest.mark.parametrize(
    "spec", [Spec((1,) * 9, "int8"), Spec((2**62, 2), "int8"), Spec((0, 2**62, 2), "int8"), Spec((2**61,), "int32")]
)
def test_tensors_that_are_refused(spec: Spec) -> None:
    slot = room()
    with pytest.raises(ArgumentError):
        pack_tensor(slot, AT, 1, spec)
    assert set(slot) == {0xA5}, "something was written"


def valid(slot: memoryview, bound: int) -> None:
    """What is believed is whole: its shape is its bytes, which lie where the header says."""
    header = unpack(slot, AT, bound)
    if header.kind == TENSOR:
        assert header.spec is not None
        assert header.spec.nbytes == header.nbytes <= bound
        assert len(header.spec.shape) <= MOST_DIMENSIONS
        if header.region is not None:
            assert header.offset + header.nbytes <= header.region.length
    else:
        assert header.nbytes == 0


@settings(PROPERTY, max_examples=1000)
@given(data=st.binary(min_size=HEADER, max_size=HEADER), begin=st.booleans())
@example(bytes(HEADER), True)
@example(b"\xff" * HEADER, True)
def test_random_bytes_are_refused(data: bytes, begin: bool) -> None:
    slot = room()
    slot[AT : AT + HEADER] = data
    if begin:
        slot[AT : AT + 6] = b"TWEH\x02\x01"
    try:
        valid(slot, ANY)
    except ProtocolError:
        return
    assert begin  # nobody guesses the magic


@settings(PROPERTY, max_examples=1000)
@given(st.data())
def test_what_was_changed_on_the_way_is_refused_or_whole(data: st.DataObject) -> None:
    slot = room()
    if data.draw(st.booleans()):
        spec = Spec(data.draw(shapes), data.draw(dtypes))
        region = RemoteRegion("shm", 7, spec.nbytes + 64, "read").pack() if data.draw(st.booleans()) else bytes(32)
        pack_tensor(slot, AT, 1, spec, region=region, offset=64 if any(region) else 0)
    else:
        pack_number(slot, AT, 1, data.draw(values))
    for _ in range(data.draw(st.integers(1, 3))):
        slot[AT + data.draw(st.integers(0, 199))] = data.draw(st.integers(0, 255))
    try:
        valid(slot, ANY)
    except ProtocolError:
        pass


def changed(slot: memoryview, at: int, data: bytes) -> memoryview:
    slot[AT + at : AT + at + len(data)] = data
    return slot


def tensor(spec: Spec = Spec((2, 3), "float32"), **options: Any) -> memoryview:  # noqa: B008
    slot = room()
    pack_tensor(slot, AT, 1, spec, **options)
    return slot


REGION = RemoteRegion("shm", 7, 24, "read").pack()

# Where the fields lie: docs/edges.md.
MALFORMED = {
    "another magic": changed(tensor(), 0, b"TWEG"),
    "another version": changed(tensor(), 4, b"\x01"),
    "kind 0": changed(packed(1), 5, b"\x00"),
    "kind 5": changed(packed(0), 5, b"\x05"),
    "an unknown dtype": changed(tensor(), 6, bytes([len(DTYPES)])),
    "rank 9": changed(tensor(), 7, b"\x09"),
    "a rank that hides a length": changed(tensor(), 7, b"\x01"),
    "a product that is not nbytes": changed(tensor(), 72, b"\x03"),
    "nbytes that is not the product": changed(tensor(), 16, b"\x19"),
    "a product that overflows": changed(tensor(), 72, (2**63).to_bytes(8, "little")),
    "an overflow beside an empty dimension": changed(tensor(Spec((0, 3), "int8")), 80, b"\xff" * 8),
    "strides that reach further than nbytes": changed(tensor(), 136, b"\x04"),
    "a stride behind the rank": changed(tensor(), 152, b"\x01"),
    "a stride that overflows": changed(tensor(Spec((1, 3), "int8")), 136, b"\xff" * 8),
    "a stride that overflows beside an empty dimension": changed(tensor(Spec((0, 3), "int8")), 144, b"\xff" * 8),
    "a tensor with a number": changed(tensor(), 32, b"\x01"),
    "no region": changed(tensor(region=REGION), 40, b"PWRR"),
    "a region that is too short": changed(tensor(region=REGION), 24, b"\x01"),
    "an offset that overflows": changed(tensor(region=REGION), 24, b"\xff" * 8),
    "an offset into no region": changed(tensor(), 24, b"\x01"),
    "a number with a shape": changed(packed(1), 72, b"\x01"),
    "a number with strides": changed(packed(1), 136, b"\x01"),
    "a number with a payload": changed(packed(1), 16, b"\x01"),
    "a number with an offset": changed(packed(1), 24, b"\x01"),
    "a number with a region": changed(packed(1), 40, REGION),
    "a bool that is 2": changed(packed(True), 32, b"\x02"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers(name: str) -> None:
    with pytest.raises(ProtocolError):
        unpack(MALFORMED[name], AT, ANY)


def test_dtypes_have_the_numbers_that_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "edges.md").read_text()
    listed = re.search(r"^Dtypes, from 0: (.*?)\.\n", page, re.M | re.S)
    assert listed is not None
    assert re.split(r",\s+", listed[1]) == list(DTYPES)


def test_more_than_the_bound_is_refused() -> None:
    assert unpack(tensor(), AT, 24).nbytes == 24
    with pytest.raises(ProtocolError, match="24 bytes on an edge for 23"):
        unpack(tensor(), AT, 23)


def test_a_slot_too_short_for_a_header() -> None:
    with pytest.raises(ProtocolError):
        unpack(tensor()[: AT + 100], AT, ANY)
