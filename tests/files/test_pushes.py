"""Pushes by writing: what becomes of each way to write, open and close, through Python and through a mount."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import Job
from tensorwire.files import Folder, PushFile
from tensorwire.observe import counters
from tensorwire.store import SSP, Async, KeyValue, Sync
from tests.files.conftest import SIZE, Keys, mounting, wait_for
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox

ONE = np.ones(SIZE // 4, "f4").tobytes()
HALF = SIZE // 2


class Written(Protocol):
    """An open file of a push."""

    def pwrite(self, data: bytes, offset: int) -> int: ...
    def write(self, data: bytes) -> int: ...
    def truncate(self, size: int) -> int: ...
    def fsync(self) -> None: ...
    def close(self) -> None: ...


class Descriptor:
    """One of the kernel's."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY)

    def pwrite(self, data: bytes, offset: int) -> int:
        for at in range(0, max(1, len(data)), 100_000):  # else the kernel may write a part, and say so
            os.pwrite(self._fd, data[at : at + 100_000], offset + at)
        return len(data)

    def write(self, data: bytes) -> int:
        return os.write(self._fd, data)

    def truncate(self, size: int) -> int:
        os.ftruncate(self._fd, size)
        return size

    def fsync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


Open = Callable[[str], Written]


@pytest.fixture(params=["python", "python over tcp", "mount", "mount over tcp"])
def opens(
    keys: Keys, sandbox: Sandbox, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """What opens a push by its name."""
    device = "tcp" if "tcp" in request.param else "auto"
    if "mount" in request.param:
        with mounting(keys.name, sandbox, tmp_path, TENSORWIRE_DEVICE=device) as at:
            yield lambda name: Descriptor(at / "push" / name)
        return
    monkeypatch.setenv("TENSORWIRE_DEVICE", device)
    with tw.files.connect(keys.name) as folder:
        yield lambda name: folder.open(f"push/{name}", "wb")  # type: ignore[return-value]


@contextlib.contextmanager
def refused(number: int) -> Iterator[None]:
    with pytest.raises(OSError) as found:
        yield
    assert errno.errorcode[found.value.errno or 0] == errno.errorcode[number]


def whole(file: Written) -> int:
    file.write(ONE)
    file.close()
    return 1


def then_fsync(file: Written) -> int:
    file.write(ONE)
    file.fsync()
    file.fsync()
    file.close()
    return 1


def in_pieces(file: Written) -> int:
    for at in range(0, SIZE, 7001):
        file.write(ONE[at : at + 7001])
    file.close()
    return 1


def backwards(file: Written) -> int:
    for at in reversed(range(0, SIZE, 9001)):
        file.pwrite(ONE[at : at + 9001], at)
    file.close()
    return 1


def overlapping(file: Written) -> int:
    file.pwrite(ONE[:100_000], 0)
    file.pwrite(ONE[5000:], 5000)
    file.fsync()
    file.close()
    return 1


def said_twice(file: Written) -> int:
    file.pwrite(bytes(SIZE), 0)
    file.pwrite(ONE, 0)
    file.close()
    return 1


def several(file: Written) -> int:
    for _ in range(3):
        file.pwrite(ONE, 0)
        file.fsync()
    file.close()
    return 3


def nothing(file: Written) -> int:
    file.fsync()
    file.close()
    return 0


def completed_later(file: Written) -> int:
    file.write(ONE[:HALF])
    with refused(errno.EINVAL):
        file.fsync()
    file.write(ONE[HALF:])
    file.fsync()
    file.close()
    return 1


def a_part(file: Written) -> int:
    file.write(ONE[:HALF])
    with refused(errno.EINVAL):
        file.close()
    return 0


def a_hole(file: Written) -> int:
    file.pwrite(ONE[:HALF], 0)
    file.pwrite(ONE[HALF + 1 :], HALF + 1)
    with refused(errno.EINVAL):
        file.close()
    return 0


def too_long(file: Written) -> int:
    file.write(ONE)
    with refused(errno.EFBIG):
        file.write(b"x")
    with refused(errno.EINVAL):
        file.fsync()
    with refused(errno.EINVAL):
        file.close()
    return 0


def beyond(file: Written) -> int:
    with refused(errno.EFBIG):
        file.pwrite(b"x", SIZE)
    with refused(errno.EFBIG):
        file.pwrite(ONE, 0)
    with refused(errno.EINVAL):
        file.close()
    return 0


def emptied(file: Written) -> int:
    file.write(ONE[:HALF])
    file.truncate(0)
    file.close()
    return 0


def of_another_size(file: Written) -> int:
    file.truncate(SIZE)
    with refused(errno.EINVAL):
        file.truncate(SIZE - 4)
    with refused(errno.EINVAL):
        file.truncate(SIZE + 4)
    file.pwrite(ONE, 0)
    file.close()
    return 1


WAYS = [
    *(whole, then_fsync, in_pieces, backwards, overlapping, said_twice, several, nothing, completed_later, a_part),
    *(a_hole, too_long, beyond, emptied, of_another_size),
]


def test_each_way_to_write_applies_what_it_says_once(opens: Open, keys: Keys) -> None:
    wanted = keys.values()[0]
    for way in WAYS:
        wanted += way(opens("w"))
        found = keys.values()[0]
        assert (found == wanted).all(), (way.__name__, float((found - wanted)[0]))


def test_open_files_do_not_mix(opens: Open, keys: Keys) -> None:
    before = keys.values()[0]
    one, other, third = opens("w"), opens("w"), opens("w")
    one.pwrite(ONE[:HALF], 0)
    other.pwrite(ONE[HALF:], HALF)
    third.pwrite(ONE[HALF:], HALF)
    one.pwrite(ONE[HALF:], HALF)
    third.pwrite(ONE[:HALF], 0)
    one.close()
    third.fsync()
    with refused(errno.EINVAL):
        other.close()
    third.close()
    assert (keys.values()[0] == before + 2).all()


def test_keys_of_other_dtypes_and_without_elements(opens: Open, keys: Keys) -> None:
    _, ab, dot = keys.values()
    for name, array in (("a%2Fb", np.arange(6, dtype="i8")), ("%2E", np.array([1.5, -1, 0])), ("[7]", np.zeros(0))):
        file = opens(name)
        file.write(array.tobytes())
        file.close()
    _, new, also = keys.values()
    assert (new == ab + np.arange(6).reshape(2, 3)).all()
    assert (also == dot + np.array([1.5, -1, 0])).all()


# ---- the same by other programs


def is_here(command: str) -> bool:
    """Whether the program is installed, where it may not be."""
    return not command.startswith("rsync") or shutil.which("rsync") is not None


def test_programs_push(keys: Keys, sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "ones"
    source.write_bytes(ONE)
    (tmp_path / "short").write_bytes(ONE[:-4])
    (tmp_path / "long").write_bytes(ONE + b"abcd")
    with mounting(keys.name, sandbox, tmp_path) as at:
        w = at / "push" / "w"

        def shell(command: str) -> tuple[int, str]:
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "W": str(w)}, capture_output=True, text=True
            )
            return done.returncode, done.stderr

        good = [
            "cp ones $W",
            "cp -p ones $W",
            "cat ones > $W",
            "cat < ones > $W",
            "dd if=ones of=$W bs=4097 status=none",
            "dd if=ones of=$W bs=1M conv=fsync,notrunc status=none",
            "{ head -c 1000; tail -c +1001 ones; } < ones > $W",
            "tee $W < ones > /dev/null",
            "rsync --inplace ones $W",
            f"{sys.executable} -c \"import numpy as np, os; np.ones({SIZE // 4}, 'f4').tofile(os.environ['W'])\"",
        ]
        wanted = keys.values()[0]
        for command in filter(is_here, good):
            assert shell(command) == (0, ""), command
            wanted += 1
            assert (keys.values()[0] == wanted).all(), command
        bad = {
            "cp short $W": "Invalid argument",
            "cp long $W": "File too large",
            "cat ones >> $W": "Invalid argument",
            "cat ones short > $W": "File too large",
            "cat $W": "Permission denied",
            "mv ones $W": "Read-only file system",
            "rm -f $W": "Read-only file system",
            "rsync ones $W": "Read-only file system",
            "cp ones $W.new": "Read-only file system",
            "truncate -s 8 $W": "Invalid argument",
            "mkdir $W.d": "Read-only file system",
            "ln -s ones $W.l": "Read-only file system",
        }
        for command, why in bad.items():
            if not is_here(command):
                continue
            status, said = shell(command)
            assert status != 0, command
            assert why in said, (command, said)
        for harmless in (": > $W", "touch $W", "true < ones > $W", "chmod 600 $W"):
            assert shell(harmless) == (0, ""), harmless
        assert (keys.values()[0] == wanted).all()
        assert "dropped a push to push/w: 160008 of 160012 bytes" in (at / "control" / "events").read_text()


