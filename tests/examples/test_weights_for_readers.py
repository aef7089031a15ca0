"""The examples with readers run as they are: an evaluation beside a training, and rollouts of a policy."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.examples.test_examples import PYTHON, ROOT, run
from tests.files.conftest import need_mounts
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


def test_stock_programs_evaluate_and_keep_what_a_mount_shows(sandbox: Sandbox, tmp_path: Path) -> None:
    need_mounts()
    job = sandbox.start(*run_command(str(EXAMPLES / "publish.py")), "1000000")
    name, at, kept = job.line("job ").split()[1], tmp_path / "mount", tmp_path / "kept"
    mount = sandbox.launch("mount", name, str(at))
    mount.line(f"{name} is mounted")
    try:
        kept.mkdir()
        while not (at / "model.safetensors").is_symlink():
            pass
        shell = sandbox.start("sh", str(EXAMPLES / "checkpoint_every_minute.sh"), str(at), str(kept), "0.2")
        while True:  # a version may go while it is opened
            evaluation = sandbox.python(str(EXAMPLES / "evaluate_file.py"), str(at)).finish()
            if evaluation.status == 0:
                break
            assert "No such file" in evaluation.err or "SafetensorError" in evaluation.err
        assert re.fullmatch(r"accuracy (0|1)\.\d+ of /dev/shm/.*/model.safetensors", evaluation.out.strip())
        while len(list(kept.glob("step-*.safetensors"))) < 3:
            assert shell.process.poll() is None
        from safetensors.torch import load_file

        assert all(len(load_file(path)) == 4 for path in kept.glob("step-*.safetensors"))
    finally:
        job.signal(signal.SIGINT)
    assert job.finish().status == 130
    assert mount.finish().status == 0
    shell.finish()


def test_another_process_pushes_by_numpy_alone(sandbox: Sandbox) -> None:
    job = sandbox.start(*run_command(str(EXAMPLES / "keys_for_files.py"), workers=1), "1000000")
    name = job.line("job ").split()[1]
    for total in (6, 12):
        pushed = sandbox.python(str(EXAMPLES / "push_file.py"), name).finish()
        assert pushed.status == 0, pushed.err
        assert "pushed ones to w, [2, 3] float32" in pushed.out
        job.expect(f"the elements of w add up to {total}")
