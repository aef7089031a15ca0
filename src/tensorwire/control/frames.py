"""Frames of the control connection: a 4-byte big-endian length, then one msgpack message, at most 1 MiB."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensorwire.control.membership import Membership
from tensorwire.errors import ProtocolError

VERSION = 8
MOST_BYTES = 1 << 20
HEAD = 4
# A value above this travels in parts, one frame each.
PART_BYTES = MOST_BYTES // 2
MOST_PARTS = 64
MOST_ENTRY_BYTES = MOST_PARTS * PART_BYTES  # of the address book
MOST_SECONDS = 1e7
# What all values of one gathering may take together, so that its answer is one frame.
GATHERED_BYTES = MOST_BYTES - (128 << 10)

LATE = b"late"  # the answer to a comparison that the others have made before
# What a peer may send, so that no request of a member can disturb the coordinator: NaN is no time, -1 no count.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Total = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Totals = Annotated[dict[Word, Total], msgspec.Meta(max_length=64)]
Times = Annotated[dict[Word, Annotated[float, msgspec.Meta(ge=0, le=1e12)]], msgspec.Meta(max_length=64)]
Values = Annotated[dict[Word, float], msgspec.Meta(max_length=64)]


class Message(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """Base of every message; ``kind`` names it on the wire."""


class Join(Message, tag="join", frozen=True):
    """First frame of a process: who it is."""

    version: int
    role: Name
    index: int
    pid: int
    machine: str


class Welcome(Message, tag="welcome", frozen=True):
    """The coordinator's answer: the job as it is. ``stats``: seconds between a member's reports of itself; 0: none.

    ``incarnation``: of this process, among those of its name; ``least``: as in `Membership`; ``joins``: whether this
    worker comes into a job that has begun.
    """

    job: str
    incarnation: int
    workers: int
    servers: int
    beat: float
    lost_after: float
    stats: float = 0.0
    least: int = 0
    joins: bool = False


class Publish(Message, tag="publish", frozen=True):
    """Puts an entry, or the next part of one, into the address book, for everybody or for the members in ``to``."""

    id: Id
    key: Name
    value: bytes
    to: list[str] | None = None
    part: Id = 0
    parts: Count = 1


class Lookup(Message, tag="lookup", frozen=True):
    """Asks for a part of an entry; answered when the whole entry is there. ``owner``: who must have
    published it: a member, or any one of a role."""

    id: Id
    key: Name
    timeout: Seconds
    part: Id = 0
    owner: Name | None = None


class Forget(Message, tag="forget", frozen=True):
    """A server needs ``key`` and what is below no more, which goes when no server does. Ends its lookups there."""

    key: Name


class Compare(Message, tag="compare", frozen=True):
    """Answered when ``parties`` members have shown the same digest; otherwise ends the job with a diff of the texts."""

    id: Id
    name: Name
    digest: bytes
    text: str
    parties: Count
    timeout: Seconds


class Gather(Message, tag="gather", frozen=True):
    """Answered with the values of all ``parties`` members of the sender's role when all have come to a meeting of that
    name; an error if their ``call`` differs."""

    id: Id
    name: Name
    call: Name
    value: bytes
    parties: Count
    timeout: Seconds


class ClockReading(Message, tag="clock", frozen=True):
    """Asks for the coordinator's clock: its machine's name and the time there."""

    id: Id


class Answer(Message, tag="answer", frozen=True):
    """The answer to a request: a value (or one of its ``parts``), or an error and its class's name."""

    id: Id
    value: bytes = b""
    parts: Count = 1
    error: str = ""
    type: str = ""


class Cause(msgspec.Struct, frozen=True):
    """Why a job ended: ``who`` did ``what``.

    ``settle``: seconds to wait for a better account, for causes that may be consequences of another failure. ``kind``:
    a class of errors below `JobEnded` that says more.
    """

    who: str
    what: str
    traceback: str = ""
    settle: Seconds = 0.0
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.who} {self.what}"

    def bounded(self) -> Cause:
        """The same, short enough for a frame."""
        return Cause(
            bounded(self.who, 512),
            bounded(self.what, 16 << 10),
            bounded(self.traceback, 64 << 10),
            self.settle,
            bounded(self.kind, 512),
        )


