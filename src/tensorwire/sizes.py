"""Numbers of bytes and of other things: formatting and rounding up."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_NAMES = 4


def size_text(nbytes: float) -> str:
    """Writes a number of bytes for people: three digits and a unit, such as ``512 B``, ``1.61 MiB`` or ``22 KiB``."""
    size, unit = float(nbytes), 0
    while round(size) >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    text = f"{size:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {UNITS[unit]}"


def round_up(number: int, multiple: int) -> int:
    """Returns the least multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple


def counted(number: int, what: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def listed(names: Sequence[str]) -> str:
    """The first four of them, and how many more there are; '' for none."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
