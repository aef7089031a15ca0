"""What a publisher knows of its versions and readers, for people and for the training."""

from __future__ import annotations

import msgspec

from tensorwire.control import Member
from tensorwire.errors import PeerLost
from tensorwire.messages import decode_message
from tensorwire.store.versions.handover import PUBLISHER


class VersionState(msgspec.Struct, frozen=True):
    """A version in a snapshot buffer.

    Attributes:
        name: Run, counter and the first digits of the root hash, as ``str`` of a `Version`.
        step: How many steps of the training it contains.
        state: ``published``, or ``draining``: an earlier one that a reader has.
    """

    name: str
    step: int
    state: str


class ReaderState(msgspec.Struct, frozen=True):
    """A reader, and what it runs.

    Attributes:
        reader: Its name.
        machine: The name of its machine, and the number of its process there.
        version: What it committed last, as ``str`` of a `Version`; empty: nothing.
        counter: The counter of that; 0: it committed nothing.
        step: How many steps of the training that contains.
        seconds: How long the phases took, as `Reader.seconds`.
    """

    reader: str
    machine: str = ""
    version: str = ""
    counter: int = 0
    step: int = 0
    seconds: dict[str, float] = {}


class Listing(msgspec.Struct, frozen=True):
    """All that there is.

    Attributes:
        versions: Those in snapshot buffers, the newest first.
        readers: All readers, with or without a version.
    """

    versions: list[VersionState]
    readers: list[ReaderState]


def topic(store: str, what: str) -> str:
    """What words between readers and the publisher are about: ``hello``, ``ask``, ``report``, ``list``, ``events``."""
    return f"{store}/{what}"


def ask_publisher(member: Member, store: str, what: str, value: bytes, timeout: float) -> bytes:
    """The publisher's answer to a word. Raises `PeerLost` where there is none, or why the job ended."""
    found = member.client.ask([PUBLISHER], topic(store, what), value, timeout)
    if PUBLISHER not in found:
        if member.client.ended.is_set():
            raise member.client.error()
        raise PeerLost(
            f"{PUBLISHER} did not answer this process within {timeout:g} s: can it reach it, and does it still publish "
            f"versions of {store}?"
        )
    return found[PUBLISHER]


def list_versions(member: Member, store: str, timeout: float = 60.0) -> Listing:
    """What the publisher of ``store`` knows. Raises as `ask_publisher`."""
    return decode_message(ask_publisher(member, store, "list", b"", timeout), Listing)
