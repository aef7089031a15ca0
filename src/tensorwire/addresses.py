"""Network addresses, as people read and type them."""

from __future__ import annotations


def address_text(interface: str, port: int) -> str:
    """Writes the IP address of an interface and a port: ``127.0.0.1:7000``, or ``[::1]:7000``."""
    return f"[{interface}]:{port}" if ":" in interface else f"{interface}:{port}"
