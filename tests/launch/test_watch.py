"""Metrics and traces of real jobs."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import urllib.request
from pathlib import Path

import pytest

from tensorwire.launch.metrics import MetricsServer, parse_metrics_address
from tensorwire.trace.chrome import read_chrome
from tensorwire.trace.parts import parts_of_trace
from tests.harness.sandbox import HANG_SECONDS, Program, Sandbox, free_port, nothing_kept

SPANS = """
from tensorwire.observe import spans
for step in (2, 3, 4):
    spans.add("compute", step, 4.0 * step, 4.0 * step + 3)
    spans.add("wait", step, 4.0 * step + 3, 4.0 * step + 3.5)
job.barrier()
print("ready", job.rank)
"""
TRAINS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)

def steps(number):
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.full((3, 4), 1.0 + job.rank)).sum().backward()
        optimizer.step()
"""
BOTH = """
other = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
overlapping = tw.torch.StoreOptimizer(
    other.named_parameters(), torch.optim.SGD, lr=0.1, overlap=True, max_grad_norm=1.0
)
for _ in range(20):
    steps(1)
    overlapping.zero_grad()
    other(torch.full((8, 64), 1.0 + job.rank)).sum().backward()
    overlapping.step()
"""
WAITS_FOR_A_FILE = "while not os.path.exists(sys.argv[1]): time.sleep(0.02)"


