"""What the two ends of a tcp connection must make of a stream of bytes: docs/devices.md, written once more.

Slow and plain, so that it can be read beside the document. The fuzz tests compare the engine with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire import ACK, COMPARE_SWAP, DATA, FETCH_ADD, FRAME, NONE, OLD_VALUE, READ, REFUSE, WRITE

MAGIC = b"TWF1"
WORD = (1 << 64) - 1


@dataclass
class Exposed:
    """A region of the target."""

    memory: bytearray
    writable: bool

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether the span lies within it."""
        return offset + nbytes <= len(self.memory)

    def word(self, offset: int) -> int:
        """The 8 bytes there."""
        return int.from_bytes(self.memory[offset : offset + 8], "little")

    def store(self, offset: int, value: int) -> None:
        """Puts 8 bytes there."""
        self.memory[offset : offset + 8] = value.to_bytes(8, "little")


@dataclass
class Target:
    """The end that answers."""

    regions: dict[int, Exposed]
    applied: int = 0
    broken: bool = False
    answers: list[tuple[int, int, int]] = field(default_factory=list)  # all but acks: op, id, key or length
    cut: bool = False  # it ended within a frame
    partial: tuple[int, int, int] | None = None  # key, start, end: where the payload of an unfinished write may lie

    def take(self, stream: bytes) -> None:
        """All that the engine ever does with it."""
        while len(stream) >= FRAME.size and not self.broken:
            fields, stream = FRAME.unpack(stream[: FRAME.size]), stream[FRAME.size :]
            stream = self._frame(fields, stream)
        self.cut = self.cut or bool(stream)

    def _frame(self, fields: tuple[bytes, int, int, int, int, int, int, int, int], rest: bytes) -> bytes:
        magic, op, number, key, offset, length, signal_key, signal_offset, value = fields
        known = op in (WRITE, READ, FETCH_ADD, COMPARE_SWAP)
        if magic != MAGIC or number != self.applied + 1 or not known or (op > READ and length != 8):
            self.broken = True
            return rest
        refusal = self._judge(op, key, offset, length)
        if op != WRITE:
            self.applied = number
            self._answer(refusal, op, number, key, offset, length, signal_key, value)
            return rest
        refusal = refusal or self._judge_signal(signal_key, signal_offset)
        payload, rest = rest[:length], rest[length:]
        if not refusal and length:
            self.regions[key].memory[offset : offset + len(payload)] = payload
        if len(payload) < length:
            self.cut = True
            self.partial = None if refusal else (key, offset, offset + len(payload))
            return b""
        self.applied = number
        if refusal:
            self.answers.append((REFUSE, number, refusal))
        elif signal_offset != NONE:
            self.regions[signal_key].store(signal_offset, value)
        return rest

    def _judge(self, op: int, key: int, offset: int, length: int) -> int:
        if op == WRITE and length == 0 and offset == NONE:
            return 0
        if key not in self.regions:
            return 1
        if not self.regions[key].holds(offset, length):
            return 2
        if op != READ and not self.regions[key].writable:
            return 3
        return 4 if op in (FETCH_ADD, COMPARE_SWAP) and offset % 8 else 0

    def _judge_signal(self, key: int, offset: int) -> int:
        return 0 if offset == NONE else self._judge(FETCH_ADD, key, offset, 8)

    def _answer(
        self, refusal: int, op: int, number: int, key: int, offset: int, length: int, expected: int, value: int
    ) -> None:
        if refusal:
            self.answers.append((REFUSE, number, refusal))
            return
        region = self.regions[key]
        if op == READ:
            self.answers.append((DATA, number, length))
            return
        old = region.word(offset)
        self.answers.append((OLD_VALUE, number, old))
        if op == FETCH_ADD:
            region.store(offset, (old + value) & WORD)
        elif old == expected:
            region.store(offset, value)


@dataclass
class Initiator:
    """The end that asks: ``posted`` operations, of which ``reads`` wait for so many bytes."""

    posted: int
    reads: dict[int, int]
    done: int = 0
    broken: bool = False
    refused: set[int] = field(default_factory=set)
    filled: dict[int, bytes] = field(default_factory=dict)  # by read: what came, perhaps not all of it

    def take(self, stream: bytes) -> None:
        """All that the engine ever does with it."""
        while len(stream) >= FRAME.size and not self.broken:
            magic, op, number, key, _, length, *_ = FRAME.unpack(stream[: FRAME.size])
            stream = stream[FRAME.size :]
            if magic != MAGIC or not self._fits(op, number, length, key):
                self.broken = True
            elif op == DATA:
                self.filled[number] = stream[:length]
                self.reads.pop(number)
                if len(stream) < length:
                    return
                stream, self.done = stream[length:], number
            else:
                if op == REFUSE:
                    self.refused.add(number)
                    self.reads.pop(number, None)
                self.done = number

    def _fits(self, op: int, number: int, length: int, reason: int) -> bool:
        if not self.done < number <= self.posted or any(read < number for read in self.reads):
            return False
        if op == ACK:
            return number not in self.reads
        if op == REFUSE:
            return 0 < reason < 2**32
        return op == DATA and self.reads.get(number) == length
