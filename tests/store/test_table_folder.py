"""Folders of tables: one replaces another so that there is a whole one at any time, and nothing else is removed."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tensorwire.errors import ArgumentError
from tensorwire.keyvalue.table_files import read_folder
from tensorwire.keyvalue.table_folder import INDEX, VALUES, TableIndex, replace_folder

STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def entries(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def write(folder: Path, number: float = 1, names: tuple[str, ...] = ("sum",)) -> None:
    """Writes a table that has this number everywhere."""
    index = TableIndex("rule", list(names), {"step": number})
    for name in (VALUES, *map(index.file, names)):
        np.save(folder / name, np.full(3, number))
    (folder / INDEX).write_bytes(index.encoded())


def number_in(folder: Path) -> float:
    """What `write` wrote, all of it."""
    index, values, arrays = read_folder(folder)
    numbers = {index.numbers["step"], *values.tolist(), *(n for array in arrays.values() for n in array.tolist())}
    assert len(numbers) == 1
    return numbers.pop()


def replace_until(folder: Path, last: int) -> bool:
    """Replaces the folder in a process that is killed before its step of that number. Returns whether it got there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none of what they hold
        pid = os.fork()
    if pid == 0:
        steps = iter(range(last))
        sys.addaudithook(lambda event, _: os._exit(9) if event in STEPS and next(steps, None) is None else None)
        replace_folder(folder, partial(write, number=2))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("there", [False, True])
def test_a_process_that_is_killed_leaves_a_whole_table(there: bool, tmp_path: Path) -> None:
    killed, seen = 0, set()
    while True:
        folder = tmp_path / str(killed) / "table"
        folder.parent.mkdir()
        if there:
            replace_folder(folder, write)
        if not replace_until(folder, killed):
            break
        if there or folder.exists():
            seen.add(number_in(folder))
        replace_folder(folder, partial(write, number=3))  # the next call finds its way
        assert number_in(folder) == 3
        assert not list(folder.parent.glob(".*.old"))
        killed += 1
    assert killed > 10
    assert seen == ({1, 2} if there else {2})
    assert number_in(folder) == 2
    assert entries(folder.parent) == ["table"]


@pytest.mark.parametrize("index", [None, "", '{"my": "web page"}', '["a"]'])
def test_a_folder_of_something_else_stays_as_it_is(index: str | None, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    if index is not None:
        (tmp_path / INDEX).write_text(index)
    before = entries(tmp_path)
    with pytest.raises(ArgumentError, match="is no folder of a table"):
        replace_folder(tmp_path, write)
    assert entries(tmp_path) == before


@pytest.mark.parametrize("aside", [False, True])
def test_files_that_are_not_of_the_table_are_named(aside: bool, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    for path in (folder, tmp_path / ".table.old"):
        replace_folder(path, write)
    ((tmp_path / ".table.old" if aside else folder) / "notes").touch()
    with pytest.raises(ArgumentError, match="has 'notes', which is not of a table"):
        replace_folder(folder, partial(write, number=2))
    assert number_in(folder) == 1
    with pytest.raises(ArgumentError, match="is no folder"):
        replace_folder(folder / VALUES, write)


def test_what_cannot_be_removed_is_said_and_the_new_table_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(self: Path) -> None:
        raise OSError(16, "Device or resource busy")

    folder = tmp_path / "table"
    replace_folder(folder, write)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "rmdir", busy)
        replace_folder(folder, partial(write, number=2))
    assert "cannot be removed: [Errno 16] Device or resource busy" in caplog.text
    assert number_in(folder) == 2
    replace_folder(folder, partial(write, number=3))
    assert entries(tmp_path) == ["table"]


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, folder = Path.rename, tmp_path / "table"
    replace_folder(folder, write)

    def refused(self: Path, target: Path) -> Path:
        if target == folder and not self.name.endswith(".old"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(ArgumentError, match=r"cannot write .*: No space left on device"):
        replace_folder(folder, partial(write, number=2))
    assert number_in(folder) == 1
    assert entries(tmp_path) == ["table"]


def test_every_name_has_a_file_of_its_own_in_the_folder(tmp_path: Path) -> None:
    names = ("values", "", "..", "../x", "a/b", "a%2Fb", "%", "%values", "index", "\0", "b b", "é")
    (tmp_path / "link").symlink_to(tmp_path / "table")
    replace_folder(tmp_path / "link", partial(write, names=names))
    assert entries(tmp_path) == ["link", "table"]
    assert len(entries(tmp_path / "table")) == len(names) + 2
    assert set(read_folder(tmp_path / "table")[2]) == set(names)


def test_folders_of_the_first_version_are_read(tmp_path: Path) -> None:
    write(tmp_path, names=("sum",))
    index = {"version": 1, "rule": "Adagrad", "arrays": ["sum"], "numbers": {"step": 1.0}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert number_in(tmp_path) == 1
    (tmp_path / INDEX).write_text(json.dumps({**index, "arrays": ["values"]}))
    with pytest.raises(ArgumentError, match="has no values"):
        read_folder(tmp_path)
    with pytest.raises(ArgumentError, match=r"cannot read .*missing: No such file or directory"):
        read_folder(tmp_path / "missing")
