"""Frames of the control connection: a 4-byte big-endian length, then one msgpack message, at most 1 MiB."""

from __future__ import annotations

import msgspec

from tensorwire.errors import ProtocolError

VERSION = 1
MOST_BYTES = 1 << 20
HEAD = 4


class Message(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """Base of every message; ``kind`` names it on the wire."""


class Join(Message, tag="join", frozen=True):
    """First frame of a process: who it is."""

    version: int
    role: str
    index: int
    pid: int
    host: str


class Welcome(Message, tag="welcome", frozen=True):
    """The coordinator's answer: the job as it is."""

    job: str
    incarnation: int
    workers: int
    servers: int
    beat: float
    lost_after: float


class Publish(Message, tag="publish", frozen=True):
    """Puts an entry into the address book, for everybody or for the members named in ``to``."""

    id: int
    key: str
    value: bytes
    to: list[str] | None = None


class Lookup(Message, tag="lookup", frozen=True):
    """Asks for an entry; answered when it is there."""

    id: int
    key: str
    timeout: float


class Barrier(Message, tag="barrier", frozen=True):
    """Answered when ``parties`` members have come to the barrier of that name."""

    id: int
    name: str
    parties: int
    timeout: float


class Compare(Message, tag="compare", frozen=True):
    """Answered when ``parties`` members have shown the same digest; otherwise ends the job with a diff of the texts."""

    id: int
    name: str
    digest: bytes
    text: str
    parties: int
    timeout: float


class Answer(Message, tag="answer", frozen=True):
    """The answer to a request: a value, or an error and its class's name."""

    id: int
    value: bytes = b""
    error: str = ""
    type: str = ""


class Cause(msgspec.Struct, frozen=True):
    """Why a job ended: ``who`` did ``what``.

    ``settle``: seconds to wait for a better account, for causes that may be consequences of another failure.
    """

    who: str
    what: str
    traceback: str = ""
    settle: float = 0.0

    def __str__(self) -> str:
        return f"{self.who} {self.what}"


class Fail(Message, tag="fail", frozen=True):
    """A member says that it, or someone it watches, has failed."""

    cause: Cause


class Left(Message, tag="left", frozen=True):
    """A launcher says how a process of its machine ended (a ``waitpid`` status as Popen.returncode has it)."""

    role: str
    index: int
    status: int


class Bye(Message, tag="bye", frozen=True):
    """A member is done and leaves."""


class Beat(Message, tag="beat", frozen=True):
    """I live."""


class End(Message, tag="end", frozen=True):
    """The job is over; without a cause it ended well."""

    cause: Cause | None = None


Any = Join | Welcome | Publish | Lookup | Barrier | Compare | Answer | Fail | Left | Bye | Beat | End

_decoder = msgspec.msgpack.Decoder(Any)


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
        raise ProtocolError(f"a malformed control frame: {error}") from None
    return message
