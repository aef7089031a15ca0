"""``tensorwire bench store``: real stores of a small model, whose values are compared; no figure is judged."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest
import torch

from tensorwire.bench.actors.values import Expected, check_gradient, put, put_start
from tensorwire.bench.baselines import Peers
from tensorwire.bench.programs import Contender, Stage
from tensorwire.bench.records import MODES
from tensorwire.bench.show import Notes
from tensorwire.bench.stores import Job, workloads
from tensorwire.bench.workloads import TINY, find
from tensorwire.errors import ProgramFailed
from tests.bench.test_bench import validate
from tests.cli.test_cli import complaint
from tests.sandbox import Sandbox, nothing_kept

CORES = (0, 1)
QUIET = Notes(lambda text: None, lambda text: None)


def run(sandbox: Sandbox, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    file = sandbox.folder / "figures.json"
    options = ("--workload", "tiny", "--quick", "--rounds", "1", "--json", str(file))
    result = sandbox.launch("bench", "store", *options, *arguments).finish()
    assert result.status == 0, result.err
    sandbox.nothing_left()
    return result.err, json.loads(file.read_text())


@pytest.mark.slow
def test_store(sandbox: Sandbox) -> None:
    _, records = run(sandbox, "--device", "shm", "--peers", "none")
    modes = ["step-copied", "step-mapped", "exchange-copied", "exchange-mapped"]
    assert [r["mode"] for r in records] == modes
    pieces = len(TINY.tensors) + 2  # the plan cuts one into three
    for record in records:
        validate(record, records, pinned="all programs share the processors")
        copied = record["mode"].endswith("copied")
        assert (record["copies"], record["rpcs"], record["registrations"]) == (2 * pieces if copied else 0, 0, 0)
        assert (record["bytes_per_second"] is None) == record["mode"].endswith("mapped")
        assert "tiny" in record["workload"]


@pytest.mark.slow
def test_the_same_values_as_grpc() -> None:
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("needs grpcio, of which this process is to have no thread")
    job = Job(find("tiny"), workers=2, servers=2)
    (workload,) = [w for w in workloads(job, ["tcp"], Peers((), None, QUIET), grpc=True) if w.mode == "step-copied"]
    values = {}
    for contender in workload.contenders:
        with nothing_kept(), Stage(contender, CORES) as stage:
            for steps, word in ((1, "copied"), (3, "born")):
                answers = stage.run(1, steps, word)
            assert len({a["values"] for a in answers[2:]}) == 1  # one version everywhere
            values[contender.name] = answers[-1]["values"]
            if contender.name == "tensorwire":
                assert [(a["copies"], a["rpcs"], a["registrations"]) for a in answers] == [(0, 0, 0)] * 4
    assert set(values) == {"tensorwire", "grpc"}
    assert values["tensorwire"] == values["grpc"]


@pytest.mark.slow
@pytest.mark.usefixtures("only_link")
def test_over_a_link(sandbox: Sandbox) -> None:
    said, records = run(sandbox, "--link", "1gbit")
    if "skipped" in said:
        assert "--link 1gbit: " in said
        pytest.skip(said.strip())
    assert [(r["peer"], r["mode"]) for r in records] == [
        *((peer, mode) for mode in ("push", "pull", "push-and-pull") for peer in ("tensorwire", "iperf3")),
        ("iperf3 --bidir", "push-and-pull"),
    ]
    assert all(r["mode"] in MODES and "1gbit" in r["workload"] for r in records)
    assert "RDMA-MXNet" in said


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


def test_a_server_that_fails_is_heard_while_others_work() -> None:
    commands = (talking("a", "raise SystemExit('no more memory')"), talking("b", "import time; time.sleep(600)"))
    contender = Contender("x", commands, servers=1)
    with nothing_kept(), Stage(contender, CORES) as stage, pytest.raises(ProgramFailed, match="no more memory"):
        stage.run(1, 1)


MISTAKES = [
    (["--workload", "resnet"], "'resnet' is not one of alexnet, inception, vgg16, lstm, gru, fcn5, gpt2, tiny"),
    (["--device", "verbs"], "bench store measures shm and tcp"),
    (["--workers", "0"], "0 is not in the range 1<=x<=64"),
    (["--peers", "gloo"], "'gloo' is not one of none, grpc"),
]


@pytest.mark.parametrize(("arguments", "why"), MISTAKES, ids=lambda a: " ".join(a) if isinstance(a, list) else "")
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    with nothing_kept():
        assert why in complaint(capsys, monkeypatch, "bench", "store", *arguments)
