"""A job's folder for programs in Python: what is in it, what an open file shows, and which errors it has."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import tensorwire as tw
from tensorwire.files import Folder, VersionFile
from tensorwire.files.file_names import file_name, parameter_name
from tensorwire.observe import counters
from tensorwire.testing.patience import patient
from tests.files.conftest import SIZE, Keys, wait_for
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox

NAMES = {"w": "w", "a%2Fb": "a/b", "[7]": "[7]", "%2E": ".", "table": "table"}


def test_the_folder_has_what_the_page_says(folder: Folder) -> None:
    assert folder.listdir() == ["control", "model.safetensors", "params", "push", "versions"]
    assert folder.listdir("versions") == ["1"]
    assert folder.listdir("versions/1") == ["model.safetensors", "params"]
    assert folder.listdir("params") == sorted([*NAMES, *(f"{name}.npy" for name in NAMES)])
    assert folder.listdir("push") == sorted(NAMES.keys() - {"table"})
    assert folder.is_local == (folder.realpath("model.safetensors")[0] == "/")
    assert folder.realpath("params/w") == "versions/1/params/w"
    assert stat.S_ISLNK(folder.lstat("model.safetensors").st_mode)


def test_sizes_times_and_versions_are_those_of_what_was_published(folder: Folder) -> None:
    before = time.time()
    for path in ("model.safetensors", "params/w", "versions/1/params/w.npy"):
        found = folder.stat(path)
        assert found.version is not None
        assert (found.version.counter, found.version.step, found.st_mode) == (1, 7, stat.S_IFREG | 0o444)
        assert before - 300 < found.st_mtime < before
        with folder.open(path) as file:
            assert len(file.read()) == found.st_size
    assert folder.stat("params/w").st_size == folder.stat("push/w").st_size == SIZE
    assert folder.stat("control/version").version is None


def test_every_parameter_is_there_as_bytes_and_as_an_array(folder: Folder, keys: Keys) -> None:
    w, ab, dot = keys.values()
    arrays = {"w": w, "a%2Fb": ab, "%2E": dot, "[7]": np.zeros((0, 4)), "table": np.ones((50, 3), "f4")}
    for name, wanted in arrays.items():
        with folder.open(f"params/{name}") as file:
            assert file.read() == wanted.tobytes()
        with folder.open(f"params/{name}.npy") as file:
            found = np.load(file)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert (found == wanted).all()


def test_any_range_of_a_file_can_be_read_in_any_way(folder: Folder) -> None:
    draw = random.Random(1)
    for path in ("model.safetensors", "params/w", "params/w.npy", "params/[7].npy", "params/[7]"):
        with folder.open(path) as file:
            assert isinstance(file, VersionFile)
            whole = file.readall()
            for _ in range(20):
                start, nbytes = draw.randrange(len(whole) + 100), draw.randrange(len(whole) + 100)
                wanted = whole[start : start + nbytes]
                assert file.pread(nbytes, start) == wanted
                assert file.seek(start) == start == file.tell()
                memory = bytearray(nbytes)
                assert file.readinto(memory) == len(wanted)
                assert memory[: len(wanted)] == wanted
                assert file.tell() == start + len(wanted)
            assert file.seek(-min(5, len(whole)), os.SEEK_END) == max(0, len(whole) - 5)
            assert file.readall() == whole[-5:]
            for wrong in (lambda: file.seek(-1), lambda: file.pread(1, -1), lambda: file.seek(0, 9)):
                with pytest.raises(ValueError):
                    wrong()
        with pytest.raises(ValueError):
            file.pread(1, 0)


def test_an_open_file_is_one_version_and_a_new_one_the_newest(folder: Folder, keys: Keys) -> None:
    first = np.arange(40_003, dtype="f4")
    opened = []
    for number in range(1, 3):
        wait_for(folder, number)
        opened.append(folder.open("params/w"))
        assert keys.publish() == number + 1
    wait_for(folder, 3)
    for number, file in enumerate(opened):
        with file:
            assert (np.frombuffer(file.read(), "f4") == first + number).all()
    with folder.open("params/w") as file:
        assert (np.frombuffer(file.read(), "f4") == first + 2).all()


def test_versions_keep_their_names_while_there_are_buffers(keys: Keys) -> None:
    with tw.files.connect(keys.name) as folder:
        for number in range(2, 6):
            keys.publish()
            wait_for(folder, number)
            while folder.listdir("versions") != [str(number - 1), str(number)]:  # of three buffers one is for the next
                time.sleep(0.002)
        with pytest.raises(FileNotFoundError):
            folder.open("versions/2/params/w")


def test_readinto_makes_no_other_copy(folder: Folder) -> None:
    array = np.empty(SIZE // 4, "f4")
    with folder.open("params/w") as file:
        file.readinto(array)  # what is read over a network is found in a block: small files only
    large = np.empty(folder.nbytes, np.uint8)
    with folder.open("model.safetensors") as file:
        before = counters.snapshot()
        file.readinto(large)
        after = counters.snapshot()
    if folder.is_local:
        assert (after.copies - before.copies, after.copied_bytes - before.copied_bytes) == (1, large.nbytes)
        assert after.messages == before.messages


def test_control_says_what_the_job_does(folder: Folder, keys: Keys) -> None:
    def text(name: str) -> str:
        with folder.open(f"control/{name}") as file:
            content = file.read()
        assert (
            name in ("events", "metrics", "readers.json", "servers.json")
            or len(content) == folder.stat(f"control/{name}").st_size
        )
        return bytes(content).decode()

    assert text("version").startswith("0.1.")
    assert text("clock") == "7\n"
    assert text("mode").startswith("Async(")
    assert text("rule") == "sum\n"
    servers = json.loads(text("servers.json"))
    assert [each["server"] for each in servers] == ["server 0", "server 1"]
    assert {name for each in servers for name in each["parameters"]} == {"w", "a/b", "[7]", ".", "table"}
    assert sum(each["bytes"] for each in servers) == SIZE + 48 + 24 + 600
    assert all(each["load"]["counters"]["messages"] >= 0 for each in servers)
    assert [each["counter"] for each in json.loads(text("readers.json"))] == [0]
    families = {family.name for family in text_string_to_metric_families(text("metrics"))}
    assert {"tensorwire_step", "tensorwire_bytes"} <= families
    first = text("events")
    keys.publish()
    wait_for(folder, 2)
    more = text("events")
    assert more.startswith(first)
    assert "version 0.2." in more[len(first) :]


def test_a_folder_of_checkpoints_is_shown_as_it_is(sandbox: Sandbox, tmp_path: Path) -> None:
    real = tmp_path / "kept"
    real.mkdir()
    (real / "one").write_text("1")
    keys = Keys(sandbox, tmp_path, "--checkpoints", str(real))
    with tw.files.connect(keys.name) as folder:
        wait_for(folder, 1)
        assert "checkpoints" in folder.listdir()
        assert folder.listdir("checkpoints") == ["one"]
        with folder.open("checkpoints/two", "w") as file:
            file.write("2")
        assert (real / "two").read_text() == "2"
        assert folder.stat("checkpoints/two").st_size == 1
        for path in ("checkpoints/../../" + real.name, "../kept/one", "checkpoints/nothing"):
            with pytest.raises(FileNotFoundError):
                folder.open(path)


WRONG = [
    ("nothing", "rb", errno.ENOENT),
    ("params/nothing", "rb", errno.ENOENT),
    ("params/w/more", "rb", errno.ENOTDIR),
    ("versions/99/model.safetensors", "rb", errno.ENOENT),
    ("versions/01/model.safetensors", "rb", errno.ENOENT),
    ("versions/x", "rb", errno.ENOENT),
    ("params", "rb", errno.EISDIR),
    ("", "rb", errno.EISDIR),
    ("params/w", "wb", errno.EROFS),
    ("model.safetensors", "r+b", errno.EROFS),
    ("control/version", "ab", errno.EROFS),
    ("push/w", "rb", errno.EACCES),
    ("push/w", "ab", errno.EACCES),
    ("push/table", "wb", errno.ENOENT),
    ("push/nothing", "wb", errno.ENOENT),
    ("checkpoints/x", "wb", errno.ENOENT),
]


@pytest.mark.parametrize("path", [path for path, *_ in WRONG if path.count("/") == 0 and path] + ["params/w"])
def test_only_folders_can_be_listed(keys: Keys, path: str) -> None:
    with tw.files.connect(keys.name) as folder:
        wait_for(folder, 1)
        if path == "params":
            assert folder.listdir(path)
            return
        with pytest.raises(OSError) as found:
            folder.listdir(path)
        assert found.value.errno == (errno.ENOENT if path == "nothing" else errno.ENOTDIR)


def test_what_cannot_be_opened_says_why(folder: Folder) -> None:
    for path, mode, number in WRONG:
        with pytest.raises(OSError) as found:
            folder.open(path, mode)
        assert (found.value.errno, path, mode) == (number, path, mode)


def test_opening_a_path_connects_and_closing_it_disconnects(keys: Keys) -> None:
    with tw.files.open(f"{keys.name}/control/version") as file:
        while not file.read():
            file.close()
            file = tw.files.open(f"{keys.name}/control/version")
    with tw.files.open(f"{keys.name}/params/w") as file, tw.files.connect(keys.name) as folder:
        assert len(file.read()) == SIZE
        with folder.open("control/readers.json") as readers:
            assert len(json.loads(readers.read())) == 2
        file.close()
        while True:
            with folder.open("control/readers.json") as readers:
                if len(json.loads(readers.read())) == 1:
                    break
    with pytest.raises(FileNotFoundError, match="no job 'nothing'"):
        tw.files.open("nothing/params/w", timeout=0.0)
    with pytest.raises(FileNotFoundError):
        tw.files.open(f"{keys.name}/nothing")


def test_after_the_jobs_end_there_is_no_device(folder: Folder, keys: Keys) -> None:
    local = folder.is_local
    file = folder.open("params/w")
    keys.end()
    folder.ended.wait()
    for call in (folder.listdir, lambda: folder.stat("params/w"), lambda: folder.open("control/events")):
        with pytest.raises(OSError) as found:
            call()
        assert found.value.errno == errno.ENODEV
    if local:
        assert len(file.read()) == SIZE  # the kernel keeps what is mapped
    else:
        with pytest.raises(OSError) as found:
            file.read()
        assert found.value.errno == errno.ENODEV
    file.close()


def test_a_job_that_is_killed_ends_what_is_read(folder: Folder, keys: Keys, sandbox: Sandbox) -> None:
    """Reads go on while a server is killed: each brings all that it should, or says that there is no device."""
    if folder.is_local:
        pytest.skip("what is mapped stays")
    file = folder.open("model.safetensors")
    ended: list[int | None] = []

    def read() -> None:
        try:
            while True:
                assert len(file.pread(folder.nbytes, 0)) == folder.nbytes
        except OSError as error:
            ended.append(error.errno)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    server = next(p for p, line in sandbox.processes().items() if "server_process" in line)
    os.kill(server, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert ended == [errno.ENODEV] * 3
    file.close()


def test_several_threads_read_while_versions_come(folder: Folder, keys: Keys) -> None:
    first = np.arange(40_003, dtype="f4")
    done = threading.Event()

    def read(_: int) -> set[float]:
        seen = set()
        while not done.is_set():
            with folder.open("params/w") as file:
                values = np.frombuffer(file.read(), "f4") - first
            assert (values == values[0]).all()
            seen.add(float(values[0]))
        return seen

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(read, n) for n in range(4)]
        try:
            for _ in range(12):
                keys.publish()
        finally:
            done.set()
        for each in found:
            assert each.result()


READ = """
import tensorwire as tw
from tensorwire.store.versions.sources import Leases
import errno
if sys.argv[2] == "mute":
    Leases._sign_if_due = lambda self: None
