"""Names of parameters as names of files, and back: a key may contain what a file's name may not."""

from __future__ import annotations

from urllib.parse import quote, unquote

_NOT_ALONE = (".", "..", "")
_KEPT = "".join(chr(code) for code in range(32, 127) if chr(code) not in "%/")


def file_name(name: str) -> str:
    """The name of a parameter's file: ``/``, ``%`` and characters that are not printable are written as ``%XX``."""
    if name in _NOT_ALONE:
        return "".join(f"%{byte:02X}" for byte in name.encode()) or "%"
    return "".join(c if c in _KEPT or (ord(c) > 127 and c.isprintable()) else quote(c, safe="") for c in name)


def parameter_name(name: str) -> str:
    """What `file_name` made that name of."""
    return "" if name == "%" else unquote(name)
