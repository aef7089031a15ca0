"""Jobs whose workers are killed, stopped and sent away at random: each push counts once, and nothing is left."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tensorwire.store.fates import Fate
from tensorwire.testing.patience import patient
from tensorwire.testing.punish import find_workers, punish, random_faults
from tensorwire.trace.push_fates import problems, read_fates
from tests.harness.sandbox import Sandbox
from tests.levels import mostly_long

WORKERS = 3
TRAIN = """
import time, torch, tensorwire as tw
job = tw.init()
torch.set_num_threads(1)
a, b = (torch.nn.Parameter(torch.zeros({workers}, 100)) for _ in range(2))
store = tw.torch.StoreOptimizer([("a", a), ("b", b)], torch.optim.SGD, lr=1.0, reduce="sum", mode=tw.store.{mode})
for step in job.steps({steps}):
    for p in (a, b):
        p.grad = torch.zeros_like(p)
        p.grad[job.rank] = 1  # so that parameters count the pushes of each
    store.step()
    if step == 0: print("begun", job.rank)
    time.sleep(0.02)
store.wait()
open({done!r}, "w").close()
print("last", *(int(-value) for p in (a, b) for value in p[:, 7]))
"""
CASES = [
    (mode, device, seed) for mode in ("Sync()", "Async()", "SSP(2)") for device in ("shm", "tcp") for seed in (1, 2, 3)
]


@pytest.mark.parametrize(("mode", "device", "seed"), mostly_long(CASES, []))
def test_each_push_counts_once_whatever_happens(
    sandbox: Sandbox, mode: str, device: str, seed: int, tmp_path: Path
) -> None:
    done = tmp_path / "done"  # a process that has left is nobody's to punish
    script = sandbox.script(TRAIN.format(workers=WORKERS, mode=mode, steps=1000, done=str(done)), init=False)
    options = (
        "--servers",
        "2",
        "--min-workers",
        "1",
        "--restart",
        "1000",
        "--device",
        device,
        "--fates",
        str(tmp_path / "fates"),
    )
    program = sandbox.run(script, *options, workers=WORKERS, TENSORWIRE_FAILURE_TIMEOUT=str(patient(1.5)))
    program.expect(*(f"begun {rank}" for rank in range(WORKERS)))  # what fails before ends the job
    faults = random_faults(seed, WORKERS, kinds=["kill", "kill", "stop"], pauses=(1.0, 3.0))
    pid, over = program.process.pid, lambda: done.exists() or program.process.poll() is not None
    happened = punish(lambda: find_workers(pid), faults, over)
    result = program.finish()
    assert result.status == 0, (happened, result.err)
    lines = read_fates([tmp_path / "fates"])
    assert problems(lines) == [], happened
    counted = Counter((f.shard, f.worker) for f in lines if isinstance(f, Fate) and f.fate != "discarded")
    expected = [counted[shard, rank] for shard in (0, 1) for rank in range(WORKERS)] if mode == "Sync()" else None
    last = [[int(n) for n in line.split()[1:]] for line in result.out.splitlines() if line.startswith("last")]
    assert last, happened
    for seen in last if expected is not None else ():
        assert seen in (expected, expected[3:] + expected[:3]), happened
    sandbox.nothing_left()


def test_a_seed_gives_the_same_faults() -> None:
    first, again = (list(islice(random_faults(5, 4, kinds=["kill", "stop"]), 20)) for _ in range(2))
    assert first == again
    assert {fault.rank for fault in first} == set(range(4))
    assert {fault.kind for fault in first} == {"kill", "stop"}
    assert first != list(islice(random_faults(6, 4, kinds=["kill", "stop"]), 20))
