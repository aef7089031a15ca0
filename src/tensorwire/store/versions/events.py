"""What has happened to the versions of a store, as lines for people."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from datetime import datetime, timezone
from itertools import islice

import msgspec

from tensorwire.control import Member
from tensorwire.messages import decode_message
from tensorwire.store.versions.handover import PUBLISHER
from tensorwire.store.versions.listing import ask_publisher, topic

_KEPT = 4096  # lines
_AT_ONCE = 1000  # lines of an answer
_LENGTH = 200  # characters of a line


class EventLines(msgspec.Struct, frozen=True):
    """Events from the ``first`` on, which has that number; the first of all has 0."""

    first: int
    lines: list[str]


class Events:
    """The last events of ``store``, which readers ask for. Any thread may add some."""

    def __init__(self, member: Member, store: str) -> None:
        self._member, self._store = member, store
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._count = 0
        self._lock = threading.Lock()
        member.client.answer(topic(store, "events"), self._since)
        member.client.on_told(topic(store, "event"), self._told)

    def add(self, text: str) -> None:
        """This has happened now."""
        now = datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")
        line = " ".join(text.split())[:_LENGTH]
        with self._lock:
            self._lines.append(f"{now} {line}")
            self._count += 1

    def _told(self, who: str, text: bytes) -> None:
        self.add(f"{who} {text.decode(errors='replace')}")

    def _since(self, _: str, number: bytes) -> bytes:
        with self._lock, contextlib.suppress(ValueError):
            gone = self._count - len(self._lines)
            first = max(gone, min(int(number), self._count))
            lines = list(islice(self._lines, first - gone, first - gone + _AT_ONCE))
            return msgspec.msgpack.encode(EventLines(first, lines))
        return msgspec.msgpack.encode(EventLines(0, []))

    def close(self) -> None:
        """The store has ended."""
        self._member.client.answer(topic(self._store, "events"), None)
        self._member.client.on_told(topic(self._store, "event"), None)


def events_since(member: Member, store: str, number: int, timeout: float = 60.0) -> EventLines:
    """Some events of ``store`` from that number on, or from the first that is kept. Raises as `ask_publisher`."""
    return decode_message(ask_publisher(member, store, "events", b"%d" % number, timeout), EventLines)


def tell_event(member: Member, store: str, text: str) -> None:
    """Adds an event: what this process did."""
    member.client.tell(PUBLISHER, topic(store, "event"), text.encode())
