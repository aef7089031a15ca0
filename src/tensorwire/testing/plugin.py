"""The pytest plugin of the tests: the option that names devices, time limits for slow machines, reasons for skips.

``python -m pytest -p tensorwire.testing.plugin --pyargs tensorwire.testing.conformance --device package.module:name``
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tensorwire.errors import ArgumentError

try:
    from tensorwire.testing.patience import PATIENCE, VARIABLE
except ArgumentError as error:
    raise pytest.UsageError(str(error)) from None
from tensorwire.testing.spec import DeviceSpec

pytest.register_assert_rewrite("tensorwire.testing.fixtures", "tensorwire.testing.patterns")

INI = "tensorwire_devices"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device`` on the command line, ``tensorwire_devices`` in the configuration file."""
    what = "a device for the conformance suite: package.module:factory, or package.module:factory+delays"
    parser.addoption("--device", action="append", default=[], metavar="FACTORY", help=f"{what}; may be repeated")
    parser.addini(INI, f"{what}; one a line", type="linelist", default=[])


def specs(config: pytest.Config) -> list[DeviceSpec]:
    """The devices that this run tests."""
    texts: list[str] = config.getoption("--device") or config.getini(INI)
    return [DeviceSpec(text) for text in texts]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scales the time limit of every test; one that ``--timeout`` sets is taken as it is."""
    if PATIENCE == 1 or not config.pluginmanager.hasplugin("timeout") or config.getoption("timeout") is not None:
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        options = dict(marker.kwargs) if marker else {}
        seconds = marker.args[0] if marker and marker.args else options.pop("timeout", config.getini("timeout") or 0)
        item.add_marker(pytest.mark.timeout(float(seconds) * PATIENCE, **options), append=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says why tests were skipped, a line a reason, and what to do if limits ran out."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in reports)
    if reasons:
        terminalreporter.section(f"{len(reports)} skipped, because", sep="-")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")
    reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if any(_ran_out(report) for report in reports):
        terminalreporter.write_line(
            f"A time limit ran out: on a slow or busy machine set {VARIABLE}=4 (it is {PATIENCE:g})."
        )


def _ran_out(report: Any) -> bool:
    """Whether a limit of the test, or of a program that it started, ran out."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = "" if crash is None else str(crash.message)
    return "from pytest-timeout" in message or message.startswith("subprocess.TimeoutExpired")


def _reason(report: Any) -> str:
    place = report.longrepr
    text = str(place[2] if isinstance(place, tuple) else place)
    return " ".join(text.removeprefix("Skipped: ").split())
