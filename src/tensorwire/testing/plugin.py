"""The pytest option of the conformance suite: which devices it runs on.

``python -m pytest -p tensorwire.testing.plugin --pyargs tensorwire.testing.conformance --device package.module:name``
"""

from __future__ import annotations

import pytest

from tensorwire.testing.spec import Spec

pytest.register_assert_rewrite("tensorwire.testing.fixtures", "tensorwire.testing.patterns")

INI = "tensorwire_devices"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device`` on the command line, ``tensorwire_devices`` in the configuration file."""
    what = "a device for the conformance suite: package.module:factory, or package.module:factory+delays"
    parser.addoption("--device", action="append", default=[], metavar="FACTORY", help=f"{what}; may be repeated")
    parser.addini(INI, f"{what}; one a line", type="linelist", default=[])


def specs(config: pytest.Config) -> list[Spec]:
    """The devices that this run was told to test."""
    texts: list[str] = config.getoption("--device") or config.getini(INI)
    return [Spec(text) for text in texts]
