"""Files of keys: their values, and what servers keep beside them, in numpy's npz format without pickles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tensorwire.errors import ArgumentError
from tensorwire.observe.files import checked_path, write_file
from tensorwire.store.state_transfer import VALUE

Array = np.ndarray[Any, Any]
_INDEX = "index"
_VERSION = 2  # in version 1 the value had no kind of its own, but an empty name


class SavedArray(msgspec.Struct, frozen=True):
    """An array of the file: a key's value (of kind `VALUE`), or what is kept under ``name`` beside the value."""

    key: str | int
    name: str = ""
    kind: str = ""
    rows: bool = False

    @property
    def is_value(self) -> bool:
        """Whether it is the key's value."""
        return self.kind == VALUE


class _Index(msgspec.Struct, frozen=True):
    version: int
    rule: str
    arrays: list[SavedArray]


def reason(error: Exception) -> str:
    """What a foreign error says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def write_arrays(path: str | os.PathLike[str], rule: str, arrays: Sequence[tuple[SavedArray, Array]]) -> None:
    """Writes a file, which is there as a whole or not at all. Raises `ArgumentError` where it cannot be written."""
    index = msgspec.json.encode(_Index(_VERSION, rule, [saved for saved, _ in arrays]))
    named = {str(number): array for number, (_, array) in enumerate(arrays)}
    whole = {_INDEX: np.frombuffer(index, np.uint8), **named}
    try:
        write_file(checked_path(path), lambda file: np.savez(file, allow_pickle=False, **whole))
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror or error}") from None


def read_arrays(path: str | os.PathLike[str]) -> tuple[str, list[tuple[SavedArray, Array]]]:
    """The rule and the arrays of a file. Raises `ArgumentError` for anything but what `write_arrays` wrote."""
    try:
        file = checked_path(path)
        if file.exists() and not file.is_file():
            raise ArgumentError(f"cannot read {path}: it is no regular file")
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as found:
            index = msgspec.json.decode(found[_INDEX].tobytes(), type=_Index)
            if index.version not in (1, _VERSION):
                raise ArgumentError(
                    f"{path} has version {index.version} of the format; this Tensorwire reads 1 and {_VERSION}"
                )
            arrays = [(saved, found[str(number)]) for number, saved in enumerate(index.arrays)]
    except ArgumentError:
        raise
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # numpy, zipfile and the decompressors have many for a damaged file
        raise ArgumentError(f"{path} was not written by KeyValue.save(), or is damaged: {reason(error)}") from None
    if index.version == 1:
        replace = msgspec.structs.replace
        arrays = [(saved if saved.name else replace(saved, kind=VALUE), array) for saved, array in arrays]
    return index.rule, arrays
