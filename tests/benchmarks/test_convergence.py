"""``python -m benchmarks modes``: a short run."""

from __future__ import annotations

import pytest

from tests.bench.running import BESIDE, bench
from tests.harness.sandbox import Sandbox


@pytest.mark.long
def test_a_training_has_its_accuracy_and_its_curve(sandbox: Sandbox) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("idx2numpy")
    picture = sandbox.folder / "modes.svg"
    options = ("--data", "digits", "--modes", "async", "--report", str(picture))
    _, (record,) = bench(sandbox, *BESIDE, "modes", *options)
    assert (record["peer"], record["mode"], record["target"]) == ("async", "convergence", "accuracy >= 90%")
    assert record["met"] == (record["details"]["accuracy"] >= 0.90)  # on a busy machine, too
    assert picture.read_text().count("<svg") == 1
