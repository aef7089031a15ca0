"""What the demo tells at its end: one table, from the trace of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorwire.tables import print_table
from tensorwire.trace.parts import Parts, ProcessTrace, average, parts_of_trace, typical

MIB = 2**20


@dataclass(frozen=True)
class Outcome:
    """A finished training. ``per_step``: what one worker counted in one steady step, the mean over workers.

    ``steps``: each worker's. ``returned``, ``copied_back``: bytes that servers wrote, and copied, per worker and step.
    """

    data: str
    gate: float | None
    result: dict[str, Any]
    parts: Parts
    per_step: dict[str, float]
    steps: list[int]
    returned_bytes: float
    copied_back: float

    @property
    def passed(self) -> bool:
        """Whether the accuracy is enough, if there is a gate."""
        return self.gate is None or self.result["accuracy"] >= self.gate


def outcome(trace: dict[str, ProcessTrace], data: str, gate: float | None) -> Outcome:
    """Puts together what the processes wrote."""
    workers = [r for name, r in trace.items() if name.startswith("worker-")]
    servers = [r for name, r in trace.items() if name.startswith("server-")]
    steady: list[Any] = [r.facts["steady"] for r in workers]
    per_step = {k: sum(s[k] / s["steps"] for s in steady) / len(steady) for k in steady[0] if k != "steps"}
    result: Any = trace["worker-0"].facts["result"]
    paces: list[Any] = [r.facts["pace"] for r in workers]
    result["samples_per_second"] = sum(p["samples_per_second"] for p in paces)
    steps = [p["steps"] for p in paces]
    rounds = sum(steps) + len(steps)  # the first puts worker 0's values into the store
    returned, copied = (sum(r.counters[name] for r in servers) / rounds for name in ("bytes", "copied_bytes"))
    # Where workers exchange now and then, the middle half of the steps would have no exchange.
    step = (typical if result["mode"] == "sync" else average)(parts_of_trace(trace))
    return Outcome(data, gate, result, step, per_step, steps, returned, copied)


def rows(o: Outcome) -> list[tuple[str, str]]:
    """The table's rows."""
    n, r = o.per_step, o.result
    gate = "no gate" if o.gate is None else f"gate {o.gate:.0%}: {'passed' if o.passed else 'MISSED'}"
    return [
        ("data", o.data),
        ("model", f"FCN-5, {r['parameters']:,} parameters, {_mib(4 * r['parameters'])}"),
        ("mode", r["mode"]),
        ("device", r["device"]),
        ("steps", f"{_steps(o.steps)} in {r['seconds']:.1f} s"),
        ("loss", "not a number" if r["loss"] is None else f"{r['loss']:.3f} (mean of the last 20 steps)"),
        ("test accuracy", f"{r['accuracy']:.1%} ({gate})"),
        ("throughput", f"{r['samples_per_second']:,.0f} samples/s"),
        ("step", _share(o.parts.seconds, o.parts)),
        ("  compute", _share(o.parts.compute, o.parts)),
        ("  update", _share(o.parts.update, o.parts)),
        ("  exposed communication", _share(o.parts.exposed, o.parts)),
        ("  idle", _share(o.parts.idle, o.parts)),
        ("bytes out", f"{_mib(n['mapped_bytes'])} in mapped slots, sent by signal alone; {_mib(n['bytes'])} written"),
        ("bytes back", _back(o)),
        ("copies", f"{n['copies']:.3g} ({_mib(n['copied_bytes'])})"),
        ("messages", f"{n['messages']:.3g}"),
        ("RPCs", f"{n['rpcs']:g}"),
        ("registrations", f"{n['registrations']:g}"),
    ]


def show(o: Outcome) -> None:
    """Prints the table."""
    print()
    print_table(("", ""), rows(o), left=(0, 1), title="FCN-5 (from step on: per worker and step)")


def record(o: Outcome, **settings: object) -> dict[str, object]:
    """The same for ``--json``: seconds, bytes and counts a worker and step; ``settings`` are the demo's options."""
    parts = {k: getattr(o.parts, k) for k in ("compute", "update", "exposed", "idle")}
    return {
        "bench": "demo-fcn5",
        "workload": o.data,
        **settings,
        **{k: v for k, v in o.result.items() if k != "seconds"},
        "training_seconds": o.result["seconds"],
        "gate": o.gate,
        "seconds": o.parts.seconds,
        **parts,
        **o.per_step,
        "steps_by_worker": o.steps,
        "returned_bytes": o.returned_bytes,
        "copied_back": o.copied_back,
    }


def _steps(steps: list[int]) -> str:
    """One number, if all workers took as many."""
    return str(steps[0]) if len(set(steps)) == 1 else ", ".join(f"worker {i}: {n}" for i, n in enumerate(steps))


def _back(o: Outcome) -> str:
    if o.returned_bytes:
        return f"{_mib(o.returned_bytes)} written"
    return f"{_mib(o.copied_back)} copied to the worker" if o.copied_back else "none: read in mapped memory"


def _share(seconds: float, parts: Parts) -> str:
    return f"{seconds * 1e3:,.1f} ms ({seconds / parts.seconds:.1%})"


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f} MiB"
