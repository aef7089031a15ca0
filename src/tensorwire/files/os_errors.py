"""Tensorwire's errors as those that programs expect of files."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from tensorwire.errors import (
    ArgumentError,
    AuthenticationError,
    DeviceError,
    JobEnded,
    OutOfMemory,
    TensorwireError,
    Unsupported,
    VersionExpired,
    WaitTimeout,
)

# The first that fits counts.
_NUMBERS: tuple[tuple[type[TensorwireError], int], ...] = (
    (VersionExpired, errno.ESTALE),
    (WaitTimeout, errno.ETIMEDOUT),
    (JobEnded, errno.ENODEV),
    (AuthenticationError, errno.EACCES),
    (DeviceError, errno.ENODEV),  # the publisher, or its store, is gone
    (OutOfMemory, errno.ENOMEM),
    (ArgumentError, errno.EINVAL),
    (Unsupported, errno.ENOTSUP),
    (TensorwireError, errno.EIO),
)


@contextlib.contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """Inside it an error of Tensorwire becomes an `OSError` about ``path``, with the same message."""
    try:
        yield
    except TensorwireError as error:
        number = next(number for kind, number in _NUMBERS if isinstance(error, kind))
        raise OSError(number, str(error), path) from error
