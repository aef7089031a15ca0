"""Any sequence of operations leaves what the same sequence leaves in plain memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.errors import RemoteAccessError
from tensorwire.testing.fixtures import SEEDED, Pair
from tensorwire.testing.patterns import SECONDS, array, noise

ROOM = 1 << 17
U64 = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
OFFSETS = st.one_of(st.integers(0, 20), st.integers(0, ROOM))
SIZES = st.one_of(st.integers(0, 70), st.integers(0, ROOM), st.sampled_from([4095, 4096, 4097, 65535, 65536, ROOM]))
WORDS = st.one_of(st.just(0), st.integers(0, ROOM // 8 - 1))

OPERATIONS = st.one_of(
    st.tuples(st.just("write"), OFFSETS, OFFSETS, SIZES, st.one_of(st.none(), st.tuples(WORDS, U64))),
    st.tuples(st.just("read"), OFFSETS, OFFSETS, SIZES),
    st.tuples(st.just("signal"), WORDS, U64),
    st.tuples(st.just("add"), WORDS, U64),
    st.tuples(st.just("swap"), WORDS, U64, U64),
    st.tuples(st.just("refused"), OFFSETS),
)


class Model:
    """The same operations, on a region and in plain memory."""

    def __init__(self, pair: Pair) -> None:
        self.channel = pair.channel
        self.region, self.source, self.back = (
            pair.target.allocate(ROOM),
            pair.initiator.allocate(ROOM),
            pair.initiator.allocate(ROOM),
        )
        self.remote, self.readable = self.region.remote(), self.region.remote("read")
        array(self.source)[:] = noise(ROOM)
        self.atomics = pair.initiator.capabilities.atomics
        self.there = np.zeros(ROOM, np.uint8)
        self.here = np.zeros(ROOM, np.uint8)
        self.posted: list[Any] = []

    def run(self, operations: list[tuple[Any, ...]]) -> None:
        """All of them, one after the other; then both memories are compared."""
        array(self.region)[:] = self.there[:] = 0
        array(self.back)[:] = self.here[:] = 0
        self.posted = []
        for name, *arguments in operations:
            getattr(self, name)(*arguments)
        for completion in self.posted:
            completion.wait(SECONDS)
        assert np.array_equal(array(self.region), self.there)
        assert np.array_equal(array(self.back), self.here)

    def write(self, start: int, at: int, nbytes: int, signal: tuple[int, int] | None) -> None:
        """With or without a signal, which may lie in the payload itself."""
        nbytes = min(nbytes, ROOM - start, ROOM - at)
        word = None if signal is None else (self.remote.view(signal[0] * 8, 8), signal[1])
        self.posted.append(
            self.channel.write(self.source.view(start, nbytes), self.remote.view(at, nbytes), signal=word)
        )
        self.there[at : at + nbytes] = array(self.source)[start : start + nbytes]
        if signal is not None:
            self.there.view(np.uint64)[signal[0]] = signal[1]

    def read(self, start: int, at: int, nbytes: int) -> None:
        """Waited for: a read is not ordered before later writes."""
        nbytes = min(nbytes, ROOM - start, ROOM - at)
        view = self.readable.view(start, nbytes)
        self.channel.read(self.back.view(at, nbytes), view).wait(SECONDS)
        self.here[at : at + nbytes] = self.there[start : start + nbytes]

    def signal(self, word: int, value: int) -> None:
        """Alone."""
        self.posted.append(self.channel.signal(self.remote.view(word * 8, 8), value))
        self.there.view(np.uint64)[word] = value

    def add(self, word: int, value: int) -> None:
        """Returns what was there, and wraps around."""
        if self.atomics:
            words = self.there.view(np.uint64)
            assert self.channel.fetch_add(self.remote.view(word * 8, 8), value) == words[word]
            words[word] = (int(words[word]) + value) % 2**64

    def swap(self, word: int, expected: int, value: int) -> None:
        """Only if the word is as expected."""
        if self.atomics:
            words = self.there.view(np.uint64)
            assert self.channel.compare_swap(self.remote.view(word * 8, 8), expected, value) == words[word]
            if words[word] == expected:
                words[word] = value

    def refused(self, at: int) -> None:
        """Changes nothing, and the next operation works."""
        nbytes = min(100, ROOM - at)
        completion = self.channel.write(self.source.view(0, nbytes), self.readable.view(at, nbytes))
        try:
            completion.wait(SECONDS)
        except RemoteAccessError:
            return
        raise AssertionError("written through a capability for reading")


def test_any_sequence_of_operations(pair: Pair) -> None:
    model = Model(pair)

    @settings(SEEDED, max_examples=60)
    @given(st.lists(OPERATIONS, min_size=1, max_size=12))
    def check(operations: list[tuple[Any, ...]]) -> None:
        model.run(operations)

    check()


def test_any_signal_value_wakes_who_waits_for_it(pair: Pair) -> None:
    region = pair.target.allocate(16)
    word = region.remote().view(8, 8)

    @settings(SEEDED, max_examples=40)
    @given(st.integers(0, 2**64 - 1))
    def check(value: int) -> None:
        region.store(8, 0)
        pair.channel.signal(word, value)
        region.wait(8, value, SECONDS)
        assert region.load(8) == value

    check()
