"""The tests of the adapter for TensorFlow, which has an environment of its own: `make test-tensorflow`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = ["test_*.py"] if find_spec("tensorflow") is None else []