# ---- what is pushed to


def alike(job: Job, mode: Any, rule: str, options: dict[str, Any], dtype: str, **more: Any) -> list[bool]:
    """A key gets by file what another one of the same value gets by `push`."""
    kv = KeyValue(mode, rule, publish=True, bucket_bytes=4096, **options, **more)
    rng = np.random.default_rng(1)
    first = (rng.standard_normal(5003) * 3).astype(dtype)
    kv.init(["one", "other"], [first, first])
    kv.publish()
    same = []
    with tw.files.connect(job.name) as folder:
        wait_for(folder, 1)
        for turn in range(4):
            if turn == 2 and options:
                kv.set_options(lr=0.5)
                kv.pull(["one", "other"]).wait()  # so that each server has heard of it
            push = (rng.standard_normal(5003) * 3).astype(dtype)
            kv.push("other", push).wait()
            with folder.open("push/one", "wb") as file:
                file.write(push)  # type: ignore[union-attr]
            one, other = kv.pull(["one", "other"]).wait()
            same.append(bool((one == other).all()) and not bool((one == first).all()))
    kv.close()
    return same


RULES = [
    ("sum", {}, "float32", {}),
    ("sum", {}, "float16", {}),
    ("sum", {}, "int16", {}),
    ("assign", {}, "float64", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, "float32", {}),
    ("AdamW", {"lr": 0.1}, "float32", {}),
    ("Adafactor", {"lr": 0.1}, "float32", {}),
]


