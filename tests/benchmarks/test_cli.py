"""``python -m benchmarks``: a mistake is one line."""

from __future__ import annotations

import pytest

from benchmarks.cli import main
from tests.cli.test_cli import complaint
from tests.harness.sandbox import nothing_kept

PICTURE = "the name of a picture must end with .png, .svg, .pdf"
MISTAKES = [
    (["fly"], "No such command 'fly'"),
    (["device", "--peers", "pigeons"], "'pigeons' is not one of ucx, nixl, none"),
    (["device", "--link", "3gbit"], "'3gbit' is not one of 100mbit, 1gbit, 10gbit"),
    (["device", "--listen", "127.0.0.1:0"], "--listen and --connect measure verbs alone"),
    (["graph", "--modes", ","], "no mode: one or more of zerocopy, copy, rpc"),
    (["graph", "--workers", "1"], "1 is not in the range 2<=x<=8"),
    (["graph", "--report", "steps.txt"], f"--report steps.txt: {PICTURE}"),
    (["modes", "--report", "losses.txt"], f"--report losses.txt: {PICTURE}"),
    (["mxnet", "--workers", "5"], "'5' is not one of 1, 2, 3, 4"),
    (["store", "--part", "diloco"], "--part diloco needs --link, such as 1gbit"),
    (["store", "--part", "keys", "--link", "1gbit"], "--link goes with --part steps and diloco, not keys"),
    (["train", "--report", "/nowhere/steps.png"], "--report /nowhere/steps.png: there is no folder /nowhere"),
    (["train", "--link", "10gbit"], "--link measures tcp: give --device tcp"),
]


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_kept():
        for arguments, why in MISTAKES:
            assert why in complaint(capsys, monkeypatch, *arguments, command=main), arguments
