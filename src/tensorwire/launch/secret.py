"""The job's secret: made for one host, read from a file for several."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from tensorwire.errors import ArgumentError, AuthenticationError

HOW_TO = "head -c 32 /dev/urandom | base64 > ~/.tensorwire-secret && chmod 600 ~/.tensorwire-secret"


def new_secret() -> str:
    """A fresh secret, as text."""
    return secrets.token_hex(32)


def file_secret(environment: Mapping[str, str]) -> bytes:
    """The secret in ``TENSORWIRE_SECRET_FILE``. Raises `ArgumentError` with the line that makes one."""
    name = environment.get("TENSORWIRE_SECRET_FILE")
    if not name:
        raise ArgumentError(
            "a job on several hosts needs a secret they share: make one with\n"
            f"  {HOW_TO}\n"
            "copy it to every host and set TENSORWIRE_SECRET_FILE=~/.tensorwire-secret"
        )
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ArgumentError(f"TENSORWIRE_SECRET_FILE: {path}: {error.strerror}; make one with\n  {HOW_TO}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ArgumentError(f"TENSORWIRE_SECRET_FILE: others can read {path}: chmod 600 it")
    if len(secret) < 16:
        raise ArgumentError(f"TENSORWIRE_SECRET_FILE: {path} holds {len(secret)} bytes; at least 16 are needed")
    return secret


def runtime_folder() -> Path:
    """A folder of this user alone, on this machine."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "tensorwire" if base and Path(base).is_dir() else Path(f"/tmp/tensorwire-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AuthenticationError(f"{folder} must be a folder that only this user can enter")
    return folder


def hand_out(name: str, secret: str) -> Path:
    """Leaves the secret for the other processes of this user on this host; returns the file to remove later."""
    path = runtime_folder() / name
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    return path


def pick_up(name: str, timeout: float) -> bytes:
    """The secret that rank 0 left under ``name``; waits for it."""
    path = runtime_folder() / name
    end = time.monotonic() + timeout
    while True:
        with contextlib.suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == 64:
                return secret
        if time.monotonic() > end:
            raise ArgumentError(f"rank 0 did not leave this job's secret in {path} within {timeout:g} s: is it running?")
        time.sleep(0.02)