def metrics(address: str) -> str:
    """What a scraper gets that speaks OpenMetrics."""
    request = urllib.request.Request(address, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text: str = answer.read().decode()
    assert text.endswith("# EOF\n")
    return text


def told_address(program: Program) -> str:
    """Where the launcher says that the metrics are."""
    while True:
        found = re.search(r"metrics are at (http://\S+)\n", program._errors.read_text())
        if found:
            return found[1]
        assert program.process.poll() is None, program._errors.read_text()


def scraped(address: str, *wanted: str) -> str:
    """Until all the wanted lines are there: processes report once a second."""
    while True:
        text = metrics(address)
        if set(wanted) <= set(text.splitlines()):
            return text


def test_metrics_of_all_processes_of_all_nodes(sandbox: Sandbox) -> None:
    flag, port = sandbox.folder / "flag", free_port()
    script = sandbox.script(SPANS + WAITS_FOR_A_FILE)
    secret = sandbox.secret()

    def node(number: int, *options: str) -> Program:
        where = ("--rendezvous", f"127.0.0.1:{port}", "--nodes", "2", "--node", str(number), *options)
        command = (sys.executable, script, str(flag))
        return sandbox.launch("run", *where, "--", *command, TENSORWIRE_SECRET_FILE=secret)

    zero, one = node(0, "--metrics", "0"), node(1)
    text = scraped(
        told_address(zero),
        *(f'tensorwire_step{{index="{n}",node="{n}",role="worker"}} 3.0' for n in (0, 1)),
        *(f'tensorwire_step{{index="{n}",node="{n}",role="server"}} 0.0' for n in (0, 1)),
    )
    who = 'index="1",node="1"'
    assert f'tensorwire_seconds_total{{{who},part="compute",role="worker"}} 9.0' in text
    assert f'tensorwire_seconds_total{{{who},part="wait",role="worker"}} 1.5' in text
    assert re.search(rf'tensorwire_rpcs_total{{{who},role="worker"}} [1-9]', text)
    for kind in ("step gauge", "bytes counter", "rpcs counter", "seconds counter", "report_age_seconds gauge"):
        assert f"# TYPE tensorwire_{kind}" in text
    flag.touch()
    assert [program.finish().status for program in (zero, one)] == [0, 0]
    sandbox.nothing_left()


def test_a_port_that_is_taken_is_refused_before_anything_starts(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = sandbox.run(sandbox.script("print('started')"), "--metrics", str(port)).finish()
    assert (result.status, result.out) == (2, "")
    assert result.one_line() == f"tensorwire: --metrics cannot listen on 127.0.0.1:{port}: Address already in use"
    sandbox.nothing_left()


def test_an_address_of_metrics() -> None:
    assert parse_metrics_address("9400") == ("127.0.0.1", 9400)
    assert parse_metrics_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    with nothing_kept():
        server = MetricsServer("127.0.0.1", 0)
        assert "# EOF" in metrics(server.address)  # also while nobody has reported
        server.close()


@pytest.mark.slow
def test_a_training_leaves_a_trace_whose_parts_add_up(sandbox: Sandbox) -> None:
    """Two stores take turns, one of them with overlap and clipping."""
    path, temporary = sandbox.folder / "trace.json", sandbox.folder / "temporary"
    temporary.mkdir()
    script = sandbox.script(TRAINS + BOTH)
    result = sandbox.run(script, "--trace", str(path), "--device", "tcp", TMPDIR=str(temporary)).finish()
    assert result.status == 0
    assert result.one_line().startswith(f"tensorwire: the trace is in {path}: ")
    found = read_chrome(path)
    assert sorted(found) == ["server-0", "worker-0", "worker-1"]
    assert {name: found[name].clock.error for name in found} == dict.fromkeys(found, 0.0)
    parts = parts_of_trace(found)
    assert len(parts) == 2 * 2 * 20
    last = max(p.step for p in parts)  # it lasts until the script has ended, which is no part of training
    assert sum(p.accounted for p in parts if p.step < last) == pytest.approx(
        sum(p.seconds for p in parts if p.step < last), rel=0.05
    )
    names = {e["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"}
    assert {"compute", "push", "wait", "update", "transfer", "exposed"} <= names
    assert any(p.hidden > 0 for p in parts)
    assert [p for p in temporary.iterdir() if p.name.startswith("tensorwire")] == []
    sandbox.nothing_left()


def test_a_job_that_failed_leaves_the_trace_of_who_could_still_write(sandbox: Sandbox) -> None:
    ends = "if job.rank: os.kill(os.getpid(), signal.SIGKILL)\nwhile True: time.sleep(0.02)"
    body = f"job._worker.member.card('server 0'){SPANS}{ends}"
    path, own = sandbox.folder / "trace.json", sandbox.folder / "own"
    program = sandbox.run(sandbox.script(body), "--trace", str(path), TENSORWIRE_TRACE=str(own))
    result = program.finish()
    assert result.status == 137
    first, last = result.err.splitlines()
    assert first == "tensorwire: worker 1 was killed by SIGKILL"
    assert last.startswith("tensorwire: the trace is in ")
    assert sorted(read_chrome(path)) == ["server-0", "worker-0"]  # worker 0 computed on, and was ended after the grace
    assert sorted(p.name for p in own.iterdir()) == ["server-0.json", "worker-0.json"]  # the user's own folder stays


def test_a_job_without_a_trace_says_so_and_makes_no_file(sandbox: Sandbox) -> None:
    path = Path(sandbox.folder) / "trace.json"
    script = sandbox.script("os.kill(os.getpid(), signal.SIGKILL)", init=False)
    result = sandbox.run(script, "--trace", str(path), workers=1).finish()
    assert result.status == 137
    assert "worker 0 was killed by SIGKILL" in result.err
    assert path.exists() == ("the trace is in" in result.err)  # whether the server had joined by then


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ((1, 3), "tensorwire: the trace is in {path}: "),
        ((1, 7), "tensorwire: the trace could not be written to {path}: No space left on device"),
    ],
    ids=["null", "full"],
)
def test_a_trace_into_a_device_leaves_the_device(sandbox: Sandbox, device: tuple[int, int], told: str) -> None:
    path = sandbox.folder / "device"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*device))
    except PermissionError:
        pytest.skip("making a device needs root")
    result = sandbox.run(sandbox.script("job.barrier()"), "--servers", "0", "--trace", str(path)).finish()
    assert result.one_line().startswith(told.format(path=path))
    assert (result.status, stat.S_ISCHR(path.stat().st_mode)) == (0, True)
    sandbox.nothing_left()
