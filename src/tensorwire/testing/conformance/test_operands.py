"""This process's memory comes first and the peer's second, in writes and reads; anything else is named in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tensorwire.errors import ArgumentError
from tensorwire.testing.fixtures import Pair
from tensorwire.testing.patterns import SECONDS, array


def test_local_then_remote_both_ways(pair: Pair) -> None:
    region, mine = pair.target.allocate(16), pair.initiator.allocate(16)
    array(mine)[:8] = 7
    there = region.remote().view(8, 8)
    pair.channel.write(local=mine.view(0, 8), remote=there).wait(SECONDS)
    pair.channel.read(local=mine.view(8, 8), remote=there).wait(SECONDS)
    assert (array(mine) == 7).all()
    assert array(region).tolist() == [0] * 8 + [7] * 8


def test_operands_of_the_wrong_type_are_named(pair: Pair) -> None:
    region, mine = pair.target.allocate(16), pair.initiator.allocate(16)
    remote = region.remote()
    here, there, channel = mine.view(0, 8), remote.view(8, 8), pair.channel
    untyped: Any = channel
    wrong: list[tuple[Callable[[], object], str]] = []
    for operation in (untyped.write, untyped.read):
        wrong += [
            (lambda call=operation: call(there, here), r"\(local, remote\): .* are the two swapped\?"),  # type: ignore[misc]
            (lambda call=operation: call(here, here), "is a RemoteView, not View"),  # type: ignore[misc]
            (lambda call=operation: call(mine, remote), r"is a View, not \w*Region: pass its view\(\)"),  # type: ignore[misc]
            (lambda call=operation: call(here, remote), r"not RemoteRegion: pass its view\(\)|sizes differ"),  # type: ignore[misc]
            (lambda call=operation: call(bytes(8), there), r"is a View, not bytes: pass region.view\(\)"),  # type: ignore[misc]
            (lambda call=operation: call(None, there), "is a View, not NoneType"),  # type: ignore[misc]
            (lambda call=operation: call(here, remote.pack()), "is a RemoteView, not bytes"),  # type: ignore[misc]
        ]
    wrong += [
        (lambda: untyped.write(here, there, 1), "a signal is a pair .* not int"),
        (lambda: untyped.write(here, there, (remote, 1)), r"a signal is a pair .* not \(RemoteRegion, int\)"),
        (lambda: untyped.write(here, there, (there, "1")), r"a signal is a pair .* not \(RemoteView, str\)"),
        (lambda: untyped.signal(remote, 1), "is a RemoteView, not RemoteRegion"),
        (lambda: untyped.signal(here, 1), "is a RemoteView, not View"),
        (lambda: untyped.signal(there, "1"), "a word holds an int, not str"),
        (lambda: untyped.signal(there, 1.5), "a word holds an int, not float"),
    ]
    if pair.initiator.capabilities.atomics:
        wrong += [
            (lambda: untyped.fetch_add(here, 1), "is a RemoteView, not View"),
            (lambda: untyped.fetch_add(there, None), "a word holds an int, not NoneType"),
            (lambda: untyped.fetch_add(there, 1.5), "a word holds an int, not float"),
            (lambda: untyped.compare_swap(remote, 0, 1), "is a RemoteView, not RemoteRegion"),
            (lambda: untyped.compare_swap(there, 0, 1.5), "a word holds an int, not float"),
        ]
    if pair.initiator.capabilities.maps:
        wrong.append((lambda: untyped.map(remote), "is a RemoteView, not RemoteRegion"))
    for use, why in wrong:
        with pytest.raises(ArgumentError, match=why) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert not array(region).any()
    assert not array(mine).any()
    channel.write(here, there).wait(SECONDS)  # it lives on
