"""``python -m benchmarks versions``: real short runs, whose values are compared, and what is told of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import versions
from tensorwire.bench.records import Record
from tests.bench.running import BESIDE, bench, peers
from tests.harness.sandbox import Sandbox

OURS = ["tensorwire", "tensorwire, pull alone", "tensorwire, load_into"]
NEEDS = {"torch RPC": "torch", "gloo broadcast": "torch", "grpc": "grpc", "safetensors file": "safetensors"}


@pytest.mark.slow
def test_the_same_weights_by_other_libraries(sandbox: Sandbox) -> None:
    picture = sandbox.folder / "weights.svg"
    result, records = bench(sandbox, *BESIDE, "versions", "--sizes", "64KiB,256KiB", "--report", str(picture))
    others = [name for name, module in NEEDS.items() if importlib.util.find_spec(module)]
    flight = ["Arrow Flight"] if importlib.util.find_spec("pyarrow") else []
    assert flight or "skipped: flight is not here: pip install pyarrow" in result.err
    for name in {r["workload"] for r in records}:
        assert peers(records, workload=name) == [*OURS, *others, *flight]
    assert len(records) == 3 * len([*OURS, *others, *flight])  # two sizes, and many tensors
    assert all(0 < r["details"]["pause"] <= 1.1 * r["high"] for r in records)
    assert versions.FIT_TITLE in result.out
    assert "Arrow Flight" in picture.read_text() or not flight


@pytest.mark.slow
@pytest.mark.usefixtures("only_link")
def test_over_a_link(sandbox: Sandbox) -> None:
    result, records = bench(sandbox, *BESIDE, "versions", "--link", "1gbit")
    if "skipped" in result.err:
        assert "--link 1gbit: " in result.err
        pytest.skip(result.err.strip())
    assert peers(records, mode="read-training") == ["tensorwire", versions.FILE, "iperf3"]
    assert all(r["details"]["steps_per_second"] > 0 for r in records)
    assert not list(Path("/run/netns").glob("tw-bench-*"))


def record(tensors: int, nbytes: int, seconds: float, peer: str = "x") -> Record:
    title = f"versions of so much in {tensors} tensors, shm, 1 reader"
    return Record("versions", "shm", peer, "weights", title, nbytes, seconds, seconds, seconds, 1)


def test_a_tensor_and_a_byte_are_told_apart() -> None:
    sizes = [(16, 2**22), (16, 2**29), (512, 2**22)]
    records = [record(n, nbytes, n * 20e-6 + nbytes / 5e9) for n, nbytes in sizes]
    records += [record(n, nbytes, nbytes / 5e9 - n * 1e-9, "y") for n, nbytes in sizes]
    assert versions.fits(records) == [("shm", "x", "20 us", "5 GB/s"), ("shm", "y", "0", "5 GB/s")]
    assert versions.fits(records[:1]) == []
