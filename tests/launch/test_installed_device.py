"""A device of another package: installed into a folder, found by its name, and used by a job."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.sandbox import Sandbox

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_device"

TRAINS = """
import numpy as np
from counted_device import CountedDevice
from tensorwire.store import KeyValue

kv = KeyValue(rule="sum", reduce="mean")
kv.init("weight", np.full(3003, 0.5, "f4"))
for step in range(4):
    kv.push("weight", np.full(3003, 0.25 * (1 + job.rank), "f4"))
assert (kv.pull("weight").wait() == 0.5 + 4 * 0.375).all(), "other values"
print("devices", *job._worker.member.devices)
print("route", job.routes["server 0"])
print(f"sent{job.rank}", CountedDevice.nbytes, CountedDevice.signals)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH, into which pip installed the example."""
    pytest.importorskip("setuptools")  # which builds the package
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source)  # building leaves files beside the source
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source))
    subprocess.run(command, check=True)
    return str(target)


def test_a_job_runs_over_it(sandbox: Sandbox, installed: str) -> None:
    script = sandbox.script(TRAINS)
    result = sandbox.run(script, "--device", "counted", PYTHONPATH=installed).finish()
    assert (result.status, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert lines.count(["devices", "counted"]) == 2
    assert result.out.splitlines().count("route counted: the device that both sides were told to use") == 2
    payload = 4 * 3003 * 4  # steps, elements, bytes
    for rank in range(2):
        ((_, nbytes, signals),) = (line for line in lines if line[0] == f"sent{rank}")
        assert int(nbytes) >= payload
        assert int(signals) >= 4
    sandbox.nothing_left()


def test_it_is_known_to_the_commands_by_its_name(sandbox: Sandbox, installed: str) -> None:
    doctor = sandbox.launch("doctor", "--json", PYTHONPATH=installed, TENSORWIRE_DEVICE="counted").finish()
    sections = {section["title"]: section["findings"] for section in json.loads(doctor.out)["sections"]}
    found = {finding["name"]: finding for finding in sections["devices"]}
    assert list(found) == ["loopback", "shm", "tcp", "verbs", "counted"]
    assert found["counted"]["value"].startswith("works: a write and its signal arrived")
    (setting,) = (finding for finding in sections["settings"] if finding["name"] == "TENSORWIRE_DEVICE")
    assert (setting["value"], setting["level"]) == ("counted", "fine")
    wrong = sandbox.launch("run", "--device", "fax", "--", "true", PYTHONPATH=installed).finish()
    assert wrong.status == 2
    assert "device must be one of auto, shm, tcp, verbs, counted, not 'fax'" in wrong.one_line()
