"""A step of training: the store beside optimizers on the device and libraries that offload them.

Torch's AdamW on the device is there all the time. The others come one after the other, because the host's memory is not
enough for all, and take turns with it: in each round it computes alone, it steps, and they step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensorwire.tables import print_table
from tests.gpu import arms
from tests.gpu.arms import Load, Ours
from tests.gpu.programs import Failed, Program
from tests.gpu.turns import COMPUTE, STEPS

LEAST_SECONDS, MOST_SECONDS = 30.0, 170.0  # what an arm may take
COMPUTE_SECONDS = 0.5
RATIO, MEMORY, WAITS = 1.15, 0.3, 1  # what is to be reached
_OURS = 2  # cores that the worker's own threads have
BASELINE, OFFLOADERS = "torch AdamW", ("FSDP2", "torchao", "DeepSpeed")

Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is asked for. ``servers``: numbers of server processes."""

    load: Load
    rounds: int
    steps: int
    servers: tuple[int, ...]
    cores: int


def programs(plan: Plan) -> list[tuple[str, Callable[..., None], Any]]:
    """Name, program and what it gets of each arm: what matters most first, because time may run out."""
    ours = {
        (n, overlap): (named(n, overlap), arms.store, Ours(n, overlap, max(1, (plan.cores - _OURS) // n)))
        for n in plan.servers
        for overlap in (True, False)
    }
    last = max(plan.servers)
    peers = zip(OFFLOADERS, (arms.fsdp, arms.torchao, arms.deepspeed), strict=True)
    return [
        ours.pop((last, True)),
        ours.pop((last, False)),
        *((name, arms.peer, make) for name, make in peers),
        *sorted(ours.values(), key=lambda arm: not arm[2].overlap),
    ]


def named(servers: int, overlap: bool) -> str:
    """An arm of the store."""
    return f"store, {servers} server{'s' if servers > 1 else ''}, overlap {'on' if overlap else 'off'}"


def measure(plan: Plan, deadline: float, say: Say) -> dict[str, Any]:
    """All arms, as far as time suffices. Raises `Failed` if the one fails that all are compared with."""
    rows: list[Row] = []
    with Program(arms.baseline, plan.load, COMPUTE_SECONDS, seconds=deadline - time.monotonic()) as base:
        device, batch, numbers = base.get()
        plan = replace(plan, load=replace(plan.load, batch=batch))
        say(f"step: {numbers / 1e6:,.1f} M parameters, batch {batch}, on {device}")
        first = base.get()
        for name, program, argument in programs(plan):
            began = time.monotonic()
            row: Row = {"who": name}
            rows.append(row)
            try:
                row.update(contest(base, program, argument, plan, deadline))
                say(f"step: {name}: {row['step'] * 1e3:,.0f} ms, in {time.monotonic() - began:.0f} s")
            except Failed as error:
                row["reason"] = str(error)
                say(f"step: {name}: {error}")
            base.seconds = deadline - time.monotonic()
    return {
        "device": device,
        "batch": batch,
        "parameters": numbers,
        "rows": [*summary(first, rows), *rows],
    }


def contest(base: Program, program: Callable[..., None], argument: Any, plan: Plan, deadline: float) -> Row:
    """The rounds of one arm. Raises `Failed`."""
    left = deadline - time.monotonic()
    if left < LEAST_SECONDS:
        raise Failed(f"left out: {left:.0f} s are left of the budget")
    ends = time.monotonic() + min(left, MOST_SECONDS)
    rounds: list[list[dict[str, Any]]] = []
    with Program(program, plan.load, argument, seconds=ends - time.monotonic()) as arm:
        up = arm.get()
        for _ in range(plan.rounds):
            arm.seconds = ends - time.monotonic()
            beside = [base.ask(COMPUTE, plan.steps), base.ask(STEPS, plan.steps)]
            rounds.append([*beside, arm.ask(STEPS, plan.steps)])
    compute, besides, mine = zip(*rounds, strict=True)
    return {
        **up,
        "step": _median(mine),
        "compute": _median(compute),
        "beside": _median(besides),
        "peak": max(each["peak"] for each in mine),
        "base_peak": max(each["peak"] for each in besides),
        "host_waits": max(each["host_waits"] for each in mine),
        "most_host_waits": max(each["most_host_waits"] for each in mine),
        "seconds": [each["seconds"] for each in mine],
        "loss": mine[-1]["loss"],
    }


def _median(rounds: Any) -> float:
    return float(statistics.median(second for each in rounds for second in each["seconds"]))


def summary(first: Row, rows: list[Row]) -> list[Row]:
    """The row of who was there all the time."""
    beside = [row for row in rows if "beside" in row]
    if not beside:
        return [{"who": BASELINE, **first, "reason": "nobody was there to take turns with"}]
    return [
        {
            "who": BASELINE,
            **first,
            "step": statistics.median(row["beside"] for row in beside),
            "beside": statistics.median(row["beside"] for row in beside),
            "compute": statistics.median(row["compute"] for row in beside),
            "peak": max(row["base_peak"] for row in beside),
        }
    ]


# ---- output


def show(found: dict[str, Any]) -> None:
    """The table, what each keeps, and the targets."""
    head = ("who", "step ms", "of AdamW", "compute ms", "exposed ms", "at rest GB", "peak GB", "waits")
    table = []
    for row in found["rows"]:
        if "step" not in row:
            table.append([row["who"], *[""] * (len(head) - 1)])
            continue
        times = [f"{row['step'] * 1e3:,.1f}", f"{row['step'] / row['beside']:.3f}", f"{row['compute'] * 1e3:,.1f}"]
        times.append(f"{(row['step'] - row['compute']) * 1e3:,.1f}")
        sizes = [f"{row['at_rest'] / 1e9:.2f}", f"{row['peak'] / 1e9:.2f}"]
        waits = f"{row['host_waits']:g}, most {row['most_host_waits']}" if "store" in row["who"] else ""
        table.append([row["who"], *times, *sizes, waits])
    size = f"{found['parameters'] / 1e6:,.1f} M parameters, batch {found['batch']}, {found['device']}"
    print_table(head, table, title=f"A step: {size} (medians; compute, AdamW: in the same rounds; waits: host, a step)")
    for row in found["rows"]:
        words = [row[key] for key in ("reason", "keeps", "note") if row.get(key)]
        print(f"  {row['who']}: {'; '.join(words)}")
    for target, met in targets(found["rows"]).items():
        print(f"  {met}: {target}")


def targets(rows: list[Row]) -> dict[str, str]:
    """What is to be reached, and whether it was."""
    done = {row["who"]: row for row in rows if "step" in row}
    ours = [row for name, row in done.items() if "overlap on" in name]
    if not ours:
        return {"the targets, because no step of the store was measured": "not judged"}
    best = min(ours, key=lambda row: row["step"] / row["beside"])
    ratio, base = best["step"] / best["beside"], done[BASELINE]
    share = max(row["at_rest"] for row in ours) / base["at_rest"]
    waits = max(row["most_host_waits"] for row in ours)
    peers = {name: done[name] for name in OFFLOADERS if name in done}
    ahead = all(ratio < row["step"] / row["beside"] for row in peers.values())
    off = done.get(best["who"].replace("overlap on", "overlap off"))
    update = 0.0 if off is None else off["step"] - off["compute"]
    long = update <= best["compute"]
    where = "" if long else f"; compute is shorter than the update, {update * 1e3:.0f} ms"
    return {
        f"at most {RATIO} of {BASELINE}'s step where compute takes as long as the update: {ratio:.3f}{where}": (
            _met(ratio <= RATIO) if long else "not judged"
        ),
        f"ahead of who offloads ({', '.join(peers) or 'none was measured'})": _met(ahead) if peers else "not judged",
        f"at most {MEMORY} of {BASELINE}'s memory between steps: {share:.3f}": _met(share <= MEMORY),
        f"at most {WAITS} wait of the host a step with overlap: {waits:g}": _met(waits <= WAITS),
    }


def _met(yes: bool) -> str:
    return "met" if yes else "NOT MET"
