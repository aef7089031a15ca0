"""``python -m benchmarks train``: the models, real short runs of it, and what it leaves out. No figure is judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sleeping_layers, steps, training
from benchmarks.sleeping_layers import SLEEPING
from tensorwire import models
from tensorwire.bench.compare import Stages
from tensorwire.bench.programs import Contender, ProgramFailed
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.charts.figure import check_picture
from tensorwire.errors import Unsupported
from tensorwire.trace.parts import ProcessTrace
from tests.bench.running import BESIDE, bench, peers
from tests.harness.sandbox import Sandbox
from tests.levels import mostly_long

TINY = 16  # divides the hidden sizes


def test_sleeping_layers_have_vgg16s_tensors() -> None:
    with torch.device("meta"):
        there, here = sleeping_layers.SleepingLayers(), models.vgg16()
    assert [p.shape for p in there.parameters()] == [p.shape for p in here.parameters()]


@pytest.mark.parametrize("name", mostly_long(list(training.MODELS), ["fcn5", "lstm"]))
def test_every_parameter_of_a_small_model_learns(name: str) -> None:
    torch.manual_seed(0)
    model = sleeping_layers.MODELS[name]
    module = model.build(TINY)
    loss = module(*model.inputs(min(model.size, 2), torch.Generator().manual_seed(0)))
    loss.backward()
    assert torch.isfinite(loss)
    assert [n for n, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_gradients_of_sleeping_layers_are_not_copied_and_the_sleeps_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    model = sleeping_layers.SleepingLayers(TINY)
    model.take(30.0)
    model(torch.ones(1, requires_grad=True)).backward()
    assert sum(slept) == pytest.approx(30.0)
    assert sum(slept[: len(slept) // 2]) == pytest.approx(10.0)  # forward
    for layer in model.layers:
        assert isinstance(layer, sleeping_layers.Layer)
        assert layer.weight.grad is not None
        assert layer.weight.grad.data_ptr() == layer.ready[0].data_ptr()


@pytest.mark.slow
def test_a_step_with_a_store_without_one_and_under_ddp(sandbox: Sandbox) -> None:
    pytest.importorskip("matplotlib")
    chart = sandbox.folder / "steps.png"
    _, records = bench(sandbox, *BESIDE, "train", "--steps", "2", "--report", str(chart))
    assert peers(records) == ["no store", "tensorwire", "DDP, gloo"]
    assert {(r["bench"], r["mode"], r["device"]) for r in records} == {("train", "training-step", "shm")}
    alone, ours, ddp = records
    assert (ours["copies"], ours["rpcs"], ours["registrations"]) == (2 * 10, 0, 0)  # a gradient once, in both workers
    assert ddp["details"]["loss"] == pytest.approx(ours["details"]["loss"], rel=1e-4)
    assert ours["details"]["overhead"] == ours["seconds"] / alone["seconds"] - 1
    assert min(ours["details"][name] for name in ("compute", "exposed")) > 0
    assert min(ours["details"][name] for name in ("update", "idle")) >= 0  # such a short step may have none
    assert "compute" not in alone["details"].keys() | ddp["details"].keys()
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.usefixtures("only_link")
def test_layers_that_sleep_over_a_link(sandbox: Sandbox) -> None:
    options = ("--workload", SLEEPING, "--device", "tcp", "--link", "10gbit", "--workers", "1", "--overlap")
    result, records = bench(sandbox, *BESIDE, "train", "--steps", "2", *options)
    if "skipped" in result.err:
        assert "--link 10gbit: " in result.err
        pytest.skip(result.err.strip())
    assert peers(records) == ["compute alone", "tensorwire", "tensorwire, overlap"]
    assert all("10gbit" in r["workload"] for r in records)
    compute, plain, overlapped = (r["seconds"] for r in records)
    share = 1 - (overlapped - compute) / (plain - compute)
    assert records[2]["details"]["hidden_share"] == pytest.approx(share)
    assert records[1]["details"]["samples_per_second"] > 0
    assert not list(Path("/run/netns").glob("tw-bench-*"))


def test_losses_are_to_be_the_same() -> None:
    steps.check_losses("fcn5", {"tensorwire": 2.0, "ddp": 2.0001})
    for other in (2.001, float("nan")):
        with pytest.raises(ProgramFailed, match=r"fcn5: the loss is 2 with tensorwire, but \S+ with ddp"):
            steps.check_losses("fcn5", {"tensorwire": 2.0, "ddp": other})


def test_steps_between_rounds_are_not_told() -> None:
    def computed(*computes: tuple[float, float]) -> list[Any]:
        found: list[Any] = []
        for step, (start, stop) in enumerate(computes, 1):
            found += [
                ("compute", step, start, stop),
                ("push", step, stop, stop + 1),
                ("wait", step, stop + 1, stop + 2),
            ]
        return found

    # Three steps of 10 s; before the second round, a pause of 1000 s.
    spans = computed((0, 8), (10, 18), (20, 1028), (1030, 1038))
    worker = ProcessTrace("worker-0", {"timed": [[10.0, 20.0], [1030.0, 1040.0]]}, {}, spans)
    told = steps.parts({"worker-0": worker})
    assert (told["step"], told["compute"], told["exposed"]) == (10.0, 8.0, 2.0)


def test_verdicts() -> None:
    def judged(exposed: float, theirs: float) -> bool | None:
        made = {
            name: Record("train", "shm", name, "training-step", "w", 1, seconds, seconds, seconds, 1)
            for name, seconds in {"no store": 0.9, "tensorwire": 1.0, "DDP, gloo": theirs}.items()
        }
        return training.judged(replace(made["tensorwire"], details={"exposed": exposed, "step": 1.0}), made).met

    assert [judged(0.10, 1.1), judged(0.11, 1.1), judged(0.10, 0.99)] == [True, False, False]


def test_a_chart_needs_matplotlib_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match=r"--report needs matplotlib: run pip install '\.\[plot\]'"):
        check_picture(str(tmp_path / "steps.png"), option="--report")


def test_who_fails_or_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left, told = 110 << 30, []

    def ask(name: str, stage: Any) -> list[Any]:
        nonlocal left
        left -= 30 << 30  # what each takes
        if name == "fails":
            raise ProgramFailed("no more")
        return []

    monkeypatch.setattr(Stages, "get", lambda self, contender: None)
    monkeypatch.setattr(steps, "available_bytes", lambda: left)
    notes, label = Notes(lambda text: None, told.append), "vgg16 over shm"

    def started(*names: str) -> list[str]:
        contenders = {name: Contender(name, ()) for name in names}
        room = {"ddp": 1.25, "small": 0.5}
        made = steps.started(Stages(()), contenders, ask, room, "ours", label=label, notes=notes, peers=("fails",))
        return list(made)

    assert started("alone", "ours", "overlap", "ddp", "small") == ["alone", "ours", "overlap", "small"]
    assert told == ["skipped: vgg16 over shm: ddp may take 37.5 GiB of memory, and 20 GiB are left"]
    left = 110 << 30
    assert started("fails", "ours") == ["ours"]
    assert told[-1] == "skipped: fails: no more"
