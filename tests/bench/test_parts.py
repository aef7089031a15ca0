"""The parts of the benchmark: arithmetic, vocabulary, programs that fail, and wrong arguments."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tensorwire.bench import suite
from tensorwire.bench.actors.lines import check, pattern
from tensorwire.bench.compare import Samples, Settings, Workload, compare_all, records
from tensorwire.bench.programs import Contender, ProgramFailed, Stage, pair
from tensorwire.bench.records import COUNTED, Target, time_text
from tensorwire.bench.show import Notes
from tensorwire.sizes import size_text
from tests.cli.test_cli import complaint
from tests.harness.sandbox import nothing_kept

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
CORES = (0, 0)


def program(work: str) -> tuple[tuple[str, ...], ...]:
    """Two programs that answer at once; ``work`` is what both do before. They import nothing, to start soon."""
    lines = [
        "import sys",
        "role = sys.argv[1]",
        "print(role, flush=True)",
        "told = input()",
        "print('ready', flush=True)",
    ]
    lines += ["for line in sys.stdin:", "    round, warm, count = map(int, line.split()[1:])", f"    {work}"]
    lines += ["""    print('{"seconds": %f, "copies": %d}' % (0.25 * count, 3 * (warm + count)), flush=True)"""]
    return pair((sys.executable, "-I", "-c", "\n".join(lines)))


def test_what_arrives_is_checked() -> None:
    check(pattern(3, 10_000), 3)
    for bad in (pattern(2, 10_000), bytes(10_000), pattern(3, 10_001)[1:]):
        with pytest.raises(SystemExit):
            check(bad, 3)


def test_medians_limits_and_targets() -> None:
    samples = {
        "tensorwire": Samples([2.0, 1.0, 9.0], {"copies": 1}),
        "C a": Samples([3.0, 3.0, 3.0]),
        "C b": Samples([1.5, 1.0, 2.0]),
        "other": Samples([4.0]),
    }
    group = tuple(Contender(name, (), "C") for name in ("C a", "C b"))
    workload = Workload("device", "shm", "w", 8, "ping-pong", group, ("missing", "C"), Target(shares={"C": 0.75}))
    made = {r.peer: r for r in records(workload, samples)}
    mine = made["tensorwire"]
    assert (mine.seconds, mine.low, mine.high, mine.rounds, mine.bytes_per_second) == (2.0, 1.0, 9.0, 3, 4.0)
    assert (mine.limit, mine.limit_value, mine.ratio, mine.met, mine.copies) == ("C b", 1.5, 0.75, True, 1)
    assert (made["C a"].ratio, made["C b"].ratio, made["other"].target) == (0.5, 1.0, None)


@pytest.mark.parametrize("load", [0.1, 7.0])
def test_on_a_busy_machine_times_are_not_judged(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    samples = {"tensorwire": Samples([2.0]), "C": Samples([1.0])}
    workload = Workload("device", "shm", "a write", 8, "ping-pong", (), ("C",), Target(shares={"C": 0.9}))
    timed = records(workload, samples)
    counted = replace(timed[0], workload="a step", target=COUNTED, met=True)
    file = tmp_path / "figures.json"
    suite.report_on(suite.Options(json=str(file)), lambda *_: [*timed, counted])
    ours, _, step = json.loads(file.read_text())
    said = capsys.readouterr().out
    busy = load > 1
    assert (ours["met"], ours["ratio"]) == ((None, None) if busy else (False, 0.5))
    assert (ours["seconds"], ours["limit_value"], ours["target"]) == (2.0, 1.0, ">= 0.90 of C")
    assert step["met"] is True  # counts are what they are
    assert ("MISSED" in said, "0.50 of C" in said, "this machine is busy: no ratios" in said) == (
        not busy,
        not busy,
        busy,
    )


def test_targets() -> None:
    for target, seconds, met in (
        (Target(1.0), 1.0, True),
        (Target(1.0), 1.1, False),
        (Target(1.0, {"a": 0.5}), 0.9, True),
        (Target(1.0, {"b": 1.0}), 0.9, False),
        (Target(shares={"absent": 1.0}), 0.1, None),
        (Target(0.1, sums={"a": 1.5, "b": 0.5}), 1.1, True),
        (Target(0.1, sums={"a": 1.5, "b": 0.5}), 1.11, False),
        (Target(sums={"a": 1.0}), 0.6, False),
        (Target(0.1, sums={"a": 1.0, "absent": 1.0}), 0.1, None),
    ):
        assert target.met(seconds, {"a": 0.5, "b": 0.5}) is met, (target, seconds)


def test_figures_for_people() -> None:
    times = [0.5e-6, 13e-6, 99.96e-6, 640e-6, 1e-3, 0.0123, 1.0, 120.0]
    assert [time_text(t) for t in times] == [
        "0.5 us",
        "13 us",
        "100 us",
        "640 us",
        "1 ms",
        "12.3 ms",
        "1 s",
        "120 s",
    ]
    assert str(Target(13e-6, {"libfabric": 1 / 1.3})) == "<= 13 us and >= 0.77 of libfabric"
    assert str(Target(0.05, sums={"a": 1.02, "own copy": 1.0})) == "<= 1.02 x a + own copy + 50 ms"


def test_a_ring_of_programs() -> None:
    with nothing_kept(), Stage(Contender("x", program("assert told != role")), CORES) as stage:
        assert stage.run(2, 4) == [{"seconds": 1.0, "copies": 18}] * 2
        assert stage.run(0, 1)[-1]["seconds"] == 0.25


def test_others_that_fail_are_skipped_and_ours_are_not() -> None:
    said: list[str] = []
    notes = Notes(lambda text: None, said.append)
    good = Contender("tensorwire", program("pass"))
    bad = Contender("other", program("1 / (round - 5)"))  # in a measured round
    worse = Contender("absent", pair((sys.executable, "-I", "-c", "import no_such_module")))
    settings = Settings(rounds=3, seconds=0.25, cores=CORES)
    worst = Contender("missing", pair(("/no/such/program",)))
    workload = Workload("device", "shm", "w", 0, "ping-pong", (good, bad, worse, worst), per=2)
    with nothing_kept():
        made = compare_all([workload], settings, notes)
    assert [(r.peer, r.seconds, r.rounds, r.copies) for r in made] == [("tensorwire", 0.125, 3, 6.0)]
    assert [line.partition(":")[2].split(":")[0].strip() for line in said] == ["absent", "missing", "other"]
    assert "No module named 'no_such_module'" in said[0]
    assert "program target cannot be started: No such file or directory" in said[1]
    assert "ZeroDivisionError" in said[2]
    ours = Workload("device", "shm", "w", 0, "ping-pong", (Contender("tensorwire", bad.commands),))
    with nothing_kept(), pytest.raises(ProgramFailed, match="ZeroDivisionError"):
        compare_all([ours], settings, notes)


def test_the_vocabulary_is_documented() -> None:
    """The page shows the dictionary itself."""
    assert "\n::: tensorwire.bench.records.MODES\n" in BENCHMARKS.read_text()


@pytest.mark.parametrize("page", ["benchmarks.md", "devices.md"])
def test_the_sizes_from_which_tcp_lends_pages_are_documented(page: str) -> None:
    """Figures depend on it, so readers must know when it happens."""
    header = (BENCHMARKS.parents[1] / "src" / "_native" / "pages.h").read_text()
    sizes = re.findall(r"^constexpr u64 (\w+) = u64\{(\d+)\} << (\d+);", header, re.M)
    least = {name: size_text(int(number) << int(shift)) for name, number, shift in sizes}
    text = " ".join((BENCHMARKS.parent / page).read_text().split())
    assert f"from {least['least_lent_alone']} on, and from {least['least_lent']} on if " in text


MISTAKES = [
    (["bench", "fly"], "No such command 'fly'"),
    (["bench", "device", "--device", "fax"], "'fax' is not one of shm, tcp"),
    (["bench", "device", "--device", ","], "no device: one or more of shm, tcp"),
    (["bench", "device", "--sizes", "many"], "'many' is not a size from 64 to 4GiB"),
    (["bench", "device", "--sizes", "100"], "'100' is not a multiple of 64 bytes"),
    (["bench", "edge", "--sizes", "8GiB"], "'8GiB' is not a size"),
    (["bench", "device", "--rounds", "0"], "0 is not in the range 1<=x<=1000"),
    (["bench", "store", "--workload", "resnet"], "'resnet' is not one of alexnet, inception, vgg16"),
    (["bench", "store", "--workers", "0"], "0 is not in the range 1<=x<=64"),
    (["bench", "faults", "--cores", "one"], "--cores takes two numbers such as 0,1, not 'one'"),
    (["bench", "faults", "--cores", "0,4095"], "--cores 0,4095: two of the processors"),
    (
        ["bench", "faults", "--json", "/no/such/folder/x"],
        "--json /no/such/folder/x: there is no folder /no/such/folder",
    ),
]


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_kept():
        for arguments, why in MISTAKES:
            assert why in complaint(capsys, monkeypatch, *arguments), arguments
