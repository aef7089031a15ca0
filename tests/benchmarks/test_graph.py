"""``python -m benchmarks graph``: real short runs, where models are cut, and what is left out. No figure is judged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import graphs
from benchmarks.cuts import LAYERS, cut, divide
from benchmarks.options import Options
from tensorwire.bench.actors.lines import LEAVE
from tensorwire.bench.compare import Settings
from tensorwire.bench.programs import ProgramFailed, Stage
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.errors import ArgumentError
from tensorwire.models import MODELS
from tensorwire.trace.parts import ProcessTrace, read_trace
from tests.bench.running import BESIDE, bench, costs, peers
from tests.harness.sandbox import Sandbox
from tests.levels import mostly_slow

TINY = 16  # divides the hidden sizes


def check_parts(details: dict[str, float]) -> None:
    """Four parts add up to the step, within 5 %."""
    assert min(details[name] for name in ("update", "idle", "hidden")) >= 0
    assert min(details["compute"], details["exposed"]) > 0
    total = sum(details[name] for name in ("compute", "update", "exposed", "idle"))
    assert total == pytest.approx(details["step"], rel=0.05)


@pytest.mark.slow
def test_steps_beside_one_process_and_calls(sandbox: Sandbox) -> None:
    pytest.importorskip("matplotlib")
    chart = sandbox.folder / "steps.png"
    options = ("--workload", "fcn5", "--steps", "2", "--modes", "zerocopy,rpc", "--report", str(chart))
    result, records = bench(sandbox, *BESIDE, "graph", *options)
    calls = ["rpc"] if find_spec("grpc") else []
    assert peers(records) == ["one process", "zerocopy", *calls]
    alone, zerocopy, *rpc = records
    assert (alone["details"]["compute"], alone["details"]["step"]) == (alone["seconds"], alone["seconds"])
    assert zerocopy["met"] is True
    assert costs(records, peer="zerocopy") == {(0, 0, 0)}
    crossed = 2 * 4 * 64 * 4096 // TINY + 4  # an activation, its gradient, and the loss
    assert zerocopy["details"]["mapped_bytes"] == crossed
    for record in rpc:
        assert record["rpcs"] == 3
        assert (record["details"]["mapped_bytes"], record["details"]["bytes"]) == (0, 0)
    assert len({r["details"]["loss"] for r in records}) == 1
    for record in records[1:]:
        assert record["details"]["overhead"] == record["seconds"] / alone["seconds"] - 1
        check_parts(record["details"])
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "worker 0 has " in result.out
    assert ", ".join(peers(records)) in result.out  # whose losses are the same


@pytest.mark.long
def test_over_tcp_and_as_markdown(sandbox: Sandbox) -> None:
    options = ("--workload", "gru", "--device", "tcp", "--modes", "zerocopy,copy", "--steps", "2", "--markdown")
    result, records = bench(sandbox, *BESIDE, "graph", *options)
    assert records[1]["met"] is True
    assert records[2]["copies"] > 0
    assert records[1]["details"]["bytes"] > 0
    assert "|  | zerocopy | 0 | 0 | 0 |" in result.out


# ---- the trace that the parts come from


@pytest.mark.slow
def test_every_tensor_that_is_waited_for_was_pushed_by_the_other_worker(tmp_path: Path) -> None:
    options = Options(quick=True, modes=("copy",))
    contender = graphs.contender("copy", "fcn5", "shm", options, str(tmp_path / "trace"))
    with Stage(contender, (0, 1)) as stage:
        stage.run(1, 2)
        stage.run(0, 0, LEAVE)
    trace = read_trace(tmp_path / "trace")

    def named(process: str, name: str) -> set[tuple[str, int]]:
        spans = (span for span in trace[process].spans if span.name == name)
        return {(span.what, span.step) for span in spans if "memory" not in span.what and "outbox" not in span.what}

    for here, there in (("worker-0", "worker-1"), ("worker-1", "worker-0")):
        waits = named(here, "wait")
        assert waits
        assert waits <= named(there, "push")
    copied = [len(pushes_of(trace["worker-0"], run)) for run in (1, 2, 3)]
    assert copied == [2, 2, 2]  # the copy into the outbox, and sending it


def pushes_of(record: ProcessTrace, run: int) -> list[str]:
    """What a worker pushed in that run of its forward graph."""
    return [s.what for s in record.spans if s.name == "push" and s.step == run and "(forward)" in s.what]


# ---- where models are cut


def test_layers_are_divided_by_what_they_cost() -> None:
    assert divide([1, 1, 1, 1], 2) == [0, 0, 1, 1]
    assert divide([1, 1, 1, 5], 2) == [0, 0, 0, 1]
    assert divide([1, 1, 1, 1], 2, before=2) == [0, 1, 1, 1]
    assert divide([1, 1, 1, 1], 2, behind=4) == [0, 0, 0, 0]
    assert divide([2, 1, 1, 2, 0], 3) == [0, 1, 1, 2, 2]
    assert divide([0, 9], 2) == [0, 1]  # as many layers as workers


def built(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A small model and a batch."""
    return MODELS[name].build(TINY), MODELS[name].inputs(2, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", mostly_slow(list(MODELS), ["fcn5", "lstm"]))
def test_a_cut_gives_every_worker_parameters(name: str) -> None:
    model, batch = built(name)
    found = cut(name, model, batch, 2)
    modules = dict(model.named_modules())
    assert {"", *found.workers} <= set(modules)
    assert model.training
    owners: dict[int, int] = {}
    for path, parameter in model.named_parameters():
        at = path.rpartition(".")[0]
        while at not in found.workers:
            at = at.rpartition(".")[0]
        owners[found.workers[at]] = owners.get(found.workers[at], 0) + parameter.numel()
    assert sorted(owners) == [0, 1]
    assert found.text.startswith("worker 0 has ")
    assert found.text.count("the rest") == 1


def test_too_many_workers_for_the_layers() -> None:
    model, batch = built("lstm")
    with pytest.raises(ArgumentError, match="lstm has 2 layers to divide, too few for 3 workers"):
        cut("lstm", model, batch, 3)


def test_every_workload_has_its_layers() -> None:
    assert set(MODELS) == set(LAYERS)


# ---- what is left out, and what is judged


def measured(monkeypatch: pytest.MonkeyPatch, missing: str, options: Options) -> tuple[list[str], list[str]]:
    """What is skipped, and which modes are left, where the package ``missing`` is not there."""
    monkeypatch.setattr(graphs, "find_spec", lambda name: None if name == missing else object())
    contests: list[str] = []
    monkeypatch.setattr(graphs, "contest", lambda name, device, options, *_: contests.extend(options.modes) or [])
    skipped: list[str] = []
    graphs.measure(options, Settings(1, 1.0, (0, 1)), Notes(skipped.append, skipped.append), [])
    return skipped, contests


def test_what_is_not_there_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(devices=("shm",), workloads=("fcn5",), modes=("zerocopy", "copy", "rpc"))
    rpc = ["skipped: rpc needs grpcio: run pip install '.[benchmarks]' in the folder of Tensorwire's source"]
    assert measured(monkeypatch, "grpc", options) == (rpc, ["zerocopy", "copy"])
    lstm = Options(devices=("shm",), workloads=("lstm",), workers=3)
    assert measured(monkeypatch, "", lstm) == (["skipped: lstm can be cut over 2 workers"], [])


def test_losses_are_to_be_the_same_bit_for_bit() -> None:
    assert graphs.same({"a": [2.0, 1.0], "b": [2.0, 1.0]}) == "a, b"
    with pytest.raises(ProgramFailed, match=r"round 2: the loss is 1\.0000000001 with b, but 1\.0 with a"):
        graphs.same({"a": [2.0, 1.0], "b": [2.0, 1.0000000001]})
    assert graphs.loss_of([{"seconds": 0.0}, {"loss": 1.0}, {"loss": 1.0}]) == 1.0
    with pytest.raises(ProgramFailed, match="workers have different losses"):
        graphs.loss_of([{"loss": 1.0}, {"loss": 2.0}])


def judged(*, aimed: bool, **showed: float) -> tuple[str | None, bool | None]:
    """The verdict on a step of a second in which so much was counted or exposed."""
    details = {**dict.fromkeys(graphs.COUNTS, 0.0), "step": 1.0, "exposed": 0.0, **showed}
    record = Record("graph", "shm", "zerocopy", "training-step", "w", 1, 1.0, 1.0, 1.0, 1, details=details)
    record = graphs.judged(record, aimed=aimed)
    return record.target, record.met


def test_verdicts() -> None:
    target = "0 copies, registrations, RPCs"
    assert judged(aimed=False, exposed=0.5, messages=9.0) == (target, True)
    for name in graphs.NOTHING:
        assert judged(aimed=False, **{name: 0.1}) == (target, False)
    assert judged(aimed=True, exposed=0.03) == (f"{target}; exposed <= 3%", True)
    assert judged(aimed=True, exposed=0.031)[1] is False
    assert judged(aimed=True, copies=1.0)[1] is False
