"""Signs of life: who stops is lost, who only computes is not, and nobody outlives the coordinator."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from pathlib import Path

import pytest

from tensorwire.control import Client, Member
from tensorwire.device import ShmDevice, TcpDevice
from tensorwire.errors import JobEnded
from tensorwire.testing.patience import patient
from tests.control.conftest import SECRET, Jobs
from tests.harness.sandbox import Sandbox

BEAT, LOST_AFTER = 0.1, patient(1.0)

MEMBER = f"""
import ctypes, sys
from tensorwire.control import Client, Member
from tensorwire.device import ShmDevice, TcpDevice
client = Client(sys.argv[1], sys.argv[2].encode(), "worker", int(sys.argv[3]))
print("joined", flush=True)
if sys.argv[4] == "computes":
    ctypes.PyDLL(None).usleep({int(2.5e6 * LOST_AFTER)})  # PyDLL keeps the GIL: no Python thread of this process runs
    print("computed", client.ended.is_set(), flush=True)
    client.close(goodbye=True)
else:
    client.ended.wait()
    print("cause:", client.cause, flush=True)
"""

COORDINATOR = f"""
import time
from tensorwire.control import Coordinator
coordinator = Coordinator({SECRET!r}, workers=2, servers=1, beat={BEAT}, lost_after={LOST_AFTER})
print("port", coordinator.address.rpartition(":")[2])
while True:
    time.sleep(1000)
"""


@pytest.fixture
def member(tmp_path: Path) -> str:
    """A script that is one member."""
    path = tmp_path / "member.py"
    path.write_text(MEMBER)
    return str(path)


def test_a_stopped_member_is_lost_by_name(jobs: Jobs, sandbox: Sandbox, member: str) -> None:
    coordinator = jobs.coordinator(beat=BEAT, lost_after=LOST_AFTER)
    other = jobs.client(coordinator)
    program = sandbox.python(member, coordinator.address, SECRET.decode(), "1", "waits")
    program.expect("joined")
    program.signal(signal.SIGSTOP)
    with pytest.raises(JobEnded, match=f"worker 1 sent no heartbeat for {LOST_AFTER:g} s: stopped, or cut off"):
        other.lookup("nothing", timeout=300)
    program.signal(signal.SIGCONT)
    program.finish()
    sandbox.nothing_left()


def test_a_member_that_computes_with_the_gil_is_not_lost(jobs: Jobs, sandbox: Sandbox, member: str) -> None:
    coordinator = jobs.coordinator(workers=1, beat=BEAT, lost_after=LOST_AFTER)
    program = sandbox.python(member, coordinator.address, SECRET.decode(), "0", "computes")
    result = program.finish()
    assert result.out.split() == ["joined", "computed", "False"], result.err
    assert coordinator.ended.wait()
    assert coordinator.cause is None


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_nobody_outlives_the_coordinator(jobs: Jobs, sandbox: Sandbox, number: int) -> None:
    script = sandbox.script(COORDINATOR, init=False)
    program = sandbox.python(script)
    address = f"127.0.0.1:{program.number('port')}"
    members: list[Client] = [jobs.client(address), jobs.client(address, "server", 0)]
    program.signal(number)
    for one in members:
        assert one.ended.wait()
        assert one.lost
        assert str(one.cause).startswith("the coordinator is gone: ")
        with pytest.raises(JobEnded, match="the coordinator is gone"):
            one.barrier("b", 1)


def test_a_member_receives_the_end_once(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    member = jobs.client(coordinator)
    causes: list[object] = []
    member.on_end(causes.append)
    coordinator.end(None)
    assert member.ended.wait()
    coordinator.close()
    member._thread.join()  # has seen the connection end too
    member.on_end(causes.append)  # late: called at once
    assert causes == [None, None]
    assert not member.lost


def test_importing_the_package_is_quick(sandbox: Sandbox) -> None:
    code = "import tensorwire, sys; print(*{'torch', 'numpy', 'asyncio'} & set(sys.modules))"
    assert sandbox.start(sys.executable, "-c", code).finish().out.strip() == ""


def test_a_members_devices_keep_the_jobs_time(jobs: Jobs) -> None:
    """No wait of the job lasts longer: a stopped member is lost to the devices as it is to the coordinator."""
    coordinator = jobs.coordinator(beat=BEAT, lost_after=LOST_AFTER)
    with contextlib.closing(Member(coordinator.address, SECRET, "worker", 0)) as one:
        tcp, shm = one.devices["tcp"], one.devices["shm"]
        assert isinstance(tcp, TcpDevice)
        assert isinstance(shm, ShmDevice)
        assert (tcp._address.beat, tcp._lost_after) == (BEAT * 1000, LOST_AFTER)
        assert shm._watchers.heartbeat == BEAT
    del one, tcp, shm
    gc.collect()  # the probe's memory
