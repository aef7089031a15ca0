"""The tests of the adapter for MXNet, which has an environment of its own: `make test-mxnet`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = ["test_*.py"] if find_spec("mxnet") is None else []
