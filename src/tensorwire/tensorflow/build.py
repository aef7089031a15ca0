"""The libraries for TensorFlow: compiled once against the installed one, and kept in the user's cache.

The wheel's headers suffice. A hash of all inputs names each library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

import tensorwire
from tensorwire.errors import Unsupported
from tensorwire.progress import progress

_INCLUDE = Path(tensorwire.__file__).parent / "include"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-w")  # -w: for the warnings of TensorFlow's headers


def compiled(name: str) -> Path:
    """The library that is made of ``NAME.cc``, which is compiled if it is not there.

    Raises:
        Unsupported: There is no compiler, or it fails.
    """
    source = Path(__file__).with_name(f"{name}.cc")
    command = [*_FLAGS, str(source), f"-I{_INCLUDE}", *tf.sysconfig.get_compile_flags()]
    inputs = [source, *sorted(source.parent.glob("*.h")), *sorted(_INCLUDE.rglob("*.h"))]
    parts = [" ".join(command).encode(), tf.version.GIT_VERSION.encode(), *(path.read_bytes() for path in inputs)]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tensorwire"
    library = folder / f"tensorflow-{tf.__version__}-{name}-{digest}.so"
    if not library.exists():
        with progress(f"compiling {name} for TensorFlow, once"):
            _compile(command, library)
    return library


class OperatorLibrary(NamedTuple):
    """What a library of operators has for TensorFlow, and what for us."""

    ops: Any
    library: ctypes.CDLL


def load_library(name: str) -> OperatorLibrary:
    """The operators that are made of ``NAME.cc``. Raises as `compiled`."""
    path = str(compiled(name))
    return OperatorLibrary(tf.load_op_library(path), ctypes.CDLL(path))


def _compile(command: list[str], library: Path) -> None:
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise Unsupported(f"the operators for TensorFlow need a C++ compiler, and there is no {compiler}: install g++")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            words = [compiler, *command, "-o", str(made), *tf.sysconfig.get_link_flags()]
            ran = subprocess.run(words, capture_output=True, text=True)
            if ran.returncode:
                reason = next((line for line in ran.stderr.splitlines() if "error" in line), ran.stderr.strip())
                raise Unsupported(f"{compiler} cannot compile the operators for TensorFlow: {reason:.300}")
            made.replace(library)  # at once: another process may be doing the same
    except OSError as error:
        raise Unsupported(f"the operators for TensorFlow cannot be kept in {library.parent}: {error}") from None