class Fail(Message, tag="fail", frozen=True):
    """A member says that it, or someone it watches, has failed. ``alone``: the others may go on without it."""

    cause: Cause
    alone: bool = False


class Left(Message, tag="left", frozen=True):
    """A launcher says how a process of its machine ended (a ``waitpid`` status as Popen.returncode has it)."""

    role: Name
    index: int
    status: int


class Stopped(Message, tag="stopped", frozen=True):
    """A launcher says that a process of its machine has been stopped for so long. Before it joins it has no beat."""

    role: Name
    index: int
    seconds: Seconds


class Suspect(Message, tag="suspect", frozen=True):
    """A member's connection to worker ``worker``, of that ``incarnation``, is gone. The coordinator decides."""

    worker: int
    incarnation: Id


class Epoch(Message, tag="epoch", frozen=True):
    """Who is in the job from now on."""

    membership: Membership


class Bye(Message, tag="bye", frozen=True):
    """A member is done and leaves. ``early``: the job goes on without it."""

    early: bool = False


class Waiting(Message, tag="waits", frozen=True):
    """A worker has waited for ``seconds`` in ``place``, for ``whom`` or, if '', for those that do not wait there.

    No place: it waits no longer.
    """

    place: Annotated[str, msgspec.Meta(max_length=512)] = ""
    whom: Annotated[str, msgspec.Meta(max_length=512)] = ""
    seconds: Seconds = 0.0


class Note(Message, tag="note", frozen=True):
    """The coordinator has something to say to the people who look at this member's output."""

    text: str


class Tell(Message, tag="tell", frozen=True):
    """A word from one member to another one, ``to``, which gets it if it is there, with its ``sender``; no answer."""

    to: Name
    topic: Name
    value: bytes
    sender: str = ""


class Beat(Message, tag="beat", frozen=True):
    """I live."""


class Stats(Message, tag="stats", frozen=True):
    """What a member has done so far: steps, counters by name, seconds by the names of spans.

    The rest is what its script said by ``job.report``: ``step`` of ``total`` (0: unknown), samples, values by name.
    """

    steps: Total
    counters: Totals
    seconds: Times
    step: Total = 0
    total: Total = 0
    samples: Total = 0
    values: Values = {}


class End(Message, tag="end", frozen=True):
    """The job is over; without a cause it ended well."""

    cause: Cause | None = None


Question = Publish | Lookup | Compare | Gather  # what the book answers, perhaps after a while
Request = Question | ClockReading
Any = (
    Join
    | Welcome
    | Request
    | Answer
    | Forget
    | Fail
    | Left
    | Stopped
    | Suspect
    | Epoch
    | Bye
    | Waiting
    | Note
    | Tell
    | Beat
    | Stats
    | End
)

_decoder = msgspec.msgpack.Decoder(Any)


def bounded(text: str, nbytes: int) -> str:
    """``text`` in at most about ``nbytes`` of UTF-8, without its middle if need be."""
    data = text.encode("utf-8", "replace")  # an exception's text may hold lone surrogates
    if len(data) > nbytes:
        left_out = f"\n... {len(data) - nbytes} bytes left out ...\n".encode()
        data = data[: nbytes // 2] + left_out + data[-(nbytes // 2) :]
    return data.decode("utf-8", "ignore")


def encode(message: Message) -> bytes:
    """One frame. Raises `ProtocolError` above 1 MiB."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MOST_BYTES:
        raise ProtocolError(f"a control message of {len(body)} bytes is above the limit of {MOST_BYTES}")
    return len(body).to_bytes(HEAD, "big") + body


def body_size(head: bytes) -> int:
    """The length a frame's head announces. Raises `ProtocolError` above 1 MiB or at 0."""
    size = int.from_bytes(head, "big")
    if not 0 < size <= MOST_BYTES:
        raise ProtocolError(f"a control frame announces {size} bytes; the limit is {MOST_BYTES}")
    return size


def decode(body: bytes) -> Any:
    """The message in a frame's body. Raises `ProtocolError`."""
    try:
        message: Any = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed control frame: {error}") from None
    return message