folder = tw.files.connect(sys.argv[1])
while not folder.exists("params/w"):
    time.sleep(0.01)
file = folder.open("params/w")
print("open")
if sys.argv[2] == "mute":
    open(sys.argv[3]).readline()
else:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    file.read()
    print("read all")
except OSError as error:
    print("error", errno.errorcode[error.errno])
try:
    print("again", len(folder.open("params/w").read()))
except OSError as error:
    print("again", errno.errorcode[error.errno])
"""


@pytest.mark.parametrize("how", ["mute", "stopped"])
def test_a_reader_without_signs_of_life_has_a_stale_file(sandbox: Sandbox, tmp_path: Path, how: str) -> None:
    """One that is stopped is lost to the job, too: what it hears of first is not known."""
    keys = Keys(sandbox, tmp_path, BUFFERS="2", TENSORWIRE_FAILURE_TIMEOUT=str(patient(2.0)))
    words = tmp_path / "to-reader"
    os.mkfifo(words)
    script = sandbox.script(READ, init=False)
    program = sandbox.python(script, keys.name, how, str(words), TENSORWIRE_DEVICE="tcp")
    program.expect("open")
    assert keys.publish() == 2
    while keys.publish() is None:  # the only other buffer is held
        pass
    if how == "mute":
        words.write_text("go on\n")
    program.signal(signal.SIGCONT)
    assert program.said("error") in (("ESTALE",) if how == "mute" else ("ESTALE", "ENODEV"))
    if how == "mute":
        assert program.said("again") == str(SIZE)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_name_is_the_name_of_a_file_and_comes_back(name: str) -> None:
    written = file_name(name)
    assert written not in ("", ".", "..")
    assert not set(written) & {"/", "\0"}
    assert parameter_name(written) == name


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True))
def test_no_two_names_have_one_file(names: list[str]) -> None:
    assert len(set(map(file_name, names))) == len(names)


def trained(job: tw.Job) -> tuple[list[str], bytes, bytes]:
    """Parameters of an optimizer, of bfloat16 and others; there is nothing to push to."""
    import torch

    params = [
        ("half", torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))),
        ("p", torch.nn.Parameter(torch.ones(3))),
    ]
    optimizer = tw.torch.StoreOptimizer(params, torch.optim.SGD, lr=1.0, publish=True)
    with tw.files.connect(job.name) as folder:
        wait_for(folder, 1)
        names = [*folder.listdir(), *folder.listdir("params")]
        with folder.open("params/half") as file, folder.open("control/rule") as rule:
            found = names, file.read(), rule.read()
    optimizer.close()
    return found


def test_an_optimizers_parameters_are_files_and_take_no_pushes() -> None:
    ((names, half, rule),) = run_job(trained, workers=1).ok()
    assert names == ["control", "model.safetensors", "params", "versions", "half", "p", "p.npy"]
    assert half == b"\x80\x3f" * 5
    assert rule == b"SGD\n"
