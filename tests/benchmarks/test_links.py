"""``python -m benchmarks --link``: real short runs over cables that we make. No figure is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.running import BESIDE, bench, peers
from tests.harness.sandbox import Sandbox
from tests.levels import long


@pytest.mark.slow
@pytest.mark.usefixtures("only_link")
@pytest.mark.parametrize(
    ("command", "modes"),
    [
        long((("device",), ["one-way", "both-ways"])),
        (("store", "--workload", "tiny"), ["push", "pull", "push-and-pull"]),
    ],
)
def test_over_a_link(sandbox: Sandbox, command: tuple[str, ...], modes: list[str]) -> None:
    result, records = bench(sandbox, *BESIDE, *command, "--link", "1gbit")
    if "skipped" in result.err:
        assert "--link 1gbit: " in result.err
        pytest.skip(result.err.strip())
    assert list(dict.fromkeys(r["mode"] for r in records)) == modes
    for mode in modes:
        both = mode in ("both-ways", "push-and-pull")
        assert peers(records, mode=mode) == ["tensorwire", "iperf3", *(["iperf3 --bidir"] if both else [])]
    assert all("1gbit" in r["workload"] for r in records)
    assert not list(Path("/run/netns").glob("tw-bench-*"))
