"""Frames: whatever bytes come, there is a message or a ProtocolError."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.control import frames
from tensorwire.control.frames import Cause
from tensorwire.errors import ProtocolError

MESSAGES: list[frames.Message] = [
    frames.Join(1, "worker", 0, 12, "host"),
    frames.Welcome("job", 0, 2, 1, 1.0, 10.0),
    frames.Publish(1, "key", b"value", ["worker 1"]),
    frames.Lookup(2, "key", 1.5),
    frames.Compare(4, "plan", b"d", "text", 2, 60.0),
    frames.Gather(7, "collective 1", "job.barrier()", b"value", 2, 60.0),
    frames.ClockReading(6),
    frames.Answer(5, b"value"),
    frames.Fail(Cause("worker 0", "raised ValueError: x", "Traceback ...", 0.5)),
    frames.Left("worker", 1, -9),
    frames.Stopped("server", 1, 10.0),
    frames.Bye(),
    frames.Beat(),
    frames.Stats(3, {"bytes": 1 << 40, "rpcs": 0}, {"compute": 1.5}),
    frames.Stats(3, {}, {}, 4, 100, 640, {"loss": float("inf")}),
    frames.End(None),
    frames.End(Cause("worker 0", "died")),
    frames.End(Cause("worker 1", "finished after step 3", settle=3.0, kind="WorkerFinished")),
]


def body(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_survives_the_wire(message: frames.Message) -> None:
    data = frames.encode(message)
    assert frames.body_size(data[:4]) == len(data) - 4
    assert frames.decode(data[4:]) == message


@pytest.mark.parametrize("size", [0, frames.MOST_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=str(size)):
        frames.body_size(size.to_bytes(4, "big"))


def test_the_largest_frame_fits_and_one_byte_more_does_not() -> None:
    room = frames.MOST_BYTES - len(body(frames.Publish(1, "k", bytes(1 << 19)))) + (1 << 19)
    # The header of a byte string grows with it, so the last byte is found by trying.
    while len(body(frames.Publish(1, "k", bytes(room)))) < frames.MOST_BYTES:
        room += 1
    assert frames.body_size(frames.encode(frames.Publish(1, "k", bytes(room)))[:4]) == frames.MOST_BYTES
    with pytest.raises(ProtocolError, match="above the limit"):
        frames.encode(frames.Publish(1, "k", bytes(room + 1)))


GATHER = {"kind": "gather", "id": 1, "name": "b", "call": "c", "value": b"", "parties": 1, "timeout": 1.0}
assert frames.decode(body(GATHER)) == frames.Gather(1, "b", "c", b"", 1, 1.0)

WRONG: dict[str, bytes] = {
    "nothing": b"",
    "not msgpack": b"\xc1",
    "not a map": body([1, 2]),
    "no kind": body({"id": 1}),
    "unknown kind": body({"kind": "reboot"}),
    "kind of a wrong type": body({"kind": 3}),
    "unknown field": body({"kind": "bye", "extra": 1}),
    "missing field": body({"kind": "left", "role": "worker", "index": 1}),
    "wrong type": body({"kind": "left", "role": "worker", "index": "1", "status": 0}),
    "text that is not utf-8": b"\x81\xa4kind\xa3\xff\xfe\xfd",
    "trailing bytes": body({"kind": "bye"}) + b"\x00",
    "an announced giant list": b"\x82\xa4kind\xa7publish\xa2to\xdd\xff\xff\xff\xff",
    "deep nesting": b"\x81\xa4kind" + b"\x91" * 100_000 + b"\x00",
    "a negative time": body({"kind": "lookup", "id": 1, "key": "k", "timeout": -1.0}),
    "no time at all": body({"kind": "lookup", "id": 1, "key": "k", "timeout": math.nan}),
    "endless time": body(GATHER | {"timeout": math.inf}),
    "no parties": body(GATHER | {"parties": 0}),
    "an endless key": body({"kind": "lookup", "id": 1, "key": "k" * 1000, "timeout": 1.0}),
    "fewer than no steps": body({"kind": "stats", "steps": -1, "counters": {}, "seconds": {}}),
    "a count that falls below 0": body({"kind": "stats", "steps": 1, "counters": {"bytes": -1}, "seconds": {}}),
    "no seconds at all": body({"kind": "stats", "steps": 1, "counters": {}, "seconds": {"compute": math.nan}}),
    "too many counters": body(
        {"kind": "stats", "steps": 1, "counters": dict.fromkeys(map(str, range(65)), 0), "seconds": {}}
    ),
    "an endless settling": body({"kind": "fail", "cause": {"who": "a", "what": "b", "settle": math.inf}}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_malformed_body_is_refused(what: str) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        frames.decode(WRONG[what])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_truncation_is_refused(message: frames.Message) -> None:
    whole = body(message)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            frames.decode(whole[:length])


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        frames.decode(data)
    except ProtocolError:
        pass


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_any_change_to_a_message_is_a_message_or_a_protocol_error(
    message: frames.Message, at: int, what: bytes
) -> None:
    data = bytearray(body(message))
    at %= len(data)
    data[at : at + len(what)] = what
    try:
        frames.decode(bytes(data))
    except ProtocolError:
        pass


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.text(st.characters(), max_size=300), st.integers(2, 100))
def test_bounded_text_can_always_be_sent(text: str, nbytes: int) -> None:
    short = frames.bounded(text, nbytes)
    assert len(short.encode()) <= nbytes + 40
    if len(text.encode("utf-8", "replace")) <= nbytes:
        assert short == text.encode("utf-8", "replace").decode()


def test_a_cause_of_any_size_fits_into_a_frame() -> None:
    cause = Cause("w" * 10_000, "\ud800" * 1_000_000, "deep\n" * 1_000_000).bounded()
    assert "bytes left out" in cause.what
    frames.encode(frames.End(cause))
