"""Where modules go if nobody says."""

from __future__ import annotations

import pytest

from tensorwire.cli.plan.cut import cut
from tensorwire.errors import ArgumentError


@pytest.mark.parametrize(
    ("layers", "hosts", "placement"),
    [
        ({"p": 1, "q": 1}, "ab", {"p": "a", "q": "b"}),
        ({"p": 1, "q": 9, "r": 1}, "ab", {"p": "a", "q": "b", "r": "b"}),
        ({"p": 9, "q": 1, "r": 1}, "ab", {"p": "a", "q": "b", "r": "b"}),
        ({"p": 1, "q": 1, "r": 9}, "ab", {"p": "a", "q": "a", "r": "b"}),
        ({"p": 9, "q": 1, "r": 1}, "abc", {"p": "a", "q": "b", "r": "c"}),
        ({"": 1, "p": 1}, "ab", {"": "a", "p": "b"}),
        ({"p.0.x": 1, "p.0.y": 2, "p.1.x": 1, "p.1.y": 1, "q": 7}, "ab", {"p.0": "a", "p.1": "a", "q": "b"}),
        ({"p.0": 1, "p.1": 1, "q": 1, "r": 9}, "ab", {"p": "a", "q": "a", "r": "b"}),
        ({"p": 1, "p.x": 1, "q": 1, "q.x": 1}, "abcd", {"p": "a", "p.x": "b", "q": "c", "q.x": "d"}),
        ({"p.0": 4, "p.1": 0, "p.2": 4, "p.3": 0}, "ab", {"p.0": "a", "p.1": "a", "p.2": "b", "p.3": "b"}),
        ({"p": 1, "q": 1, "r": 8, "z": 0}, "abc", {"p": "a", "q": "b", "r": "c", "z": "c"}),
        ({"z": 0, "p": 1, "y": 0, "q": 1}, "ab", {"z": "a", "p": "a", "y": "a", "q": "b"}),
        ({"p": 1}, "a", {"p": "a"}),
    ],
)
def test_as_many_bytes_on_each_host(layers: dict[str, int], hosts: str, placement: dict[str, str]) -> None:
    assert cut(layers, hosts) == placement


def test_more_hosts_than_modules_are_refused() -> None:
    with pytest.raises(ArgumentError, match="2 hosts need as many modules with parameters; the model has 1"):
        cut({"p": 1, "q": 0}, "ab")