@pytest.mark.parametrize(("rule", "options", "dtype", "more"), RULES, ids=lambda value: str(value))
def test_a_push_by_file_has_the_bits_of_a_push(
    rule: str, options: dict[str, Any], dtype: str, more: dict[str, Any]
) -> None:
    ((*same,),) = run_job(alike, Async(), rule, options, dtype, workers=1, servers=2).ok()
    assert same == [True] * 4


def without(job: Job, mode: Any) -> tuple[list[str], int | None]:
    kv = KeyValue(mode, "sum", publish=True)
    kv.init("w", np.zeros(3))
    kv.publish()
    with tw.files.connect(job.name) as folder:
        wait_for(folder, 1)
        try:
            folder.open("push/w", "wb")
            number = None
        except OSError as error:
            number = error.errno
        found = folder.listdir()
    kv.close()
    return found, number


@pytest.mark.parametrize("mode", [Sync(), SSP(1)], ids=repr)
def test_rounds_of_all_workers_take_no_pushes_of_others(mode: Sync | SSP) -> None:
    ((names, number),) = run_job(without, mode, workers=1).ok()
    assert "push" not in names
    assert number == errno.ENOENT


def steady(job: Job, device: str) -> tuple[int, int, int]:
    """What a second push through an open file costs."""
    kv = KeyValue(Async(), "sum", publish=True)
    kv.init("w", np.zeros(100_000))
    kv.publish()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORWIRE_DEVICE", device)
        folder = tw.files.connect(job.name)
    with folder:
        wait_for(folder, 1)
        with folder.open("push/w", "wb") as file:
            assert isinstance(file, PushFile)
            for _ in range(3):
                before = counters.snapshot()
                file.pwrite(np.ones(100_000), 0)
                file.fsync()
                after = counters.snapshot()
    kv.close()
    return after.rpcs - before.rpcs, after.registrations - before.registrations, after.pushes - before.pushes


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_a_push_makes_no_request_and_registers_nothing(device: str) -> None:
    assert run_job(steady, device, workers=1).ok() == [(0, 0, 1)]


