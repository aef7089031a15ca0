"""``python -m benchmarks``: a mistake is one line."""

from __future__ import annotations

import pytest

from benchmarks.cli import main
from tests.cli.test_cli import complaint
from tests.harness.sandbox import nothing_kept

MISTAKES = [
    (["fly"], "No such command 'fly'"),
    (["device", "--peers", "pigeons"], "--peers: 'pigeons' is not one of none, all, ucx"),
    (["edge", "--peers", "pigeons"], "'pigeons' is not one of grpc, torch-rpc, gloo"),
    (["graph", "--modes", "carrier"], "'carrier' is not one of zerocopy, copy, rpc"),
    (["graph", "--modes", ","], "no mode: one or more of zerocopy, copy, rpc"),
    (["graph", "--workers", "1"], "1 is not in the range 2<=x<=8"),
    (["graph", "--device", "verbs"], "'verbs' is not one of shm, tcp"),
    (["graph", "--report", "steps.txt"], "--report steps.txt: the name of a picture must end with .png, .svg, .pdf"),
    (["modes", "--modes", "carrier"], "'carrier' is not one of sync, async, ssp"),
    (["modes", "--report", "losses.txt"], "--report losses.txt: the name of a picture must end with .png, .svg, .pdf"),
    (["mxnet", "--workers", "5"], "'5' is not one of 1, 2, 3, 4"),
    (["mxnet", "--report", "epochs.txt"], "--report epochs.txt: the name of a picture must end with .png, .svg, .pdf"),
    (["store", "--part", "diloco"], "--part diloco needs --link, such as 1gbit"),
    (["train", "--report", "/nowhere/steps.png"], "--report /nowhere/steps.png: there is no folder /nowhere"),
    (["train", "--link", "10gbit"], "--link measures tcp: give --device tcp"),
    (["train", "--workload", "resnet"], "'resnet' is not one of alexnet, inception, vgg16"),
]


@pytest.mark.parametrize(("arguments", "why"), MISTAKES, ids=lambda a: " ".join(a) if isinstance(a, list) else "")
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    with nothing_kept():
        assert why in complaint(capsys, monkeypatch, *arguments, command=main)
