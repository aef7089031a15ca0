"""Memory that is taken and given back."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tensorwire.graph.passes.space import Space


def test_what_was_given_back_is_taken_again() -> None:
    space = Space()
    assert [space.allocate(size) for size in (64, 128, 64, 64)] == [0, 64, 192, 256]
    space.free(0, 64)
    space.free(192, 64)
    assert (space.allocate(64), space.allocate(64), space.nbytes) == (0, 192, 320)


def test_the_smallest_hole_that_is_long_enough() -> None:
    space = Space()
    for size in (512, 64, 128, 64):
        space.allocate(size)
    space.free(0, 512)
    space.free(576, 128)
    assert (space.allocate(64), space.allocate(64), space.allocate(512)) == (576, 640, 0)


def test_holes_become_one() -> None:
    space = Space()
    for _ in range(4):
        space.allocate(64)
    for offset in (0, 128, 64):
        space.free(offset, 64)
    assert space.allocate(192) == 0


def test_a_hole_at_the_end_grows() -> None:
    space = Space()
    space.allocate(64)
    space.allocate(64)
    space.free(64, 64)
    assert (space.allocate(128), space.nbytes) == (64, 192)


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_nobody_shares_and_nothing_is_lost(seed: int, moves: int) -> None:
    rng, space, living = random.Random(seed), Space(), list[tuple[int, int]]()
    for _ in range(moves):
        if living and rng.random() < 0.45:
            space.free(*living.pop(rng.randrange(len(living))))
        else:
            size = 64 * rng.randint(1, 6)
            living.append((space.allocate(size), size))
        living.sort()
        ends = [0, *(offset + size for offset, size in living)]
        assert all(end <= begin for end, (begin, _) in zip(ends, living, strict=False))
        assert ends[-1] <= space.nbytes
    for allocation in living:
        space.free(*allocation)
    assert space.allocate(space.nbytes) == 0  # all of it is one hole again
