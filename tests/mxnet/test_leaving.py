"""A script that ends with requests in MXNet's engine: they take place, or the job and its record say that not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.testing.patience import patient
from tensorwire.trace.push_fates import problems, read_fates, totals
from tests.harness.jobs import run_job
from tests.mxnet.test_store import store_of

STEPS, KEYS = 20, 4
SCRIPT = f"""
import tensorwire as tw

tw.init()  # so that MXNet is imported later, and its engine would stop before this worker leaves
import tensorwire.mxnet
import mxnet as mx

store, size = mx.kv.create("dist_tensorwire_sync"), 500_000
store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
store.init(list(range({KEYS})), [mx.nd.zeros((size,))] * {KEYS})
outs = [mx.nd.zeros((size,)) for _ in range({KEYS})]
for step in range({STEPS}):
    for key in range({KEYS}):
        store.push(key, -mx.nd.ones((size,)))
        store.pull(key, outs[key])
if store.rank == 0:
    print([float(out[-1].asscalar()) for out in outs])
"""


def test_a_script_that_just_ends_loses_no_push(tmp_path: Path) -> None:
    script, record = tmp_path / "script.py", tmp_path / "fates"
    script.write_text(SCRIPT)
    here = Path(sys.executable).parent
    words = [here / "tensorwire", "run", "--workers", "2", "--servers", "1", "--fates", record]
    done = subprocess.run([*words, "--", sys.executable, script], capture_output=True, text=True, timeout=patient(60.0))
    assert done.returncode == 0, done.stderr
    assert str([2.0 * STEPS] * KEYS) in done.stdout
    lines = read_fates([record])
    assert problems(lines) == []
    assert len({total.merged for total in totals(lines)}) == 1


def fails(job: tw.Job) -> None:
    mx, kv = store_of()

    def refuse(*_: object, **__: object) -> None:
        raise errors.WaitTimeout("nobody came")

    kv.init(0, mx.nd.zeros((4,)))
    kv.push(0, mx.nd.ones((4,)))
    mx.nd.waitall()
    kv._store.push = refuse
    kv.push(0, mx.nd.ones((4,)))
    with pytest.raises(errors.WaitTimeout, match="nobody came"):
        kv._leave()
    kv._requests.error = None  # the job goes on, for its record
    kv._store._finish()
    with pytest.raises(errors.JobEnded, match="has left the job"):
        kv._store.pull(0)


def test_a_push_that_was_asked_for_and_did_not_leave_is_told_and_recorded(tmp_path: Path) -> None:
    run_job(fails, workers=1, fates=tmp_path).ok()
    (said,) = problems(read_fates([tmp_path]))
    assert "worker 0" in said
    assert "2 pushes, and 1" in said
