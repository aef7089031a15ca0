"""Files of keys and of tables: whatever is in them, they are read, or refused in one line."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorwire.errors import ArgumentError
from tensorwire.keyvalue.table_files import check_folder, read_folder
from tensorwire.keyvalue.table_folder import INDEX, VALUES, TableIndex, read_index, replace_folder
from tensorwire.store.kept import KeptArray
from tensorwire.store.kept_check import check_kept
from tensorwire.store.key_files import SavedArray, read_arrays, write_arrays
from tensorwire.store.request_client import pack_options
from tensorwire.store.row_layout import TableSpec
from tensorwire.store.sharding import PAGE, ParameterSpec
from tensorwire.store.state_transfer import NUMBER, VALUE
from tensorwire.store.store_layout import StoreSpec

ARRAYS = [
    (SavedArray("w", kind=VALUE), np.arange(6, dtype="f4")),
    (SavedArray("w", "exp_avg", rows=True), np.ones(6, "f4")),
    (SavedArray("w", "step"), np.array(3, "f4")),
]
SEEDS = range(300)


def damaged(data: bytes, seed: int) -> bytes:
    """The same with some bytes changed, left out or added, or without its end."""
    draw = random.Random(seed)
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(found) or 1)
        kind = draw.randrange(4)
        if kind < 2:
            found[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 2:
            found[at : at + draw.randrange(5)] = draw.randbytes(draw.randrange(5))
        else:
            del found[max(1, at) :]
    return bytes(found)


def test_a_damaged_file_of_keys_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    write_arrays(good, "Adam", ARRAYS)
    refused = 0
    for seed in SEEDS:
        bad.write_bytes(damaged(good.read_bytes(), seed))
        said = ""
        try:
            _, arrays = read_arrays(bad)
            check_kept(KEYS, pack_options([0.1]), [KeptArray(0, s.name, s.kind, s.rows, a) for s, a in arrays[1:]])
        except ArgumentError as error:
            said = str(error)
        assert "\n" not in said
        refused += bool(said)
    assert refused > len(SEEDS) / 2


def spec_of(rule: str, tensor: ParameterSpec, *, table: bool = False, **options: float) -> StoreSpec:
    numeric = [(0, name, -1) for name in options]
    more: dict[str, Any] = {"table": TableSpec(1)} if table else {"keys": True}
    return StoreSpec("", [tensor], rule, [options], numeric, PAGE, False, "sum", **more)


KEYS = spec_of("Adam", ParameterSpec("w", (6,), "float32"), lr=0.1)
ROWS = spec_of("Adagrad", ParameterSpec("t", (6, 2), "float32"), table=True, lr=0.1)
FOREIGN = spec_of("somewhere:rule", ParameterSpec("w", (6,), "float32"))


def test_a_damaged_folder_of_a_table_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    index = TableIndex("Adagrad", ["sum"], {"step": 1.0})
    table: Any = SimpleNamespace(
        client=SimpleNamespace(spec=ROWS),
        shape=(6, 2),
        dtype=np.dtype("f4"),
        name="t",
        options=pack_options([0.1]),
    )
    for name in (VALUES, index.file("sum")):
        np.save(tmp_path / name, np.ones((6, 2), "f4"))
    (tmp_path / INDEX).write_bytes(index.encoded())
    assert check_folder(table, tmp_path) == ""
    refused = 0
    for seed in SEEDS:
        file = tmp_path / index.files[seed % 3]
        good = file.read_bytes()
        file.write_bytes(damaged(good[:130] if seed % 2 else good, seed))  # the header, mostly
        said = check_folder(table, tmp_path)
        assert "\n" not in said
        refused += bool(said)
        file.write_bytes(good)
    assert refused > len(SEEDS) / 2
    assert read_index(tmp_path).rule == "Adagrad"


def number(name: str, value: Any = 1.0) -> KeptArray:
    return KeptArray(0, name, NUMBER, False, np.array([value]))


def rows(name: str, array: Any) -> KeptArray:
    return KeptArray(0, name, "", True, array)


ADAM = [rows("exp_avg", np.ones(6, "f4")), rows("exp_avg_sq", np.ones(6, "f4"))]
STEP = KeptArray(0, "step", "", False, np.array(1, "f4"))
ADAGRAD = [rows("sum", np.ones((6, 2), "f4")), number("step")]


@pytest.mark.parametrize(
    ("spec", "kept", "said"),
    [
        (KEYS, [*ADAM, STEP], ""),
        (KEYS, [], ""),
        (KEYS, ADAM, "has no 'step', which Adam needs"),
        (KEYS, [*ADAM, STEP, STEP], "is in the state twice"),
        (KEYS, [*ADAM, STEP, rows("sum", np.ones(6, "f4"))], "has 'sum', which Adam does not keep"),
        (KEYS, [rows("exp_avg", np.ones(3, "f4"))], r"has the shape \[3\]"),
        (KEYS, [rows("exp_avg", np.ones((6, 1), "f4"))], r"has the shape \[6, 1\]"),
        (KEYS, [rows("exp_avg", np.ones(6, ">f4"))], "is of >f4"),
        (KEYS, [rows("exp_avg", np.ones(6, "c8"))], "is of complex64"),
        (KEYS, [rows("exp_avg", np.ones(6, "f8"))], r"is float64\[6\] in the state, and should be float32\[6\]"),
        (KEYS, [rows("exp_avg", np.array([None] * 6))], "is of object"),
        (KEYS, [rows("exp_avg", b"bytes")], "is of bytes"),
        (KEYS, [KeptArray(0, "exp_avg", "", False, np.ones(6, "f4"))], "is kept in another way"),
        (KEYS, [KeptArray(0, "exp_avg", NUMBER, False, np.ones(6, "f4"))], "is a number, and has the shape"),
        (KEYS, [KeptArray(0, "exp_avg", "strange", True, np.ones(6, "f4"))], "unknown kind 'strange'"),
        (ROWS, ADAGRAD, ""),
        (ROWS, [], "has no 'step', which Adagrad needs"),
        (ROWS, ADAGRAD[1:], "has no 'sum', which Adagrad needs"),
        (ROWS, [rows("sum", np.ones((3, 2), "f4")), number("step")], r"has the shape \[3, 2\]"),
        (ROWS, [rows("sum", np.ones((6, 4), "f4")), number("step")], r"should be float32\[6, 2\]"),
        (ROWS, [rows("sum", np.array(1, "f4")), number("step")], r"has the shape \[\]"),
        (ROWS, [*ADAGRAD, number("zzz")], "has 'zzz', which Adagrad does not keep"),
        (FOREIGN, [rows("what", np.ones(6, "f8")), KeptArray(0, "", "", False, np.ones(2, "i4")), number("n")], ""),
        (FOREIGN, [rows("what", np.ones(5))], r"has the shape \[5\]"),
    ],
)
def test_state_has_to_be_what_the_rule_keeps(spec: StoreSpec, kept: list[KeptArray], said: str) -> None:
    options = pack_options([0.1] * len(spec.numeric))
    if not said:
        check_kept(spec, options, kept)
        return
    with pytest.raises(ArgumentError, match=said):
        check_kept(spec, options, kept)


def test_a_file_of_the_first_version_is_read(tmp_path: Path) -> None:
    index = b'{"version": 1, "rule": "SGD", "arrays": [{"key": "w"}, {"key": "w", "name": "a", "rows": true}]}'
    arrays = {"index": np.frombuffer(index, np.uint8), "0": np.ones(3), "1": np.zeros(3)}
    np.savez(tmp_path / "old.npz", **arrays)  # type: ignore[arg-type]
    rule, found = read_arrays(tmp_path / "old.npz")
    assert rule == "SGD"
    assert [saved.is_value for saved, _ in found] == [True, False]


def test_a_device_stays_a_device_and_a_link_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("keys.npz")
    write_arrays(tmp_path / "link", "Adam", ARRAYS)
    assert (tmp_path / "link").is_symlink()
    assert read_arrays(tmp_path / "keys.npz")[0] == "Adam"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="nobody reads it"):
        write_arrays(tmp_path / "pipe", "Adam", ARRAYS)
    with pytest.raises(ArgumentError, match="it is no regular file"):
        read_arrays(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    with pytest.raises(ArgumentError, match="Is a directory"):
        write_arrays(tmp_path, "Adam", ARRAYS)
    try:
        os.mknod(tmp_path / "full", stat.S_IFCHR | 0o666, os.makedev(1, 7))
        (tmp_path / "full").open("wb").close()
    except PermissionError:
        return
    with pytest.raises(ArgumentError, match="No space left on device"):
        write_arrays(tmp_path / "full", "Adam", ARRAYS)
    assert stat.S_ISCHR((tmp_path / "full").lstat().st_mode)
    assert {each.name for each in tmp_path.iterdir()} == {"link", "keys.npz", "pipe", "full"}


@pytest.mark.parametrize("path", ["", ".", "..", "/", "a\0b", None, 3, b"x", "a" * 300])
def test_what_names_no_file_and_no_folder_is_refused(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: write_arrays(path, "Adam", ARRAYS),
        lambda: read_arrays(path),
        lambda: replace_folder(path, lambda folder: None),
        lambda: read_folder(path),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
