"""A benchmark between two machines: the other one starts its programs for us, and their lines go over a socket.

A connecting process must show that it holds the secret of both (``TENSORWIRE_SECRET_FILE``), and may start the programs
of this benchmark, nothing else. No payload goes this way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from benchmarks import ACTORS
from tensorwire.addresses import address_text
from tensorwire.bench.programs import actor
from tensorwire.control.address import split_address
from tensorwire.device import handshake
from tensorwire.errors import ArgumentError, AuthenticationError, PeerLost, ProtocolError
from tensorwire.launch.secret import file_secret

PURPOSE = b"bench"
OURS_THERE = {"transfer": "tensorwire.bench.actors", "perftest": ACTORS}  # programs that may run there, by package
_GREETING_SECONDS = 10.0
_MOST_REQUEST = 1024


def parse(where: str) -> tuple[str, int]:
    """``HOST:PORT``. Raises `ArgumentError`."""
    try:
        return split_address(where)
    except ArgumentError:
        raise ArgumentError(f"{where!r} is not HOST:PORT, such as 10.0.0.1:7000") from None


def local_interface(peer: str) -> str:
    """The address of this machine on the way to that one. Raises `ArgumentError`."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # sends nothing
        except OSError as error:
            raise ArgumentError(f"cannot connect to {peer}: {error.strerror or error}") from None
        return str(probe.getsockname()[0])


def call(where: str, request: list[str]) -> socket.socket:
    """A connection to the program that the other machine has started. Raises `PeerLost` or `AuthenticationError`."""
    host, port = parse(where)
    secret = file_secret(os.environ).encode()
    try:
        sock = socket.create_connection((host, port), _GREETING_SECONDS)
    except OSError as error:
        raise PeerLost(f"nobody listens on {where} ({error.strerror or error}): start it with --listen there") from None
    try:
        handshake.initiate(sock, secret, PURPOSE)
        sock.settimeout(None)
        sock.sendall(json.dumps(request).encode() + b"\n")
    except BaseException:
        sock.close()
        raise
    return sock


def listen(where: str) -> None:
    """Serves until it is interrupted. Raises `ArgumentError` for an address that cannot be listened on."""
    host, port = parse(where)
    secret = file_secret(os.environ).encode()
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ArgumentError(f"cannot listen on {where}: {error.strerror or error}") from None
    with listener:
        address = address_text(host, listener.getsockname()[1])
        print(f"listening on {address}; on the other machine, with the same secret:")
        print(f"  python -m benchmarks device --device verbs --connect {address}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=_serve, args=(sock, host, secret), daemon=True).start()


def _serve(sock: socket.socket, interface: str, secret: bytes) -> None:
    with sock:
        try:
            sock.settimeout(_GREETING_SECONDS)
            if handshake.accept(sock, secret) != PURPOSE:
                return
            command = _command(_line(sock), interface)
            sock.settimeout(None)
        except (AuthenticationError, PeerLost, ProtocolError, OSError) as error:
            print(f"refused a connection: {error}", file=sys.stderr, flush=True)
            return
        with _started(command) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            threading.Thread(target=pump, args=(program.stdout.fileno(), sock.fileno(), sock), daemon=True).start()
            pump(sock.fileno(), program.stdin.fileno())


def _line(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > _MOST_REQUEST:
            raise ProtocolError("an oversized request")
        data += handshake.receive_exactly(sock, 1)
    return data


def _command(line: bytes, interface: str) -> list[str]:
    try:
        name, *arguments = json.loads(line)
    except ValueError:
        raise ProtocolError("a malformed request") from None
    if name not in OURS_THERE or not all(isinstance(each, str) for each in arguments):
        raise ProtocolError(f"there is no program {name!r}")
    return [*actor(name, OURS_THERE[name]), "target", *arguments, interface]


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A session of its own: it goes with all that it has started."""
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        for pipe in (program.stdin, program.stdout):
            if pipe is not None:
                pipe.close()


def pump(source: int, target: int, hang_up: socket.socket | None = None) -> None:
    """Copies bytes until either end closes; then hangs up."""
    with contextlib.suppress(OSError):
        while data := os.read(source, 65536):
            while data:
                data = data[os.write(target, data) :]
    if hang_up is not None:
        with contextlib.suppress(OSError):
            hang_up.shutdown(socket.SHUT_RDWR)
