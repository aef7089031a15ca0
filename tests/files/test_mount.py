"""A mounted job: programs as they are, one errno for each wrong call, and what becomes of it when something dies."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tensorwire.errors import ArgumentError
from tensorwire.files.mounting import find_folder, unmount
from tensorwire.store.versions.version_files import job_folder
from tests.files.conftest import SIZE, Keys, mounting, need_mounts
from tests.harness.sandbox import Sandbox, wait_for_end

W = np.arange(SIZE // 4, dtype="f4")


def shell(command: str, **names: object) -> str:
    """What a command of bash says; it must succeed, and complain of nothing."""
    environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), (command, done)
    return done.stdout


PROGRAMS = [
    "ls -lR $M > /dev/null",
    "cat $F | cmp - $S",
    "cmp $F $S",
    "dd if=$F bs=1M status=none | cmp - $S",
    "cmp <(dd if=$F bs=512 skip=3 count=100 status=none) <(dd if=$S bs=512 skip=3 count=100 status=none)",
    "dd if=$F bs=4096 iflag=direct status=none | cmp - $S",
    "cp -L $F $T/a && cmp $T/a $S",
    "cp -Lp $F $T/b && cmp $T/b $S",
    "cp -L --sparse=always $F $T/c && cmp $T/c $S",
    "cp -rL $M/params $T/params && cmp $T/params/w $M/params/w",
    "tar chf $T/x.tar -C $M model.safetensors && tar xOf $T/x.tar model.safetensors | cmp - $S",
    "rsync -aL $F $T/e && cmp $T/e $S",
    "head -c 100 $F | cmp - <(head -c 100 $S)",
    "tail -c 100 $F | cmp - <(tail -c 100 $S)",
    "sha256sum < $F | cmp - <(sha256sum < $S)",
    "[ $(stat -Lc %s $F) = $(stat -c %s $S) ]",
    "[ $(cut -d. -f2 $M/control/version) = 1 ]",
    "grep -q 'of step 7' $M/control/events",
    "find $M > /dev/null && df $M > /dev/null && stat -f $M > /dev/null",
    "[ $(stat -Lc %Y $F) -gt 1700000000 ]",
]
CODE = {
    "np.memmap": "a = np.memmap(F, np.uint8, 'r'); assert (a == np.fromfile(S, np.uint8)).all()",
    "memmap mode c": "a = np.memmap(F, np.uint8, 'c'); a[0] = 1",
    "np.fromfile": f"assert (np.fromfile(M + '/params/w', 'f4') == np.arange({SIZE // 4})).all()",
    "np.load": f"assert (np.load(M + '/params/w.npy', mmap_mode='r') == np.arange({SIZE // 4})).all()",
    "safe_open": "f = safe_open(F, 'pt').__enter__(); assert f.get_tensor('w')[-1] == 40002 and len(f.keys()) == 5",
    "safe_open numpy": "f = safe_open(F, 'np').__enter__(); assert f.get_tensor('a/b').sum() == 6",
    "load_file": "assert load_file(F)['table'].sum() == 150",
    "sendfile": "i = os.open(F, 0); o = os.open(T + '/s', 66); assert os.sendfile(o, i, 0, 4096) == 4096",
    "flock": "f = open(F, 'rb'); fcntl.flock(f, fcntl.LOCK_SH)",
    "shared map": "f = open(F, 'rb'); mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[-1]",
    "torch storage": "assert torch.UntypedStorage.from_file(F, False, 1000).nbytes() == 1000",
}
IMPORTS = "import fcntl, mmap, os; import numpy as np, torch; from safetensors import safe_open; "
IMPORTS += "from safetensors.torch import load_file; M, F, S, T = map(os.environ.get, 'MFST'); "


def test_programs_read_as_from_any_folder(mounted: Path, keys: Keys, tmp_path: Path) -> None:
    real = next(job_folder(keys.name).glob("store-*/1/model.safetensors"))
    names = {"M": mounted, "F": mounted / "model.safetensors", "S": real, "T": tmp_path}
    for command in PROGRAMS:
        if shutil.which(command.split()[0]):
            shell(command, **names)
    lines = [IMPORTS]  # for one interpreter: torch takes seconds
    lines += [
        f"try:\n    {code}\nexcept BaseException as e: print({what!r}, type(e), e)" for what, code in CODE.items()
    ]
    said = shell(f'{sys.executable} -c "$CODE"', CODE="\n".join(lines), **names)
    assert said == ""


def test_torch_loads_a_checkpoint_by_a_map(sandbox: Sandbox, tmp_path: Path) -> None:
    import torch

    real = tmp_path / "kept"
    real.mkdir()
    torch.save({"w": torch.arange(5.0)}, real / "one.pt")
    keys = Keys(sandbox, tmp_path, "--checkpoints", str(real))
    with mounting(keys.name, sandbox, tmp_path) as at:
        assert torch.load(at / "checkpoints/one.pt", mmap=True)["w"].tolist() == [0, 1, 2, 3, 4]
        shell("cp $M/params/w $M/checkpoints/w", M=at)
        assert (real / "w").read_bytes() == W.tobytes()


# ---- path x call -> errno

Call = Callable[[Path], object]


def opening(flags: int) -> Call:
    def call(path: Path) -> None:
        os.close(os.open(path, flags))

    return call


def renamed(path: Path) -> None:
    path.rename(path.with_name("other"))


CALLS: dict[str, Call] = {
    "read": opening(os.O_RDONLY),
    "write": opening(os.O_WRONLY),
    "both": opening(os.O_RDWR),
    "append": opening(os.O_WRONLY | os.O_APPEND),
    "create": opening(os.O_WRONLY | os.O_CREAT),
    "replace": opening(os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    "new": opening(os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "list": os.listdir,
    "unlink": Path.unlink,
    "rmdir": Path.rmdir,
    "mkdir": Path.mkdir,
    "rename": renamed,
    "truncate": lambda path: os.truncate(path, 8),
    "chmod": lambda path: path.chmod(0o600),
    "utime": lambda path: os.utime(path, (1, 1)),
    "readlink": lambda path: path.readlink(),
    "link": lambda path: path.with_name("other").hardlink_to(path),
    "symlink": lambda path: path.with_name("other").symlink_to(path),
    "setxattr": lambda path: os.setxattr(path, "user.a", b"b"),
}
E = errno
RO = dict.fromkeys(
    ("write", "both", "append", "replace", "truncate", "chmod", "utime", "unlink", "rename", "link", "symlink"), E.EROFS
)
FILE = {
    **RO,
    "read": 0,
    "create": E.EROFS,
    "new": E.EEXIST,
    "list": E.ENOTDIR,
    "rmdir": E.ENOTDIR,
    "mkdir": E.EEXIST,
    "readlink": E.EINVAL,
    "setxattr": E.ENOTSUP,
}
FOLDER = {
    **RO,
    **dict.fromkeys(("write", "both", "append", "create", "replace", "truncate", "unlink"), E.EISDIR),
    "read": 0,
    "new": E.EEXIST,
    "list": 0,
    "rmdir": E.EROFS,
    "mkdir": E.EEXIST,
    "link": E.EPERM,
    "readlink": E.EINVAL,
    "setxattr": E.ENOTSUP,
}
NOTHING = {
    **dict.fromkeys((*RO, "read", "list", "rmdir", "readlink", "setxattr"), E.ENOENT),
    **dict.fromkeys(("create", "replace", "new", "mkdir", "symlink"), E.EROFS),
}
PUSH = {
    **FILE,
    **dict.fromkeys(("write", "create", "replace", "chmod", "utime"), 0),
    **dict.fromkeys(("read", "both"), E.EACCES),
    **dict.fromkeys(("append", "truncate"), E.EINVAL),
}
TABLE = {
    "params/w": FILE,
    "params/w.npy": FILE,
    "control/version": FILE,
    "control/events": FILE,
    "control": FOLDER,
    "versions/1": FOLDER,
    "versions/1/params": FOLDER,
    "push": FOLDER,
    "nothing": NOTHING,
    "params/nothing": NOTHING,
    "control/nothing": NOTHING,
    "push/nothing": NOTHING,
    "push/table": NOTHING,
    "versions/99": NOTHING,
    "push/w": PUSH,
}


def test_each_call_that_cannot_be_has_its_errno(mounted: Path) -> None:
    wrong = []
    for name, wanted in TABLE.items():
        assert wanted.keys() == CALLS.keys()
        for what, call in CALLS.items():
            try:
                call(mounted / name)
                found = 0
            except OSError as error:
                found = error.errno or -1
            if found != wanted[what]:
                expected = errno.errorcode.get(wanted[what])
                wrong.append(f"{what} {name}: {errno.errorcode.get(found, found)}, not {expected}")
    assert wrong == []


# ---- versions, watching, several at once


def test_an_open_file_is_one_version_and_a_path_is_one_for_ever(mounted: Path, keys: Keys) -> None:
    path = (mounted / "params" / "w").resolve() if (mounted / "params").is_symlink() else Path()
    assert path.parent.parent.name == "1"
    with (mounted / "params/w").open("rb") as file:
        first = file.read(4096)
        for number in (2, 3):
            assert keys.publish() == number
        while (mounted / "model.safetensors").readlink().parts[1] != "3":
            time.sleep(0.002)
        assert first + file.read() == W.tobytes()
        assert np.array_equal(np.fromfile(mounted / "params/w", "f4"), W + 2)
    while True:  # until the kernel and we have let go of it
        try:
            path.read_bytes()
        except FileNotFoundError:
            break


def test_events_can_be_followed(mounted: Path, keys: Keys) -> None:
    program = subprocess.Popen(
        ["tail", "-n", "+1", "-f", mounted / "control/events"], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    try:
        while "0.1." not in program.stdout.readline():
            pass
        keys.publish()
        while "0.2." not in program.stdout.readline():
            pass
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_versions_can_be_watched_on_the_trainers_machine(keys: Keys) -> None:
    library = ctypes.CDLL(None)
    watcher = library.inotify_init1(os.O_NONBLOCK)
    (folder,) = (path for path in job_folder(keys.name).glob("store-*") if path.is_dir())
    moved_to = 0x80
    assert library.inotify_add_watch(watcher, os.fsencode(folder), moved_to) >= 0
    seen = b""
    keys.publish()
    while b"current" not in seen:
        select.select([watcher], [], [])
        seen += os.read(watcher, 4096)
    os.close(watcher)
    assert (folder / "current").readlink() == Path("2")


def test_readers_and_a_writer_at_once(mounted: Path, keys: Keys) -> None:
    over = threading.Event()

    def read(_: int) -> int:
        count = 0
        while not over.is_set():
            try:
                values = np.fromfile(mounted / "params/w", "f4") - W
            except FileNotFoundError:  # that version has gone while its path was looked up
                continue
            assert (values == values[0]).all()
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(read, n) for n in range(2)]
        try:
            for _ in range(10):
                np.ones(SIZE // 4, "f4").tofile(mounted / "push/w")
                keys.publish()
        finally:
            over.set()
        assert all(each.result() for each in found)
    assert (keys.values()[0] == W + 20).all()


LARGE = """
    import numpy as np
    kv = tw.store.KeyValue(tw.store.Async(), "sum", publish=True)
    kv.init("w", np.arange(32 << 20, dtype="i4"))
    kv.publish()
    print("job", job.name)
    time.sleep(600)
