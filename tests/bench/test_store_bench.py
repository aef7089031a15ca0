"""``tensorwire bench store``: what its programs check, and how they are driven."""

from __future__ import annotations

import sys

import pytest
import torch

from tensorwire.bench.actors.expected_values import Expected, check_gradient, put, put_start
from tensorwire.bench.programs import Contender, ProgramFailed, Stage
from tensorwire.models import TINY
from tests.harness.sandbox import nothing_kept

CORES = (0, 1)


def test_a_wrong_value_is_seen() -> None:
    expected = Expected(TINY, 2, "SGD")
    expected.went(1, 3)
    right = [torch.empty(t.elements) for t in TINY.tensors]
    for i, (values, tensor) in enumerate(zip(right, TINY.tensors, strict=True)):
        parameter, mean, other = torch.nn.Parameter(values), torch.empty(tensor.elements), torch.empty(tensor.elements)
        put(mean, i, 0, 1)
        put(other, i, 1, 1)
        put_start(values, i)
        parameter.grad = (mean + other) / 2
        optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9, fused=True)
        for _ in range(3):
            optimizer.step()
    expected.check(right)
    for values in right:
        for at in (0, values.numel() - 1):
            was = values[at].item()
            values[at] += 0.5
            with pytest.raises(SystemExit, match="the parameters that arrived are wrong"):
                expected.check(right)
            values[at] = was


@pytest.mark.parametrize("elements", [5, 1024, 1030, 5000])
def test_a_gradient_of_another_is_seen(elements: int) -> None:
    values = torch.empty(elements)
    put(values, 3, 1, 7)
    check_gradient(values, 3, 1, 7)
    for tensor, worker, round in ((2, 1, 7), (3, 0, 7), (3, 1, 6)):
        with pytest.raises(SystemExit, match="gradients"):
            check_gradient(values, tensor, worker, round)


def talking(role: str, work: str) -> tuple[str, ...]:
    """A program that says its role, notes what it is told, and answers when it is asked."""
    lines = [
        "import sys",
        f"print('{role}', flush=True)",
        "told = input()",
        "print('ready', flush=True)",
        work,
        "for line in sys.stdin:",
        """    print('{"seconds": %d}' % len(told), flush=True)""",
    ]
    return (sys.executable, "-I", "-c", "\n".join(lines))


def test_servers_are_told_of_all_and_asked_last() -> None:
    commands = (talking("a", "pass"), talking("bc", "pass"), talking("def", "pass"))
    with nothing_kept(), Stage(Contender("x", commands, servers=1), CORES) as stage:
        assert [a["seconds"] for a in stage.run(1, 1)] == [len("a bc def")] * 3


def test_some_work_until_the_others_have_answered() -> None:
    busy = "\n".join(
        [
            "from tensorwire.bench.actors.lines import Lines",
            "lines = Lines()",
            "lines.hello()",
            "for run in lines.runs():",
            "    turns = 0",
            "    while lines.others_work(0.01):",
            "        turns += 1",
            "    lines.answer(turns)",
        ]
    )
    commands = ((sys.executable, "-c", busy), talking("a", "pass"), talking("b", "pass"))
    with nothing_kept(), Stage(Contender("x", commands, meanwhile=1), CORES) as stage:
        for _ in range(20):  # told to stop before it has read that it is to begin, too
            turns, *others = stage.run(1, 1)
            assert turns["seconds"] >= 0
            assert [a["seconds"] for a in others] == [1, 1]


def test_a_server_that_fails_is_heard_while_others_work() -> None:
    commands = (talking("a", "raise SystemExit('no more memory')"), talking("b", "import time; time.sleep(600)"))
    contender = Contender("x", commands, servers=1)
    with nothing_kept(), Stage(contender, CORES) as stage, pytest.raises(ProgramFailed, match="no more memory"):
        stage.run(1, 1)
