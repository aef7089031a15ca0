"""What this machine needs to boot guests: root, a processor, apt, and a few packages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from tests.rdma.errors import Impossible, say

# A program, and the package it comes in. The guest sees this machine's files, so what runs there is installed here.
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "rdma": "iproute2",
    "setpriv": "util-linux",
    "zstd": "zstd",
    "ibv_rc_pingpong": "ibverbs-utils",
    "ib_write_bw": "perftest",
}
RXE_DRIVER = Path("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so")  # of ibverbs-providers
APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "DPkg::Lock::Timeout=120")


def ready() -> None:
    """Installs what is missing. Raises `Impossible`, with the reason, where no guest can be booted."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Impossible(f"guests need Linux on x86_64, this is {platform.system()} on {platform.machine()}")
    if os.geteuid() != 0:
        raise Impossible("it needs root, to install packages and to show the guest this machine's files")
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Impossible("it needs apt, of Debian 12 or Ubuntu")
    if missing := _missing():
        say(f"installing {' '.join(missing)}")
        apt("update")
        apt("install", "-y", "--no-install-recommends", *missing)
        if still := _missing():
            raise Impossible(f"apt did not install {' '.join(still)}")


def apt(*arguments: str, folder: Path | None = None) -> None:
    """Runs apt-get. Raises `Impossible` with what it said."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run([*APT, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Impossible(f"apt-get {' '.join(arguments)} failed: {done.stderr.strip()[-400:]}")


def _missing() -> list[str]:
    found = [package for program, package in PROGRAMS.items() if shutil.which(program, path=_path()) is None]
    drivers = list(RXE_DRIVER.parent.glob("librxe-rdmav*.so"))
    return found + ([] if drivers else ["ibverbs-providers"])


def _path() -> str:
    """Where programs of administrators lie, even if the user's own path leaves it out."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
