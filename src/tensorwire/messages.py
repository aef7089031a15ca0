"""Decoding of messages, in any thread.

msgspec looks at the fields of a struct when it is decoded first, and crashes where two threads are the first at once
(0.22.0). So one thread at a time makes decoders.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Message = TypeVar("Message")

_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_making = threading.Lock()


def decode_message(data: bytes | memoryview, kind: type[Message]) -> Message:
    """The struct of that kind in ``data``. Raises `msgspec.MsgspecError` for something else."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)  # type: ignore[no-any-return]
