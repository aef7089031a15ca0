"""The libraries for TensorFlow: compiled once against the installed one. The wheel's headers suffice."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

import tensorwire
from tensorwire.builds import build
from tensorwire.progress import progress

_INCLUDE = Path(tensorwire.__file__).parent / "include"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-w")  # -w: for the warnings of TensorFlow's headers


def compiled(name: str) -> Path:
    """The library that is made of ``NAME.cc``, which is compiled if it is not there.

    Raises:
        Unsupported: There is no compiler, or it fails.
    """
    source = Path(__file__).with_name(f"{name}.cc")
    headers = [*sorted(source.parent.glob("*.h")), *sorted(_INCLUDE.rglob("*.h"))]
    flags, libraries = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
    return build(
        "tensorflow",
        source,
        [*_FLAGS, str(source), f"-I{_INCLUDE}", *flags, *libraries],
        partial(progress, f"compiling {name} for TensorFlow, once"),
        headers=headers,
        facts=(tf.__version__, tf.version.GIT_VERSION),
    )


class OperatorLibrary(NamedTuple):
    """What a library of operators has for TensorFlow, and what for us."""

    ops: Any
    library: ctypes.CDLL


def load_library(name: str) -> OperatorLibrary:
    """The operators that are made of ``NAME.cc``. Raises as `compiled`."""
    path = str(compiled(name))
    return OperatorLibrary(tf.load_op_library(path), ctypes.CDLL(path))
