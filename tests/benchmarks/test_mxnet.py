"""``python -m benchmarks mxnet``: short runs with MXNet's own store and ours, whose values are checked in there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import mxnet
from benchmarks.cli import main
from benchmarks.mxnet import OWN, find_python
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.errors import MissingPackage
from tests.bench.running import BESIDE, bench
from tests.harness.sandbox import Sandbox, nothing_kept


@pytest.mark.slow
def test_both_stores_give_the_sum_and_train_alike(sandbox: Sandbox) -> None:
    try:
        python = find_python()
    except MissingPackage as error:
        pytest.skip(str(error))
    options = ("--device", "shm", "--sizes", "4KiB", "--workers", "2", "--steps", "1")
    _, made = bench(sandbox, *BESIDE, "mxnet", *options, TENSORWIRE_MXNET_PYTHON=python)
    assert [(r["peer"], r["mode"]) for r in made] == [
        *[(peer, "push-then-pull") for peer in ("tensorwire", OWN)],
        *[(peer, "training-step") for _ in range(2) for peer in ("tensorwire", OWN)],
    ]
    ours, theirs = (r["details"]["loss"] for r in made[2:4])
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("named", [True, False])
def test_where_mxnet_is_not_one_line_says_what_to_do(
    named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENSORWIRE_MXNET_PYTHON", raising=False)
    monkeypatch.setattr("benchmarks.libraries.ROOT", tmp_path)
    if named:
        monkeypatch.setenv("TENSORWIRE_MXNET_PYTHON", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "mxnet"])
    with nothing_kept(), pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (1, "")
    line = told.err.splitlines()[-1]  # a slow start has a line of its own before
    assert line.startswith("tensorwire: MXNet 1.9.1 has no Python at ")
    assert line.endswith(": make setup-mxnet")
    assert ("which TENSORWIRE_MXNET_PYTHON names" in line) == named


def test_a_ratio_between_links_says_so() -> None:
    shape = Workload("mxnet", "tcp", "w", 8, "push-then-pull", (), ("iperf3", OWN))
    seconds = {"tensorwire": 1.1, OWN: 2.0, mxnet.BESIDE: 0.08, "iperf3": 1.0}
    made = records(shape, {name: Samples([s]) for name, s in seconds.items()})
    judged = {r.peer: r for r in mxnet.between_links(made, "1gbit")}
    beside = judged.pop(mxnet.BESIDE)
    assert (beside.device, beside.limit, beside.ratio, beside.met) == ("shm", OWN, pytest.approx(25), True)
    assert str(beside.target).endswith("a ratio between links")
    assert all(r in made for r in judged.values())
