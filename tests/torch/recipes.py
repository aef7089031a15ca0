"""The recipes of docs/from-ddp.md, for tests to run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-ddp.md"


def recipe(heading: str) -> str:
    """The first program under ``heading``."""
    (section,) = [s for s in re.split(r"^#+ ", PAGE.read_text(), flags=re.M) if s.startswith(heading + "\n")]
    program: str = re.findall(r"^```py\n(.*?)^```", section, re.M | re.S)[0]
    return program
