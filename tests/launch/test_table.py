"""The table's figures, from reports made by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tensorwire.control.coordinator import Report
from tensorwire.control.frames import Stats
from tensorwire.launch.table import COLUMNS, HISTORY, JobTable, Rates


def report(at: float, steps: int, sent: int = 0, **seconds: float) -> Report:
    return Report(Stats(steps, {"bytes": sent // 2, "mapped_bytes": sent - sent // 2}, seconds), at)


def cells(*reports: Report) -> dict[str, str]:
    rates = Rates()
    for one in reports:
        rates.add(one)
        rates.add(one)  # looked at more often than it comes
    return dict(zip(COLUMNS, rates.cells(), strict=True))


def test_rates_are_those_between_reports() -> None:
    found = cells(
        report(10, 100, 0, compute=50.0, push=1.0, wait=2.0),
        report(12, 110, 6 << 20, compute=50.6, push=1.1, wait=2.3),
    )
    assert found == {
        "step": "110",
        "steps/s": "5",
        "compute": "60%",
        "push": "10%",
        "wait": "30%",
        "update": "",
        "sent": "3 MiB/s",
    }


def test_a_servers_time_is_the_clocks() -> None:
    found = cells(report(10, 1, update=1.0), report(14, 9, update=2.0))
    assert (found["update"], found["compute"], found["steps/s"]) == ("25%", "", "2")


def test_old_reports_are_forgotten() -> None:
    reports = [report(n, 1000 if n else 0) for n in range(3)] + [report(3 + n, 1000 + n) for n in range(HISTORY)]
    assert cells(*reports)["steps/s"] == "1"


def test_steps_that_last_longer_than_the_history_are_still_counted() -> None:
    reports = [report(n, n // 20, compute=n - n % 20, wait=0.0) for n in range(1, 40)]
    assert cells(*reports)["steps/s"] == "0.0256"
    assert cells(*reports)["compute"] == "100%"


def test_who_has_not_reported_has_empty_cells() -> None:
    assert set(cells().values()) == {""}


@pytest.mark.parametrize(
    ("width", "missing"), [(120, ()), (73, ("push",)), (47, ("push", "sent", "update", "steps/s"))]
)
def test_a_narrow_terminal_has_fewer_columns(width: int, missing: tuple[str, ...]) -> None:
    table = JobTable(["worker 0"], lambda: {"worker 0": last, "worker 9": last})
    last = report(10, 7, 5 << 20, compute=3.0, push=0.1, wait=1.0)
    console = Console(file=io.StringIO(), width=width)
    console.print(table({"worker 0": "loading 7 of 9"}))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert {name for name in COLUMNS if name not in lines[0].split()} == set(missing)
    assert max(map(len, lines)) <= width
    assert "loadi" in lines[1]
    assert ("of 9" in lines[1]) == (width == 120)


def drawn(width: int, *reports: Report) -> list[str]:
    """The table after these reports of worker 0, beside a server that says nothing."""
    console = Console(file=io.StringIO(), width=width)
    latest: dict[str, Report] = {}
    table = JobTable(["worker 0", "server 0"], lambda: latest)
    for one in reports:
        latest["worker 0"] = one
        picture = table({})
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def said(at: float, step: int, samples: int, total: int = 0, **values: float) -> Report:
    return Report(Stats(step, {}, {}, step, total, samples, values), at)


def test_what_the_script_reports_has_columns_of_its_own() -> None:
    head, worker, server = drawn(160, said(10, 2, 64, 100, loss=1.5), said(12, 4, 192, 100, loss=0.123456, accuracy=1))
    assert head.startswith("elapsed 0:00:0")
    assert head.split()[-4:] == ["samples/s", "left", "loss", "accuracy"]
    assert worker.split()[-4:] == ["64", "0:01:36", "0.1235", "1"]
    assert server.split()[:2] == ["server", "0"]


def test_a_resumed_training_is_timed_from_where_it_went_on() -> None:
    *_, worker, _ = drawn(160, said(10, 0, 0), said(11, 900, 0, 1000), said(21, 910, 0, 1000))
    assert worker.split()[-1] == "0:01:30"
    *_, worker, _ = drawn(160, said(11, 900, 0, 1000), said(21, 1000, 0, 1000))
    assert "0:0" not in worker


def test_reported_values_outlast_the_shares_on_a_narrow_terminal() -> None:
    head, *_ = drawn(60, said(10, 2, 64, 100, loss=1.5), said(12, 4, 192, 100, loss=1.0))
    assert head.split()[2:] == ["step", "samples/s", "left", "loss"]
    assert "loss" not in drawn(44, said(10, 2, 64, 100, loss=1.5), said(12, 4, 192, 100, loss=1.0))[0]


def test_how_a_process_ended_takes_the_place_of_its_line() -> None:
    table = JobTable(["worker 0"], dict)
    table.leave("worker 0", "was killed by SIGKILL")
    console = Console(file=io.StringIO(), width=120)
    console.print(table({"worker 0": "loading"}))
    assert isinstance(console.file, io.StringIO)
    assert "was killed by SIGKILL" in console.file.getvalue()
    assert "loading" not in console.file.getvalue()
