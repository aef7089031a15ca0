"""``tensorwire doctor``: what it sees, what it says to people and programs, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import resource
import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

from tensorwire.device.verbs.ports import has_active_port
from tests.harness.sandbox import Result, Sandbox, free_port


def doctor(sandbox: Sandbox, *arguments: str, **environment: str) -> Result:
    return sandbox.launch("doctor", *arguments, **environment).finish()


def found(result: Result) -> dict[str, dict[str, dict[str, Any]]]:
    """Its findings, by the titles of sections and the names in them."""
    record = json.loads(result.out)
    assert record["sound"] == (result.status == 0)
    return {s["title"]: {f["name"]: f for f in s["findings"]} for s in record["sections"]}


def test_for_programs(sandbox: Sandbox) -> None:
    result = doctor(sandbox, "--json")
    assert (result.status, result.err) == (0, "")
    sections = found(result)
    for name in ("loopback", "shm", "tcp"):
        assert sections["devices"][name]["level"] == "fine"
    if not has_active_port():
        assert sections["devices"]["verbs"]["value"] == "no active RDMA port here"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert sections["memory"]["machine"]["number"] == total
    assert 0 < sections["memory"]["left for regions"]["number"] <= total
    assert sections["memory"]["RLIMIT_NOFILE"]["number"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert "127.0.0.1" in sections["interfaces"]["lo"]["value"]
    assert sections["two processes of this user here"]["auto takes"]["value"].startswith("shm: ")
    sandbox.nothing_left()


def test_for_people(sandbox: Sandbox) -> None:
    result = doctor(sandbox)
    assert (result.status, result.err) == (0, "")
    assert "\nmemory\n" in "\n" + result.out
    assert "  fine   shm: works" in result.out
    assert "\x1b" not in result.out


def test_on_a_terminal_it_is_a_table(sandbox: Sandbox) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        environment = {**sandbox.environment, "COLUMNS": "200", "TERM": "xterm"}
        command = [sys.executable, "-m", "tensorwire.cli", "doctor"]
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=theirs)
        os.close(theirs)
        shown = b""
        try:
            while data := screen.read(65536):
                shown += data
        except OSError:  # how a terminal ends
            pass
        assert child.wait() == 0
    assert b"\x1b[32mfine" in shown
    assert b"works: a write and its signal arrived" in shown


def test_what_stops_a_job_is_one_line_with_what_to_do(sandbox: Sandbox) -> None:
    environment = {"TENSORWIRE_DEVICE": "fax", "TENSORWIRE_IFACE": "nowhere0", "TENSORWIRE_FAILURE_TIMEOUT": "soon"}
    result = doctor(sandbox, "--json", **environment)
    assert result.status == 1
    lines = result.err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [
        "TENSORWIRE_DEVICE",
        "TENSORWIRE_IFACE",
        "failure timeout",
    ]
    assert "one of auto, shm, tcp, verbs" in lines[0]
    assert found(result)["settings"]["failure timeout"]["level"] == "stops"


@pytest.mark.skipif(has_active_port(), reason="there is RDMA here")
def test_verbs_that_a_job_wants_and_cannot_have(sandbox: Sandbox) -> None:
    result = doctor(sandbox, "--json", TENSORWIRE_DEVICE="verbs")
    assert result.status == 1
    sections = found(result)
    assert sections["verbs"]["picked"]["level"] == sections["devices"]["verbs"]["level"] == "stops"
    assert "rdma link add rxe0" in sections["verbs"]["picked"]["advice"]  # what to do


@pytest.mark.parametrize("chosen", ["auto", "fax"])
def test_a_device_of_a_package_that_does_not_work(sandbox: Sandbox, chosen: str) -> None:
    info = sandbox.folder / "faxes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faxes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tensorwire.devices]\nfax = faxes:Fax\n")
    (sandbox.folder / "faxes.py").write_text(
        "from tensorwire.device import LoopbackDevice, TcpDevice\n"
        "class Fax(LoopbackDevice):\n"
        "    name, capabilities = 'fax', TcpDevice.capabilities\n"
        "    def __init__(self): raise KeyError('line is busy')\n"
    )
    result = doctor(sandbox, "--json", TENSORWIRE_DEVICE=chosen, PYTHONPATH=str(sandbox.folder))
    assert result.status == (1 if chosen == "fax" else 0)
    finding = found(result)["devices"]["fax"]
    assert finding["value"] == "does not work: 'line is busy'"
    assert finding["level"] == ("stops" if chosen == "fax" else "note")


@pytest.mark.parametrize(
    ("limit", "what"),
    [("-n 40", "RLIMIT_NOFILE: 40"), ("-f 1024", "RLIMIT_FSIZE: 1 MiB"), ("-n 12", "does not work")],
)
def test_limits_that_stop_a_job(sandbox: Sandbox, limit: str, what: str) -> None:
    command = f"ulimit -S {limit}; exec {sys.executable} -m tensorwire.cli doctor"
    result = sandbox.start("bash", "-c", command).finish()
    assert result.status == 1
    line = next(line for line in result.err.splitlines() if what in line)
    assert "ulimit" in line or "see" in line


def test_two_processes(sandbox: Sandbox) -> None:
    other = sandbox.start("sleep", "600")
    result = doctor(sandbox, "--json", "--between", str(os.getpid()), str(other.process.pid))
    assert result.status == 0
    section = found(result)[f"processes {os.getpid()} and {other.process.pid}"]
    assert section["auto takes"]["value"].startswith("shm: ")
    other.process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: starts processes of others")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("unshare", "--net"), "different network namespaces"),
        (("setpriv", "--reuid", "65534"), "different users"),
    ],
)
def test_two_processes_that_cannot_share_memory(sandbox: Sandbox, command: tuple[str, ...], why: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    started = sandbox.start(*command, "sh", "-c", "echo ready; exec sleep 600")
    started.expect("ready")
    result = doctor(sandbox, "--json", "--between", str(started.process.pid), str(os.getpid()))
    section = found(result)[f"processes {started.process.pid} and {os.getpid()}"]
    assert result.status == 0  # tcp may do
    assert why in section["shared memory"]["value"]
    assert section["auto takes"]["value"].startswith("tcp: ")
    started.process.kill()


def test_a_peer(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        result = doctor(sandbox, "--peer", address)
    assert result.status == 0
    assert f"peer {address}\n  fine   connection: from 127.0.0.1" in result.out
    result = doctor(sandbox, "--peer", f"127.0.0.1:{free_port()}")
    assert result.status == 1
    assert "Connection refused" in result.one_line()
