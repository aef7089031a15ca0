"""The coordinator's address: taken apart, and waited for where neither its name nor its process is there yet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from tensorwire.control import Client, address
from tensorwire.control.address import await_name, connect, split_address
from tensorwire.errors import ArgumentError, PeerLost
from tests.control.conftest import SECRET, Jobs

NAME = "train-0.train"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name server that knows `NAME`, for this machine, once it was asked three times; what it was asked for."""
    asked: list[str] = []
    known: Callable[..., Any] = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **options: Any) -> Any:
        asked.append(host)
        if host == NAME and len(asked) > 3:
            host = "127.0.0.1"
        return known(host if host != NAME else "no.such.host.invalid", *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(address, "_ASK_AGAIN", 0.0)
    return asked


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:65536", "host:-1", "[]:1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ArgumentError, match="an address must be HOST:PORT, not"):
        split_address(text)


def test_addresses() -> None:
    assert (split_address("host:1"), split_address("[::1]:2")) == (("host", 1), ("::1", 2))


def test_a_name_that_is_not_known_yet_is_waited_for(
    jobs: Jobs, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    _, port = split_address(jobs.coordinator().address)
    client = Client(f"{NAME}:{port}", SECRET, "worker", 0, patience=600.0)
    client.close()
    assert len(names) > 3
    (told,) = (record.getMessage() for record in caplog.records)  # once
    assert told.startswith(f"cannot find the coordinator's machine {NAME!r} yet (")
    assert told.endswith("waiting up to 600 s for it")


def test_without_patience_the_error_says_the_name(names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    for wait in (lambda: connect(f"{NAME}:1", 0.0), lambda: await_name(NAME, 0.0)):
        with pytest.raises(PeerLost, match=f"cannot find the coordinator's machine {NAME!r}: "):
            wait()
    assert (names, caplog.records) == ([NAME, NAME], [])


def test_what_cannot_be_a_name_is_not_waited_for() -> None:
    with pytest.raises(ArgumentError, match=r"'a\.\.b' is not the name of a machine"):
        connect("a..b:1", 600.0)


def test_who_waits_for_a_coordinator_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "WARN_SECONDS", 0.0)
    with pytest.raises(PeerLost, match="no coordinator answers"):
        address.connect("127.0.0.1:1", 0.2)
    assert caplog.messages == [
        "no coordinator answers at 127.0.0.1:1 yet (Connection refused): waiting up to 0.2 s for it"
    ]
