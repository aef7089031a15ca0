"""Files of keys: their values, and what servers keep beside them, in numpy's npz format without pickles."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensorwire.errors import ArgumentError

Array = np.ndarray[Any, Any]
_INDEX = "index"
_VERSION = 1


class SavedArray(msgspec.Struct, frozen=True):
    """An array of the file: a key's value; or with ``name``, what is kept under it beside the value."""

    key: str | int
    name: str = ""
    kind: str = ""
    rows: bool = False


class _Index(msgspec.Struct, frozen=True):
    version: int
    rule: str
    arrays: list[SavedArray]


def write_arrays(path: str | os.PathLike[str], rule: str, arrays: Sequence[tuple[SavedArray, Array]]) -> None:
    """Writes a file, which is there as a whole or not at all. Raises `ArgumentError` where it cannot be written."""
    index = msgspec.json.encode(_Index(_VERSION, rule, [saved for saved, _ in arrays]))
    named = {str(number): array for number, (_, array) in enumerate(arrays)}
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **{_INDEX: np.frombuffer(index, np.uint8)}, **named)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ArgumentError(f"cannot write {target}: {error.strerror or error}") from None


def read_arrays(path: str | os.PathLike[str]) -> tuple[str, list[tuple[SavedArray, Array]]]:
    """The rule and the arrays of a file. Raises `ArgumentError` for anything but what `write_arrays` wrote."""
    try:
        with np.load(path, allow_pickle=False) as found:
            index = msgspec.json.decode(found[_INDEX].tobytes(), type=_Index)
            if index.version != _VERSION:
                raise ArgumentError(
                    f"{path} has version {index.version} of the format; this Tensorwire reads {_VERSION}"
                )
            return index.rule, [(saved, found[str(number)]) for number, saved in enumerate(index.arrays)]
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}") from None
    except (KeyError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, msgspec.MsgspecError) as error:
        raise ArgumentError(f"{path} was not written by KeyValue.save(), or is damaged: {error}") from None
