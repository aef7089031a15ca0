"""``HOST:PORT``: parsing, resolving and connecting. Machines start in any order, so these functions wait."""

from __future__ import annotations

import errno
import logging
import re
import socket
import time

from tensorwire.errors import ArgumentError, PeerLost

_log = logging.getLogger("tensorwire")
WARN_SECONDS = 5.0  # that people wait without a word
_AGAIN = 0.05  # seconds between two tries
_ASK_AGAIN = 0.5  # between two questions to a name server


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT``. Raises `ArgumentError`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ArgumentError(f"an address must be HOST:PORT, not {address!r}")
    return host, int(port)


def await_name(host: str, patience: float) -> None:
    """Returns when ``host`` has an address, within ``patience`` seconds: in a cluster a process may be there before
    its name is. Raises `ArgumentError` (it cannot be a name) or `PeerLost`."""
    end, warned = time.monotonic() + patience, False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except UnicodeError:
            raise ArgumentError(f"{host!r} is not the name of a machine") from None
        except socket.gaierror as error:
            why = error.strerror
        if time.monotonic() >= end:
            raise PeerLost(f"cannot find the coordinator's machine {host!r}: {why}")
        if not warned:  # people may have mistyped it
            _log.warning(
                "cannot find the coordinator's machine %r yet (%s): waiting up to %g s for it", host, why, patience
            )
            warned = True
        time.sleep(_ASK_AGAIN)


def connect(address: str, patience: float, timeout: float = 60.0) -> socket.socket:
    """A connection to the coordinator at ``address``, which may get its name, and start, within ``patience`` seconds.

    Raises `ArgumentError` or `PeerLost`.
    """
    host, port = split_address(address)
    end = time.monotonic() + patience
    await_name(host, patience)
    warn_at = time.monotonic() + WARN_SECONDS
    while True:
        try:
            sock = socket.create_connection((host, port), timeout)
            if sock.getsockname() != sock.getpeername():  # a port where nobody listens may answer to itself
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            sock.close()
            why = "nobody listens there"
        except OSError as error:
            why = error.strerror or str(error)
            here = host.startswith(("127.", "localhost", "::1"))
            if here and error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL):
                raise PeerLost(f"no process of this machine reaches {host} ({why}): ip link set lo up") from None
        if time.monotonic() >= end:
            raise PeerLost(f"no coordinator answers at {address} ({why}): is the job running there?")
        if time.monotonic() >= warn_at:
            _log.warning("no coordinator answers at %s yet (%s): waiting up to %g s for it", address, why, patience)
            warn_at = end
        time.sleep(_AGAIN)
