"""Runs every test of this folder on every named device."""

from __future__ import annotations

import pytest

from tensorwire.testing.fixtures import far as far
from tensorwire.testing.fixtures import far_spec as far_spec
from tensorwire.testing.fixtures import in_thread as in_thread
from tensorwire.testing.fixtures import nothing_left as nothing_left
from tensorwire.testing.fixtures import pair as pair
from tensorwire.testing.fixtures import warm as warm
from tensorwire.testing.plugin import specs

_TEST_SECONDS = 300


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a device."""
    if "spec" not in metafunc.fixturenames:
        return
    found = specs(metafunc.config)
    if not found:
        raise pytest.UsageError("name a device to test: --device NAME or package.module:factory")
    metafunc.parametrize("spec", found, ids=[spec.label for spec in found])


def pytest_itemcollected(item: pytest.Item) -> None:
    """A device that hangs fails, and the next test runs."""
    item.add_marker(pytest.mark.timeout(_TEST_SECONDS, method="signal"))
