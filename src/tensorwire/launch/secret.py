"""The job's secret: made for one machine, read from a file for several."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from tensorwire.control.address import WARN_SECONDS
from tensorwire.errors import ArgumentError, AuthenticationError, WaitTimeout

_log = logging.getLogger("tensorwire")
SECRET_BYTES = 64
HOW_TO = "head -c 32 /dev/urandom | base64 > ~/.tensorwire-secret && chmod 600 ~/.tensorwire-secret"


def new_secret() -> str:
    """A fresh secret, as text."""
    return secrets.token_hex(SECRET_BYTES // 2)


def file_secret(environment: Mapping[str, str]) -> str:
    """The secret in ``TENSORWIRE_SECRET_FILE``, as text whatever its bytes.

    Raises `ArgumentError` with the line that makes one.
    """
    name = environment.get("TENSORWIRE_SECRET_FILE")
    if not name:
        raise ArgumentError(
            "a job on several machines needs a secret they share: make one with\n"
            f"  {HOW_TO}\n"
            "copy it to every machine and set TENSORWIRE_SECRET_FILE=~/.tensorwire-secret"
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
    return hashlib.sha256(secret).hexdigest()


def runtime_folder() -> Path:
    """A folder of this user alone, on this machine."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "tensorwire" if base and Path(base).is_dir() else Path(f"/tmp/tensorwire-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AuthenticationError(f"{folder} must be a folder that only this user can enter")
    return folder


class Handout:
    """The secret, left for the other processes of this user on this machine until ``close()``.

    The file is locked as long as this process lives: if it is unlocked, its job is gone.
    """

    def __init__(self, name: str, secret: str) -> None:
        self.path = runtime_folder() / name
        self.path.unlink(missing_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, secret.encode())

    def close(self) -> None:
        """Removes the file. Idempotent."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def pick_up(name: str, timeout: float) -> bytes:
    """The secret that rank 0 has left under ``name``; waits for it. Raises `WaitTimeout`."""
    path = runtime_folder() / name
    end = time.monotonic() + timeout
    warn_at = time.monotonic() + WARN_SECONDS
    while True:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            secret = file.read()
            if len(secret) == SECRET_BYTES and _locked(file.fileno()):
                return secret
        if time.monotonic() > end:
            raise WaitTimeout(f"rank 0 has not started this job within {timeout:g} s ({path}): is it running?")
        if time.monotonic() >= warn_at:
            _log.warning("rank 0 has not started this job yet (%s): waiting up to %g s for it", path, timeout)
            warn_at = end
        time.sleep(0.02)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False  # what a process that was killed has left behind
