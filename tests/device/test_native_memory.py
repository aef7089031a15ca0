"""Spans of memory: what may be mapped, what cannot be had, what is read-only."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from tensorwire._native import PAGE, Memory, put, put_signal
from tensorwire.testing.patterns import array
from tensorwire.testing.spec import DeviceSpec

F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2


def memfd(nbytes: int, content: bytes = b"", *, sealed: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, content, 0)
    if sealed:
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
    return fd


def header(memory: Memory) -> bytes:
    return os.pread(memory.fd, PAGE, 0)


def test_new_memory_is_zeroed_page_aligned_and_sealed() -> None:
    memory = Memory.allocate(100_001)
    assert memory.nbytes == 100_001
    assert memory.address % PAGE == 0
    assert not array(memory).any()
    for length in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, length)


def test_a_mapping_shows_the_same_bytes() -> None:
    memory = Memory.allocate(5000)
    twin, reader = Memory.map(memory.fd, True), Memory.map(memory.fd, False)
    array(twin)[4999] = 5
    assert array(memory)[4999] == 5
    assert array(reader)[4999] == 5
    twin.store(8, 7)
    assert [m.load(8) for m in (memory, twin, reader)] == [7, 7, 7]
    assert memory.wait(8, 7, 0.0) == 0
    memory.mark_closed()
    assert twin.closed
    assert reader.closed


def test_only_regions_are_mapped() -> None:
    good = Memory.allocate(64)
    page = header(good)
    longer = bytearray(page)
    longer[8:16] = (PAGE + 1).to_bytes(8, "little")  # claims more bytes than the file has
    huge = bytearray(page)
    huge[8:16] = b"\xff" * 8
    wrong = [
        memfd(2 * PAGE, page, sealed=False),
        memfd(2 * PAGE),
        memfd(PAGE - 1, page[:-1]),
        memfd(0),
        memfd(2 * PAGE, longer),
        memfd(2 * PAGE, huge),
        os.open("/dev/null", os.O_RDWR),
        os.open("/", os.O_RDONLY),
        *os.pipe(),
    ]
    with tempfile.TemporaryFile() as file:
        file.write(page * 2)
        file.flush()
        wrong.append(os.dup(file.fileno()))
    for fd in wrong:
        for writable in (True, False):
            with pytest.raises(OSError):
                Memory.map(fd, writable)
        os.close(fd)
    with pytest.raises(OSError):
        Memory.map(fd, True)  # closed by now
    fd = memfd(2 * PAGE, page)
    assert Memory.map(fd, True).nbytes == 64
    os.close(fd)


def test_read_only_memory_is_never_written() -> None:
    constant, memory = bytes(16), Memory.allocate(16)
    memory.store(0, 5)
    for target in (Memory.wrap(constant), Memory.map(memory.fd, False)):
        assert not target.writable
        for write in (
            lambda target=target: target.store(0, 1),
            lambda target=target: target.fetch_add(0, 1),
            lambda target=target: target.compare_swap(0, 0, 1),
            lambda target=target: put(memory, 0, target, 8, 8),
            lambda target=target: put_signal(memory, 0, memory, 8, 8, target, 0, 1),
        ):
            with pytest.raises(ValueError, match="read-only"):
                write()
        with pytest.raises(TypeError):
            memoryview(target)[0] = 1
    assert constant == bytes(16)
    assert array(memory).view(np.uint64).tolist() == [5, 0]
    with pytest.raises(ValueError, match="read-only"):
        Memory.map(memory.fd, False).wait(0, 6, 0.0)
    assert Memory.wrap(constant).wait(0, 1, 0.0) == 1


def test_words_are_aligned_and_inside() -> None:
    memory = Memory.allocate(24)
    for offset in (4, 1, 23):
        with pytest.raises((ValueError, IndexError)):
            memory.store(offset, 1)
    for offset in (24, 17, 2**63, 2**64 - 8):
        with pytest.raises(IndexError):
            memory.load(offset)
        with pytest.raises(IndexError):
            put(memory, 0, memory, offset, 8)
    with pytest.raises(IndexError):
        put(memory, 0, memory, 0, 25)
    assert not array(memory).any()


def test_wrapped_memory_lives_as_long_as_its_user() -> None:
    data = bytearray(b"12345678")
    memory = Memory.wrap(data)
    with pytest.raises(BufferError):
        data.append(0)  # it would move
    del memory
    data.append(0)


LIMITED = """
import resource
from tensorwire.testing.spec import DeviceSpec
from tensorwire.errors import OutOfMemory
device = DeviceSpec({spec!r}).make()
small = device.allocate(4096)
resource.setrlimit(resource.{limit}, ({value}, {value}))
try:
    device.allocate(1 << 30)
except OutOfMemory as error:
    print(error)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
assert not any(memoryview(small))
device.close()
"""


@pytest.mark.parametrize(("limit", "value"), [("RLIMIT_AS", 1 << 30), ("RLIMIT_FSIZE", 1 << 20)])
def test_limits_of_the_process_are_out_of_memory_and_no_signal(spec: DeviceSpec, limit: str, value: int) -> None:
    script = LIMITED.format(spec=spec.text, limit=limit, value=value)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(1 << 30) in done.stdout
