"""Imports MXNet, or explains in one line why it cannot be imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from tensorwire.errors import MissingPackage, Unsupported
from tensorwire.extras import how_to_install
from tensorwire.mxnet import dmlc


def load_mxnet() -> Any:
    """The module ``mxnet``. Raises `Unsupported` with what to do, or what `dmlc.start` raises.

    Where ``DMLC_`` variables make this process the scheduler or a server, it does not return.
    """
    if sys.version_info >= (3, 12):
        raise Unsupported(
            f"MXNet 1.9.1 needs distutils, which Python {sys.version_info[0]}.{sys.version_info[1]} lacks: "
            "use Python 3.10 or 3.11"
        )
    if int(np.__version__.partition(".")[0]) >= 2:
        raise Unsupported(
            f"MXNet 1.9.1 needs numpy before 2, and this is {np.__version__}: pip install 'numpy==1.26.4'"
        )
    if "bool" not in vars(np):
        vars(np)["bool"] = bool  # removed in numpy 1.24
    dmlc.start()  # not later: the variables would make the import of mxnet a server
    try:
        return importlib.import_module("mxnet")
    except ImportError as error:
        raise MissingPackage(f"cannot import mxnet ({error}): {how_to_install('mxnet')}") from None
