"""Runs a benchmark as people do, and looks at what it writes."""

from __future__ import annotations

import json
import sys
from typing import Any

from tensorwire.bench.records import MODES, Record
from tensorwire.testing.patience import patient
from tests.harness.sandbox import Result, Sandbox

OURS = ("-m", "tensorwire.cli", "bench")
BESIDE = ("-m", "benchmarks")
FIELDS = {
    "bench": str,
    "device": str,
    "peer": str,
    "mode": str,
    "workload": str,
    "bytes": int,
    "seconds": float,
    "bytes_per_second": (float, type(None)),
    "limit": (str, type(None)),
    "limit_value": (float, type(None)),
    "ratio": (float, type(None)),
    "copies": (float, int, type(None)),
    "rpcs": (float, int, type(None)),
    "registrations": (float, int, type(None)),
}


def bench(sandbox: Sandbox, *command: str, **environment: str) -> tuple[Result, list[dict[str, Any]]]:
    """Runs it for a short while; its records, of which there are none where it skipped everything."""
    file = sandbox.folder / "figures.json"
    cache = str(sandbox.folder / "cache")
    program = sandbox.start(
        sys.executable, *command, "--quick", "--rounds", "1", "--json", str(file), XDG_CACHE_HOME=cache, **environment
    )
    out, _ = program.process.communicate(timeout=patient(280))  # each of its processes may import torch
    err = (sandbox.folder / "stderr0").read_text()
    assert program.process.returncode == 0, err
    sandbox.nothing_left()
    records = json.loads(file.read_text())
    for record in records:
        validate(record, records)
        assert record["workload"] in out
    return Result(0, out, err), records


def validate(record: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """A record is complete and agrees with itself and with its limit's own record."""
    for name, kind in FIELDS.items():
        assert isinstance(record[name], kind), (name, record)
    assert set(record) == {*FIELDS, *Record.__dataclass_fields__, "machine"}
    assert record["mode"] in MODES
    assert 0 < record["low"] <= record["seconds"] <= record["high"]
    assert "pinned: " in record["machine"] or "all programs share the processors" in record["machine"]
    assert (record["bytes_per_second"] is None) >= record["mode"].endswith("mapped")
    if record["limit"] is not None:
        same = [r for r in records if (r["workload"], r["mode"]) == (record["workload"], record["mode"])]
        (limit,) = [r for r in same if r["peer"] == record["limit"]]
        assert record["limit_value"] == limit["seconds"]
        assert record["ratio"] in (None, limit["seconds"] / record["seconds"])  # None: this machine is busy
        assert (record["ratio"] is None) == ("this machine is busy" in record["machine"])
    assert (record["target"] is None) <= (record["met"] is None)


def peers(records: list[dict[str, Any]], **wanted: Any) -> list[str]:
    """Whose records have these fields, in their order."""
    return [record["peer"] for record in records if wanted.items() <= record.items()]


def costs(records: list[dict[str, Any]], **wanted: Any) -> set[tuple[float, float, float]]:
    """The copies, RPCs and registrations of those records."""
    return {(r["copies"], r["rpcs"], r["registrations"]) for r in records if wanted.items() <= r.items()}
