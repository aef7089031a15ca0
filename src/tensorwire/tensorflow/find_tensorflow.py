"""Imports TensorFlow if its version is supported; otherwise explains in one line why not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any

from tensorwire.errors import MissingPackage, Unsupported
from tensorwire.extras import how_to_install

VERSION = "2.21"
_PACKAGES = ("tensorflow", "tensorflow-cpu")


def load_tensorflow() -> Any:
    """The module ``tensorflow``. Raises `MissingPackage` or `Unsupported` with what to do."""
    found = [version for name in _PACKAGES if (version := _installed(name))]
    if found and not any(version.startswith(f"{VERSION}.") for version in found):
        raise Unsupported(
            f"tensorwire.tensorflow is written for TensorFlow {VERSION}, and this is {found[0]}: "
            f"pip install 'tensorflow-cpu=={VERSION}.*'"
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # or each server prints what its processor can do
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise MissingPackage(f"cannot import tensorflow ({error}): {how_to_install('tensorflow')}") from None


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
