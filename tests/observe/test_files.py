"""Files that people ask for: regular files are replaced as a whole, everything else stays what it is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tensorwire.errors import ArgumentError
from tensorwire.observe import files
from tensorwire.observe.files import check_file, save_file, write_file

NULL, FULL = os.makedev(1, 3), os.makedev(1, 7)


def node(path: Path, device: int) -> Path:
    """A device of this test's own."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, device)
        path.open("wb").close()
    except PermissionError:
        pytest.skip("making a device needs root, on a file system that allows it")
    return path


def kind(path: Path) -> int:
    return stat.S_IFMT(path.lstat().st_mode)


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    write_file(tmp_path / "new", b"all")
    (tmp_path / "other").touch()
    assert (tmp_path / "new").read_bytes() == b"all"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {"new", "other"}


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    path.chmod(0o640)
    with path.open("rb") as reader:
        write_file(path, b"after")
        assert reader.read() == b"before"
    assert path.read_bytes() == b"after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("there", [False, True])
def test_links_stay_and_their_target_is_written(there: bool, tmp_path: Path) -> None:
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"before")
    (tmp_path / "second").symlink_to("folder/target")
    (tmp_path / "first").symlink_to(tmp_path / "second")
    check_file(tmp_path / "first", option="--trace")
    write_file(tmp_path / "first", b"after")
    assert target.read_bytes() == b"after"
    assert [p.is_symlink() for p in (tmp_path / "first", tmp_path / "second", target)] == [True, True, False]


def test_a_file_that_cannot_be_replaced_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container has one file mounted."""
    path = tmp_path / "file"
    path.write_bytes(b"something longer")
    inode = path.stat().st_ino

    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    write_file(path, b"after")
    assert (path.read_bytes(), path.stat().st_ino) == (b"after", inode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    path = node(tmp_path / "null", NULL)
    check_file(path, option="--trace")
    write_file(path, b"x" * 100_000)
    assert (kind(path), path.stat().st_rdev) == (stat.S_IFCHR, NULL)
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    path = node(tmp_path / "full", FULL)
    with pytest.raises(ArgumentError) as caught:
        save_file(path, b"x", option="--json")
    assert str(caught.value) == f"--json {path}: No space left on device"
    assert kind(path) == stat.S_IFCHR


def test_a_pipe_gets_all_of_it(tmp_path: Path) -> None:
    path, data = tmp_path / "pipe", os.urandom(300_000)
    os.mkfifo(path)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"):  # a reader that is there for sure
        reader.start()
        write_file(path, data)  # more than fits into it
    reader.join()
    assert got == [data]
    assert kind(path) == stat.S_IFIFO


def test_a_pipe_that_nobody_reads_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_file(path, option="--trace")
    with pytest.raises(ArgumentError, match=r"--trace .*/pipe: nobody reads it$"):
        save_file(path, b"x", option="--trace")
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 0.01)
    with (
        open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"),
        pytest.raises(ArgumentError, match=r"--trace .*/pipe: nobody has read it for 0\.01 s$"),
    ):
        save_file(path, b"x" * 1_000_000, option="--trace")


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("where", ["file", "pipe"])
def test_standard_output_goes_on_after_what_is_written(name: str, where: str, tmp_path: Path) -> None:
    code = f"""
from tensorwire.observe.files import check_file, write_file
print("before")
check_file({name!r}, option="--json")
write_file({name!r}, b"written\\n")
print("after")
"""
    path = tmp_path / "out"
    with path.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=out if where == "file" else subprocess.PIPE, check=True
        )
    assert (path.read_bytes() if where == "file" else done.stdout) == b"before\nwritten\nafter\n"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder, "it is a folder"),
        (lambda folder: folder / "no" / "file", r"there is no folder .*/no"),
        (lambda folder: "/dev/fd/987", "Bad file descriptor"),
        (lambda folder: folder / ("x" * 300), "File name too long"),
    ],
    ids=["folder", "no folder", "closed", "long"],
)
def test_what_cannot_be_written_is_refused_before(make: object, why: str, tmp_path: Path) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(ArgumentError, match=f"^--trace .*: {why}$"):
        check_file(path, option="--trace")
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ArgumentError, match="Too many levels of symbolic links"):
        check_file(tmp_path / "a", option="--trace")


def test_what_is_read_only_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ArgumentError, match="it cannot be written to"):
        check_file(path, option="--trace")
    with pytest.raises(ArgumentError, match=f"no file can be made in {tmp_path}"):
        check_file(tmp_path / "new", option="--trace")
