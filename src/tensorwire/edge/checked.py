"""The static edge with a content check: what the consumer sees is what the producer sent, or an error.

The last ``TRAILER`` bytes of a slot are a mark and a checksum (XXH3, 64 bits, https://xxhash.com) of the payload in
front of them. They travel with it: still one write and one signal, or one signal. The step is the checksum's seed, so
that the right bytes of another step are refused too. Both ends read the whole payload once a step for this.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from tensorwire.device import Channel, Completion, RemoteView
from tensorwire.edge.static import DEFAULT_TIMEOUT, TRAILER, Consumer, Producer, Word, check_spec
from tensorwire.edge.tensor import Spec
from tensorwire.errors import ArgumentError, ContentMismatch, Unsupported
from tensorwire.extras import how_to_install

_TRAILER = struct.Struct("<8sQ")
_MARK = b"twcheck1"
assert _TRAILER.size == TRAILER


def _hasher() -> Callable[..., int]:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        raise Unsupported(f"the content check needs the package xxhash: {how_to_install('check')}") from None
    return xxh3_64_intdigest


def _payloads(slots: Sequence[memoryview]) -> list[memoryview]:
    if not slots or any(slot.nbytes < TRAILER for slot in slots):
        raise ArgumentError(f"a checked edge needs slots, with {TRAILER} bytes behind the payload for the checksum")
    return [slot[:-TRAILER] for slot in slots]


class CheckedProducer(Producer):
    """A producer whose slots end with a checksum. The other end is a `CheckedConsumer`.

    Each slot is ``TRAILER`` bytes longer than the payload; ``nbytes`` is the payload's. Raises `ArgumentError` for an
    edge without slots, and `Unsupported` where the package ``xxhash`` is missing.
    """

    def __init__(self, channel: Channel, arrival: RemoteView, *, spec: Spec | None = None, **options: Any) -> None:
        super().__init__(channel, arrival, **options)
        self._digest = _hasher()
        self._whole, self._memory = self._memory, _payloads(self._memory)
        self.nbytes -= TRAILER
        self.spec = spec
        check_spec(spec, self._memory)

    def send(self, step: int, *, nbytes: int | None = None) -> Completion:
        if nbytes is not None:
            raise ArgumentError("a checked edge sends the whole of its slot")
        self._check(step)
        at = step % self.depth
        _TRAILER.pack_into(self._whole[at], self.nbytes, _MARK, self._digest(self._memory[at], seed=step))
        return super().send(step)


class CheckedConsumer(Consumer):
    """A consumer that verifies what it receives. The other end is a `CheckedProducer`."""

    def __init__(self, arrival: Word, *, spec: Spec | None = None, **options: Any) -> None:
        super().__init__(arrival, **options)
        self._digest = _hasher()
        self.spec = spec
        check_spec(spec, _payloads(self._slots))

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview | None:
        """The payload of step ``step``, valid until ``release(step)``.

        Raises `ContentMismatch` if it is not what the producer sent, besides what a wait raises. The slot stays the
        consumer's until it is released.
        """
        slot = super().receive(step, timeout)
        assert slot is not None
        payload = slot[:-TRAILER]
        mark, expected = _TRAILER.unpack_from(slot, payload.nbytes)
        if mark != _MARK:
            raise ContentMismatch(f"{self._where(step)} has no checksum: make the producer a CheckedProducer")
        found = self._digest(payload, seed=step)
        if found != expected:
            raise ContentMismatch(
                f"{self._where(step)} is not what was sent: checksum {found:016x} instead of {expected:016x}. "
                "Does anyone write to a slot that is not theirs at that time? Else suspect memory or network"
            )
        return payload

    def _where(self, step: int) -> str:
        channel = self._arrival.channel
        return f"{channel.device.name}: step {step} from {channel.peer}"
