"""``tensorwire bench edge``: the programs of every contender, which check values; no figure is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorwire.bench.actors.edge_work import Summands, Sums
from tensorwire.bench.compare import Workload, fitting
from tensorwire.bench.edges import KIB, workloads
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import Contender, Stage
from tensorwire.bench.show import Notes
from tests.harness.sandbox import nothing_kept

CORES = (0, 1)
QUIET = Notes(lambda text: None, lambda text: None)
WORDS = ("transfer", "whole")


def find(name: str, device: str, nbytes: int, *, word: str = "transfer") -> Contender:
    """A contender by its name, as the benchmark makes it."""
    made = workloads([device], nbytes, Limits(QUIET))
    (contender,) = [c for c in made[WORDS.index(word)].contenders if c.name == name]
    return contender


@pytest.mark.slow
def test_the_ends_alone_share_the_memory_of_the_static_edge() -> None:
    floor, ours = find("ends alone", "shm", 4 * KIB, word="whole"), find("tensorwire", "shm", 4 * KIB)
    assert (floor.commands, floor.word) == (ours.commands, "alone")
    with nothing_kept(), Stage(floor, CORES) as stage:
        for word in ("alone", "whole", "alone", "transfer"):
            seconds = [a["seconds"] > 0 for a in stage.run(1, 3, word)]
            assert seconds == [word == "alone", True]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), [("C memcpy", "shm"), ("C flag", "shm"), ("C sockets", "tcp")])
def test_streams_in_c(name: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with nothing_kept(), Stage(find(name, device, 68 * KIB), CORES) as stage:
        for warm, count in ((1, 1), (0, 1), (3, 4), (1, 6)):  # an odd and an even step comes last
            assert stage.run(warm, count, "transfer")[-1]["seconds"] > 0


@pytest.mark.parametrize("elements", [16, 2048, 2050, 40_000])
def test_a_wrong_tensor_is_seen(elements: int) -> None:
    summands, sums, out = Summands(elements), Sums(elements), torch.empty(elements)
    summands.prepare(7)

    def receive(steps: int) -> None:
        for step in range(1, steps + 1):
            summands.add(step, out)
            sums.take(out)

    receive(5)
    sums.check(7, 5, out.numpy())
    receive(5)
    with pytest.raises(SystemExit, match="sums"):  # of another round
        sums.check(8, 5, out.numpy())
    receive(4)
    sums.take(out)  # the fourth again: it is stale
    with pytest.raises(SystemExit, match="sums"):
        sums.check(7, 5, out.numpy())
    for at in (0, elements // 2, elements - 1):
        receive(3)
        wrong = out.numpy().copy()
        wrong[at] += 1
        with pytest.raises(SystemExit, match="values"):
            sums.check(7, 3, wrong)
    receive(3)
    with pytest.raises(SystemExit, match="values arrived"):
        sums.check(7, 3, out.numpy()[:-1])


def test_sums_are_exact() -> None:
    summands, sums, out = Summands(3_000_001), Sums(3_000_001), torch.empty(3_000_001)
    summands.prepare(1)
    summands.add(1, out)
    sums.take(out)
    assert sums.found == [np.sum(out.numpy(), dtype=np.float64)]


def test_what_does_not_fit_into_memory() -> None:
    small, large, huge = (
        Contender(name, ((name, "target"), (name, "initiator")), memory=memory)
        for name, memory in (("small", 10), ("large", 90), ("huge", 200))
    )
    first = Workload("edge", "shm", "w", 8, "transfer", (small, large, huge))
    again = replace(first, contenders=(replace(small, name="again", word="alone"), large))
    said: list[str] = []
    notes = Notes(lambda text: None, said.append)
    assert fitting([first, again], 300, QUIET) == [{small.commands, large.commands, huge.commands}]
    assert fitting([first, again], 100, notes) == [{small.commands, large.commands}]
    assert said == ["skipped: w: huge: it may take 200 B of memory, and 100 B are left"]
    assert fitting([first, again], 99, notes) == [{small.commands}, {large.commands}]
    assert "one after another" in said[-1]
