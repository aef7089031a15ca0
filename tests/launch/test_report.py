"""What a script reports reaches the metrics and TensorBoard's files."""

from __future__ import annotations

import errno
import logging
import sys
from pathlib import Path

import pytest

from tensorwire.launch import tensorboard
from tests.harness.sandbox import Sandbox
from tests.launch.test_watch import WAITS_FOR_A_FILE, scraped, told_address

REPORTS = """
from tensorwire.observe import counters
before = counters.rpcs
for step in range(5):
    job.report(loss=1.0 / (step + 1) + job.rank, samples=8, total=5)
job.report(step=5, accuracy=0.5)
assert counters.rpcs == before
print("reported")
"""


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by name, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(folder))
    found.Reload()
    names = found.Tags()["tensors"]
    return {name: [(e.step, float(make_ndarray(e.tensor_proto))) for e in found.Tensors(name)] for name in names}


def test_metrics_have_what_the_script_reports(sandbox: Sandbox) -> None:
    flag = sandbox.folder / "flag"
    script = sandbox.script(REPORTS + WAITS_FOR_A_FILE)
    program = sandbox.launch("run", "--workers", "2", "--metrics", "0", "--", sys.executable, script, str(flag))
    who = 'index="1",{}node="0",role="worker"'
    text = scraped(
        told_address(program),
        'tensorwire_reported{index="1",name="loss",node="0",role="worker"} 1.2',
        'tensorwire_reported{index="0",name="accuracy",node="0",role="worker"} 0.5',
        f"tensorwire_samples_total{{{who.format('')}}} 40.0",
    )
    assert "# TYPE tensorwire_reported gauge" in text
    flag.touch()
    assert program.finish().status == 0
    sandbox.nothing_left()


def test_each_worker_writes_an_event_file(sandbox: Sandbox) -> None:
    pytest.importorskip("tensorboard")
    folder = sandbox.folder / "events"
    result = sandbox.run(sandbox.script(REPORTS), "--tensorboard", str(folder)).finish()
    assert (result.status, result.err) == (0, "")
    for rank in (0, 1):
        found = events(folder / f"worker-{rank}")
        assert found["accuracy"] == [(5, 0.5)]
        assert [step for step, _ in found["loss"]] == [1, 2, 3, 4, 5]
        assert [value for _, value in found["loss"]] == pytest.approx([1 / n + rank for n in range(1, 6)])
    sandbox.nothing_left()


def test_the_folder_as_an_argument_and_a_script_that_fails(sandbox: Sandbox) -> None:
    pytest.importorskip("tensorboard")
    folder = sandbox.folder / "events"
    body = (
        f"import tensorwire as tw\njob = tw.init(tensorboard={str(folder)!r})\njob.report(loss=2.0)\nraise KeyError(3)"
    )
    result = sandbox.python(sandbox.script(body, init=False)).finish()
    assert result.status == 1
    assert events(folder / "worker-0") == {"loss": [(1, 2.0)]}
    sandbox.nothing_left()


@pytest.mark.parametrize(
    ("hide", "folder", "why"),
    [
        ("sys.modules['tensorboard'] = None; ", "events", "need the package tensorboard: pip install tensorboard"),
        ("", "file/events", "cannot write event files to"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_at_once(sandbox: Sandbox, hide: str, folder: str, why: str) -> None:
    if not hide:
        pytest.importorskip("tensorboard")
    (sandbox.folder / "file").touch()
    body = f"{hide}import tensorwire as tw\ntw.init()\nprint('began')"
    script = sandbox.script(body, init=False)
    result = sandbox.run(script, "--tensorboard", str(sandbox.folder / folder), workers=1).finish()
    assert result.status == 1
    assert result.message().startswith("tensorwire: worker 0 raised ArgumentError: ")
    assert why in result.message()
    assert "began" not in result.out
    sandbox.nothing_left()


def test_a_full_disk_ends_the_file_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    events = tensorboard.EventFile(str(tmp_path), 0)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr(events._writer, "add_scalar", fails)
    with caplog.at_level(logging.WARNING, "tensorwire"):
        events.add(1, {"loss": 1.0})
        events.close()
        events.close()
    assert [record.getMessage() for record in caplog.records] == [f"TensorBoard's file ends here: {full}"]
    assert not events._thread.is_alive()
