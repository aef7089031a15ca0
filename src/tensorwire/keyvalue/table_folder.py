"""A folder of a table's files, replaced so that a complete one exists at any time.

The new folder is written beside the old one. The old one moves to ``.NAME.old`` until the new one has its name. If the
process is killed between the two, readers of NAME read ``.NAME.old`` in place.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from tensorwire.errors import ArgumentError
from tensorwire.observe.files import checked_path, sync

INDEX, VALUES = "index.json", "values.npy"
_VERSION = 2  # in version 1 names were not quoted
_log = logging.getLogger("tensorwire")


class TableIndex(msgspec.Struct, frozen=True):
    """What is in a folder. ``arrays`` and ``numbers``: what the rule keeps beside the values."""

    rule: str
    arrays: list[str]
    numbers: dict[str, float]
    version: int = _VERSION

    def file(self, name: str) -> str:
        """The file of an array: another one for every name, and none outside of the folder."""
        if self.version == 1:
            return f"{Path(name).name}.npy"
        quoted = f"{quote(name, safe='')}.npy"
        return quoted if quoted not in (".npy", VALUES) else f"%{quoted}"  # no quoted name begins with "%v" or "%."

    def encoded(self) -> bytes:
        """As the index file has it."""
        return msgspec.json.encode(self)

    @property
    def files(self) -> list[str]:
        """All files, the index last."""
        return [VALUES, *map(self.file, self.arrays), INDEX]


def read_index(folder: Path) -> TableIndex:
    """The index of a folder. Raises `OSError`, or `ArgumentError` for what is none."""
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=TableIndex)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        if not folder.exists():
            raise
        raise ArgumentError(f"{folder} is no folder of a table, or is damaged") from None
    if index.version not in (1, _VERSION):
        raise ArgumentError(
            f"{folder} has version {index.version} of the format; this Tensorwire reads 1 and {_VERSION}"
        )
    if index.version == 1 and VALUES in index.files[1:]:
        raise ArgumentError(f"{folder} has no values: version 1 of the format wrote the rule's 'values' over them")
    return index


def folder_to_read(path: object) -> Path:
    """The folder, or the one that it was about to replace. Raises `ArgumentError` for no path."""
    folder = Path(os.path.realpath(checked_path(path)))
    return folder if folder.exists() or not _aside(folder).exists() else _aside(folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def replace_folder(path: object, write: Callable[[Path], object]) -> None:
    """A new folder, which ``write`` fills, takes the place of one of a table, or of none.

    Raises `ArgumentError` for a folder of anything else, which stays as it is, and where nothing can be written.
    """
    target = Path(os.path.realpath(checked_path(path)))
    aside, partial = _aside(target), target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        for folder in (target, aside):
            _check_replaceable(folder)
        partial.mkdir(parents=True)
        write(partial)
        for file in (*partial.iterdir(), partial):
            sync(file)
        _put(partial, target, aside)
    except OSError as error:
        raise ArgumentError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        _remove(aside)
    except (OSError, ArgumentError) as error:  # the next call tries again
        _log.warning("%s was replaced, but %s cannot be removed: %s", target, aside, error)


def _put(partial: Path, target: Path, aside: Path) -> None:
    there = target.exists()
    if there:
        _remove(aside)
        target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        if there:
            aside.rename(target)
        raise
    sync(target.parent)


def _check_replaceable(folder: Path) -> None:
    """Raises `ArgumentError` for what holds more than a table, or something else."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ArgumentError(f"{folder} exists, and is no folder: choose another one")
    names = {each.name for each in folder.iterdir()}
    strange = names and names - set(read_index(folder).files)
    if strange:
        raise ArgumentError(f"{folder} has {min(strange)!r}, which is not of a table: choose another folder")


def _remove(folder: Path) -> None:
    """Removes a folder of a table, and nothing that its index does not list. Raises `OSError` or `ArgumentError`."""
    if not folder.exists():
        return
    if any(folder.iterdir()):
        for name in read_index(folder).files:
            (folder / name).unlink(missing_ok=True)
    folder.rmdir()
