"""The tests of the adapter for TensorFlow, which has an environment of its own: `make test-tensorflow`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = ["test_*.py"] if find_spec("tensorflow") is None else []


@pytest.fixture(scope="session", autouse=True)
def temporary_files() -> Iterator[None]:
    """TensorFlow writes a file for each function that it converts, which a process that is killed leaves behind."""
    folder = tempfile.mkdtemp(prefix="tensorwire-tests-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield
    shutil.rmtree(folder, ignore_errors=True)
