"""The examples with readers run as they are: an evaluation beside a training, and rollouts of a policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.test_examples import PYTHON, ROOT, run
from tests.fixtures import sandbox as sandbox
from tests.harness.sandbox import Sandbox

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.slow


def test_an_evaluation_draws_accuracies_while_the_training_goes_on(sandbox: Sandbox) -> None:
    job = sandbox.run(str(EXAMPLES / "publish.py"))
    name = job.line("job ").split()[1]
    evaluation = sandbox.python(str(EXAMPLES / "evaluate.py"), name)
    assert job.finish().status == 0
    result = evaluation.finish()
    assert (result.status, result.err) == (0, "")
    drawn = re.findall(r"^step +([\d,]+)  (█*) *(0\.\d+)$", result.out, re.M)
    steps = [int(step.replace(",", "")) for step, _, _ in drawn]
    assert len(steps) >= 5
    assert steps == sorted(set(steps))
    assert all(step % 20 == 0 for step in steps)
    assert float(drawn[-1][2]) > 0.8
    assert all(len(bar) == round(50 * float(accuracy)) for _, bar, accuracy in drawn)


def test_rollouts_by_versions_have_the_losses_of_one_process(tmp_path: Path) -> None:
    *lines, verdict = run([*PYTHON, str(EXAMPLES / "rollouts.py")], tmp_path).splitlines()
    assert verdict == "the losses are the same"
    assert len(lines) == 6
    assert len({line.split()[-1] for line in lines}) == 6
