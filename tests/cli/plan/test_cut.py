"""Where modules go if nobody says."""

from __future__ import annotations

import pytest

from tensorwire.cli.plan.cut import cut
from tensorwire.errors import ArgumentError


@pytest.mark.parametrize(
    ("layers", "workers", "placement"),
    [
        ({"p": 1, "q": 1}, 2, {"p": 0, "q": 1}),
        ({"p": 1, "q": 9, "r": 1}, 2, {"p": 0, "q": 1, "r": 1}),
        ({"p": 9, "q": 1, "r": 1}, 2, {"p": 0, "q": 1, "r": 1}),
        ({"p": 1, "q": 1, "r": 9}, 2, {"p": 0, "q": 0, "r": 1}),
        ({"p": 9, "q": 1, "r": 1}, 3, {"p": 0, "q": 1, "r": 2}),
        ({"": 1, "p": 1}, 2, {"": 0, "p": 1}),
        ({"p.0.x": 1, "p.0.y": 2, "p.1.x": 1, "p.1.y": 1, "q": 7}, 2, {"p.0": 0, "p.1": 0, "q": 1}),
        ({"p.0": 1, "p.1": 1, "q": 1, "r": 9}, 2, {"p": 0, "q": 0, "r": 1}),
        ({"p": 1, "p.x": 1, "q": 1, "q.x": 1}, 4, {"p": 0, "p.x": 1, "q": 2, "q.x": 3}),
        ({"p.0": 4, "p.1": 0, "p.2": 4, "p.3": 0}, 2, {"p.0": 0, "p.1": 0, "p.2": 1, "p.3": 1}),
        ({"p": 1, "q": 1, "r": 8, "z": 0}, 3, {"p": 0, "q": 1, "r": 2, "z": 2}),
        ({"z": 0, "p": 1, "y": 0, "q": 1}, 2, {"z": 0, "p": 0, "y": 0, "q": 1}),
        ({"p": 1}, 1, {"p": 0}),
    ],
)
def test_as_many_bytes_on_each_worker(layers: dict[str, int], workers: int, placement: dict[str, int]) -> None:
    assert cut(layers, workers) == placement


def test_more_workers_than_modules_are_refused() -> None:
    with pytest.raises(ArgumentError, match="2 workers need as many modules with parameters; the model has 1"):
        cut({"p": 1, "q": 0}, 2)
