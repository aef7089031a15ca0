"""The examples with readers run as they are: an evaluation beside a training, and rollouts of a policy."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.examples.test_examples import PYTHON, ROOT, run
from tests.fixtures import sandbox as sandbox
from tests.harness.sandbox import Sandbox, run_command

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.slow


def test_an_evaluation_draws_accuracies_while_the_training_goes_on(sandbox: Sandbox) -> None:
    job = sandbox.start(*run_command(str(EXAMPLES / "publish.py")), "1000000")
    evaluation = sandbox.python(str(EXAMPLES / "evaluate.py"), job.line("job ").split()[1])
    drawn: list[tuple[int, str, float]] = []
    while len(drawn) < 20 or drawn[-1][2] < 0.8:
        evaluation.lines.clear()
        line = re.fullmatch(r"step +([\d,]+)  (█*) *(0\.\d+)", evaluation.line("step "))
        assert line is not None
        drawn.append((int(line[1].replace(",", "")), line[2], float(line[3])))
    steps = [step for step, _, _ in drawn]
    assert steps == sorted(set(steps))
    assert all(step % 20 == 0 for step in steps)
    assert all(len(bar) == round(50 * accuracy) for _, bar, accuracy in drawn)
    job.signal(signal.SIGINT)
    assert job.finish().status == 130
    assert "JobEnded: the user interrupted the job" in evaluation.finish().err


def test_rollouts_by_versions_have_the_losses_of_one_process(tmp_path: Path) -> None:
    *lines, verdict = run([*PYTHON, str(EXAMPLES / "rollouts.py")], tmp_path).splitlines()
    assert verdict == "the losses are the same"
    assert len(lines) == 6
    assert len({line.split()[-1] for line in lines}) == 6
