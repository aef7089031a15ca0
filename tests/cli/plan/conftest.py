"""Fixtures of the tests of ``tensorwire plan``."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from tensorwire.cli import main


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``plan(*arguments)``: exit status, output, complaint."""

    monkeypatch.setattr(
        logging.root.manager, "disable", logging.CRITICAL
    )  # torch writes a line for everything it traces

    monkeypatch.setattr("tensorwire.progress.PATIENCE", 1e9)  # no line of progress, however slow this machine is

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tensorwire", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run