def racing(job: Job) -> list[bool]:
    """Versions while files and workers push: every bucket of a version has a whole number of whole pushes."""
    kv = KeyValue(Async(), "sum", publish=True, bucket_bytes=4096)
    kv.init("w", np.zeros(20_000))
    kv.publish()
    over, whole_ones = threading.Event(), []
    with tw.files.connect(job.name) as folder:
        wait_for(folder, 1)

        def push() -> None:
            with folder.open("push/w", "wb") as file:
                assert isinstance(file, PushFile)
                while not over.is_set():
                    file.pwrite(np.ones(20_000), 0)
                    file.fsync()

        threads = [threading.Thread(target=push) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            kv.push("w", np.ones(20_000)).wait()
            kv.publish()
            with folder.open("params/w") as file:
                values = np.frombuffer(file.read(), "f8")[: 512 * 39].reshape(-1, 512)
            whole_ones.append(bool((values == values[:, :1]).all()))
        over.set()
        for thread in threads:
            thread.join()
    kv.close()
    return whole_ones


def test_versions_have_whole_pushes_of_files() -> None:
    assert run_job(racing, workers=1, servers=2).ok() == [[True] * 30]


# ---- faults


def count_maps(process: int) -> int:
    """How many files in memory it has mapped."""
    return Path(f"/proc/{process}/maps").read_text().count("/memfd:")


def server_processes(sandbox: Sandbox) -> list[int]:
    return [pid for pid, line in sandbox.processes().items() if "server_process" in line]


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_a_push_that_took_too_long_is_waited_for_again_and_applied_once(
    device: str, keys: Keys, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keys.values()[0]
    monkeypatch.setenv("TENSORWIRE_DEVICE", device)
    with tw.files.connect(keys.name) as folder:
        wait_for(folder, 1)
        file = folder.open("push/w", "wb")
        assert isinstance(file, PushFile)
        file._writer._timeout = 0.3
        file.write(ONE)
        servers = server_processes(sandbox)
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        with refused(errno.ETIMEDOUT):
            file.fsync()
        with refused(errno.EBUSY):
            file.pwrite(ONE, 0)
        for pid in servers:
            os.kill(pid, signal.SIGCONT)
        while True:
            try:
                file.fsync()
                break
            except TimeoutError:
                continue
        file.close()
    assert (keys.values()[0] == before + 1).all()


KILLED = """
import tensorwire as tw
folder = tw.files.connect(sys.argv[1])
while not folder.exists("params/w"):
    time.sleep(0.01)
file = folder.open("push/w", "wb")
file.write(open(sys.argv[2], "rb").read())
if sys.argv[3] == "fsync":
    file.fsync()
print("written")
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "applied"), [("write", 0), ("fsync", 1)])
def test_a_writer_that_is_killed_has_pushed_what_it_had_synchronized(
    how: str, applied: int, keys: Keys, sandbox: Sandbox, tmp_path: Path
) -> None:
    before = keys.values()[0]
    (tmp_path / "ones").write_bytes(ONE)
    servers = {pid: count_maps(pid) for pid in server_processes(sandbox)}
    program = sandbox.python(sandbox.script(KILLED, init=False), keys.name, str(tmp_path / "ones"), how)
    program.expect("written")
    program.signal(signal.SIGKILL)
    program.finish()
    while {pid: count_maps(pid) for pid in servers} != servers:  # until the servers have freed what it wrote to
        pass
    with tw.files.connect(keys.name) as folder, folder.open("push/w", "wb") as file:
        file.write(ONE)  # type: ignore[union-attr]
    assert (keys.values()[0] == before + 1 + applied).all()


def test_a_push_to_a_job_that_ended_says_so(folder: Folder, keys: Keys) -> None:
    file = folder.open("push/w", "wb")
    file.write(ONE)  # type: ignore[union-attr]
    keys.end()
    folder.ended.wait()
    with refused(errno.ENODEV):
        file.close()
    assert file.closed
