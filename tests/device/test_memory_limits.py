"""Lack of memory is a typed error where memory is asked for, and kills nobody: control groups, limits of processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient

KINDS = {"loopback": "LoopbackDevice", "shm": "ShmDevice", "tcp": "TcpDevice"}
LIMIT = 256 << 20


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return KINDS[request.param]


def run(script: str, **values: object) -> str:
    """What a script prints; it must end well, which one that was killed does not."""
    head = "import contextlib, os, resource, sys\nfrom tensorwire.errors import *\nfrom tensorwire.device import *\n"
    values = {"kind": "ShmDevice", **values}
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items() if name != "kind")
    code = given + head + f"Kind = {values['kind']}\n" + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return done.stdout


def group_folder() -> tuple[Path, str]:
    """Where a control group with a limit can be made, and the file of the limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own = Path("/sys/fs/cgroup/memory", path[1:])
            return own if own.is_dir() else Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    root = Path("/sys/fs/cgroup")  # version 2: a group that has processes can have no groups with limits, the root can
    if "memory" in (root / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (root / "cgroup.subtree_control").write_text("+memory")
            return root, "memory.max"
    raise OSError("no control group can limit memory here")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of memory, for the processes of one test."""
    if os.geteuid() != 0:
        pytest.skip("needs root: makes a control group")
    try:
        parent, limit = group_folder()
        folder = parent / f"tensorwire-test-{secrets.token_hex(4)}"
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    yield folder
    folder.rmdir()


IN_GROUP = """
with open(group + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
with Kind() as device, Kind() as peer, device.connect(peer.address) as channel:
    with contextlib.suppress(OutOfMemory):
        device.allocate(2 * limit)
        sys.exit("twice the limit was granted")
    for nbytes in (1 << 20, 24 << 20):  # many small ones, and a few
        regions = []
        try:
            while sum(r.nbytes for r in regions) < 2 * limit:
                regions.append(peer.allocate(nbytes))
            sys.exit("twice the limit was granted, bit by bit")
        except OutOfMemory as error:
            print(f"{sum(r.nbytes for r in regions)} {error}")
        piece = device.register(bytes([7]) * (1 << 20)).view()
        for region in regions:  # every page is there: writing them all kills nobody
            remote = region.remote()
            for at in range(0, nbytes, 1 << 20):
                channel.write(piece, remote.view(at, 1 << 20)).wait()
            assert memoryview(region)[-1] == 7
            region.close()
        del region, regions
"""


def test_a_control_group_refuses_and_does_not_kill(group: Path, kind: str) -> None:
    lines = run(IN_GROUP, kind=kind, group=str(group), limit=LIMIT).splitlines()
    assert len(lines) == 2
    for line in lines:
        granted = int(line.split()[0])
        assert LIMIT // 4 < granted < LIMIT
        assert "cannot allocate a region" in line


SCARCE = """
one, other = ShmDevice(), ShmDevice()
channel = one.connect(other.address)
first = other.allocate(4096)
region = other.allocate(1 << 30, reserve=False)
source = one.allocate(8)
channel.write(source.view(), first.remote().view(0, 8)).wait()
target = region.remote().view(8, 8)


def refused():
    for operation in (
        lambda: channel.write(source.view(), target),
        lambda: channel.read(source.view(), target),
        lambda: channel.signal(target, 1),
        lambda: channel.map(target),
    ):
        try:
            operation()
        except OutOfMemory as error:
            print(error)
        else:
            sys.exit("it was mapped")


def fine():
    assert not channel.lost
    channel.signal(target, 5).wait()
    assert region.load(8) == 5


"""
NO_ADDRESS_SPACE = """
used = int(open("/proc/self/statm").read().split()[0]) * 4096
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), unlimited[1]))
refused()
resource.setrlimit(resource.RLIMIT_AS, unlimited)
fine()
"""
NO_DESCRIPTOR = """
taken = []
with contextlib.suppress(OSError):
    while True:
        taken.append(open("/dev/null"))
refused()
taken.pop().close()  # enough for the descriptor that comes, not for the copy that is kept
refused()
del taken
fine()
"""


@pytest.mark.parametrize(("lack", "why"), [(NO_ADDRESS_SPACE, "ulimit -v"), (NO_DESCRIPTOR, "ulimit -n")])
def test_a_peers_region_that_cannot_be_mapped_is_out_of_memory(lack: str, why: str) -> None:
    lines = run("resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n" + SCARCE + lack).splitlines()
    assert len(lines) >= 4
    assert all(why in line for line in lines)


DESCRIPTORS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
with Kind() as device:
    for _ in range(2):
        regions = []
        try:
            while len(regions) < 200:
                regions.append(device.allocate(64))
        except OutOfMemory as error:
            print(error)
        registered = device.register(bytearray(8))  # takes none
        assert registered.nbytes == 8
        for region in regions:
            region.close()
        del region, regions  # the next round has as many
"""


def test_used_up_descriptors_are_out_of_memory(kind: str) -> None:
    lines = run(DESCRIPTORS, kind=kind).splitlines()
    assert len(lines) == 2
    assert all("raise ulimit -n (now 128)" in line for line in lines)