"""


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_eight_threads_read_16_mib_each(sandbox: Sandbox, tmp_path: Path, device: str) -> None:
    program = sandbox.run(sandbox.script(LARGE), "--servers", "2", workers=1)
    with mounting(program.said("job"), sandbox, tmp_path, TENSORWIRE_DEVICE=device) as at:
        fd = os.open(at / "params/w", os.O_RDONLY)

        def read(number: int) -> bool:
            nbytes = 16 << 20
            found = b""
            while len(found) < nbytes:
                found += os.pread(fd, nbytes - len(found), number * nbytes + len(found))
            return bool((np.frombuffer(found, "i4") == np.arange(number << 22, (number + 1) << 22)).all())

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(8)))
        os.close(fd)


# ---- ends


def test_the_jobs_end_takes_the_mount_away(keys: Keys, sandbox: Sandbox, tmp_path: Path) -> None:
    with mounting(keys.name, sandbox, tmp_path) as at:
        daemon = sandbox.find(f"mount {keys.name}")
        keys.end()
        wait_for_end(daemon)
        assert list(at.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_the_mount_away(number: int, keys: Keys, sandbox: Sandbox, tmp_path: Path) -> None:
    need_mounts()
    at = tmp_path / "mount"
    program = sandbox.launch("mount", keys.name, str(at))
    program.line(f"{keys.name} is mounted")
    program.signal(number)
    result = program.finish()
    assert (result.status, result.err) == (0, "")
    assert list(at.iterdir()) == []


def test_a_server_that_is_killed_ends_what_is_read_with_one_errno(keys: Keys, sandbox: Sandbox, tmp_path: Path) -> None:
    with mounting(keys.name, sandbox, tmp_path, TENSORWIRE_DEVICE="tcp") as at:
        daemon = sandbox.find(f"mount {keys.name}")
        fd = os.open(at / "params/w", os.O_RDONLY)
        server = next(p for p, line in sandbox.processes().items() if "server_process" in line)
        os.kill(server, signal.SIGKILL)

        def read() -> None:
            while True:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(fd, SIZE, 0)

        with pytest.raises(OSError) as found:
            read()
        assert found.value.errno in (errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED)
        os.close(fd)
        wait_for_end(daemon)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_mount_whose_process_is_gone_or_stopped_is_taken_over(
    number: int, keys: Keys, sandbox: Sandbox, tmp_path: Path
) -> None:
    with mounting(keys.name, sandbox, tmp_path) as at:
        daemon = sandbox.find(f"mount {keys.name}")
        file = (at / "params/w").open("rb")
        mapped = np.memmap(at / "model.safetensors", np.uint8, "r")  # of the machine's own memory
        os.kill(daemon, number)
        if number == signal.SIGKILL:
            wait_for_end(daemon)
        waiting = subprocess.Popen(["ls", at], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        again = sandbox.launch("mount", keys.name, str(at))
        assert "use --recover" in again.finish().one_line()
        again = sandbox.launch("mount", keys.name, str(at), "--recover", "--daemon")
        assert again.finish().status == 0
        _, said = waiting.communicate()
        assert waiting.returncode != 0
        assert "abort" in said or "not connected" in said
        assert (np.fromfile(at / "params/w", "f4") == W).all()
        with pytest.raises(OSError):
            file.read()
        file.close()
        assert mapped[-1] >= 0
        other = sandbox.launch("mount", keys.name, str(at), "--recover")
        assert "shows job" in other.finish().one_line()


def test_a_mount_in_the_background_outlives_who_asked_for_it(keys: Keys, sandbox: Sandbox, tmp_path: Path) -> None:
    need_mounts()
    at = tmp_path / "mount"
    result = sandbox.launch("mount", keys.name, str(at), "--daemon").finish()
    assert (result.status, result.err) == (0, "")
    assert (at / "control/clock").read_text() == "7\n"
    daemon = sandbox.find(f"mount {keys.name}")
    unmount(at)
    wait_for_end(daemon)
    result = sandbox.launch("mount", "nothing", str(at), "--daemon", "--timeout", "0").finish()
    assert result.status == 2
    assert "no job 'nothing'" in result.one_line()


def test_folders_that_cannot_be_mounted_on(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    for name, why in {"full": "is not empty", "full/file": "Not a directory|File exists", "no/such": "No such"}.items():
        with pytest.raises(ArgumentError, match=why):
            find_folder(str(tmp_path / name), recover=False)
    with pytest.raises(ArgumentError, match="is a mount of proc"):
        find_folder("/proc", recover=False)
    assert find_folder(str(tmp_path / "new"), recover=False).is_dir()


def test_the_mount_is_the_users_own(mounted: Path) -> None:
    if os.getuid():
        pytest.skip("needs another user")
    done = subprocess.run(["setpriv", "--reuid", "65534", "ls", mounted], capture_output=True, text=True)
    assert done.returncode != 0
    assert "Permission denied" in done.stderr
