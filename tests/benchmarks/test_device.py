"""``python -m benchmarks device``: a real short run. No figure is judged."""

from __future__ import annotations

import pytest

from tests.bench.running import BESIDE, bench, peers
from tests.harness.sandbox import Sandbox


@pytest.mark.slow
def test_devices_and_who_is_left_out(sandbox: Sandbox) -> None:
    options = ("--sizes", "64", "--peers", "nixl", "--peer-python", "/bin/false")
    result, records = bench(sandbox, *BESIDE, "device", *options)
    assert "skipped: nixl is not here: pip install" in result.err
    libfabric = [] if "skipped: C libfabric" in result.err else ["libfabric"]
    waiting = peers(records, device="tcp", mode="waiting-target")
    assert waiting == ["tensorwire", "C sockets", "C sockets, polling", *libfabric]
    assert peers(records, device="tcp", mode="passive-target") == ["tensorwire", "C sockets"]
    assert peers(records, device="shm") == ["tensorwire", "C memcpy"]
