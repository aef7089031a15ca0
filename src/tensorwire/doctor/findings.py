"""Findings of the doctor, in sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["fine", "note", "stops"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``note``: worth knowing. ``stops``: a job cannot run.

    ``advice`` says what to do about it.
    ``number`` is the value for programs: bytes, or Mbit/s of an interface; None where it is not a number, or unlimited.
    """

    name: str
    value: str
    level: Level = "fine"
    advice: str = ""
    number: int | None = None


@dataclass(frozen=True)
class Section:
    """Findings about one thing."""

    title: str
    findings: tuple[Finding, ...]
