"""Two machines with one cable: network namespaces and a veth pair."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def ip(*arguments: str) -> None:
    """``ip arguments``."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_namespaces(addresses: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """The names of two network namespaces; ``cable`` joins their interfaces at these addresses. Needs root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, to make network namespaces")
    tag = secrets.token_hex(3)
    names = (f"tw-{tag}-0", f"tw-{tag}-1")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def cut_cable(names: tuple[str, str]) -> None:
    """Nothing crosses any more."""
    ip("-n", names[0], "link", "set", "cable", "down")
