"""A benchmark between two machines: who may start a program on the other, which, and what becomes of it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import remote
from benchmarks.actors.perftest import Work, seconds
from benchmarks.verbs import Ends
from tensorwire.bench.programs import Contender, Stage, actor
from tensorwire.errors import ArgumentError, AuthenticationError, PeerLost
from tensorwire.testing.patience import patient

SECRET = b"0123456789abcdef0123456789abcdef"


def secret_file(folder: Path, content: bytes) -> str:
    path = folder / f"secret-{len(list(folder.iterdir()))}"
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def another_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where one listens, for another machine, and the file of its secret."""
    secret = secret_file(tmp_path_factory.mktemp("listening"), SECRET)
    command = [sys.executable, "-m", "benchmarks", "device", "--device", "verbs", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "TENSORWIRE_SECRET_FILE": secret}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            where = line.partition("listening on ")[2].partition(";")[0]
            assert f"--device verbs --connect {where}" in process.stdout.readline()
            yield where, secret
        finally:
            process.terminate()


@pytest.fixture
def listening(another_process: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address; its secret is ours."""
    where, secret = another_process
    monkeypatch.setenv("TENSORWIRE_SECRET_FILE", secret)
    return where


def ended(sock: socket.socket) -> bool:
    """Whether the other side closes the connection, without a word."""
    sock.settimeout(patient(30.0))
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


@pytest.mark.slow
def test_a_target_of_the_other_machine_is_driven_like_one_of_ours(listening: str) -> None:
    target, initiator = Ends(listening).commands("transfer", "tcp", 4096, "one-way")
    assert target[3:6] == ("target", listening, "transfer")
    with Stage(Contender("tensorwire", (target, initiator)), [0]) as stage:
        for _ in range(2):
            there, here = stage.run(1, 5)
            assert here["seconds"] > there["seconds"] == 0
            assert here["registrations"] == there["registrations"] == 0


@pytest.mark.slow
def test_its_program_ends_with_the_connection(listening: str) -> None:
    with remote.call(listening, ["transfer", "tcp", "64", "one-way"]) as sock:
        assert len(sock.recv(65536).split()) == 2  # address and region: it runs
        sock.shutdown(socket.SHUT_WR)  # the program's input ends
        assert ended(sock)


def test_other_programs_are_not_started(listening: str) -> None:
    requests: list[Any] = [["os"], ["fault", "tcp"], ["transfer", 7], {"transfer": 1}, "x" * 4000, 3]
    for request in requests:
        with contextlib.suppress(ConnectionError), remote.call(listening, request) as sock:
            assert ended(sock), request


def test_another_secret_starts_nothing(listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_SECRET_FILE", secret_file(tmp_path, SECRET[::-1]))
    with pytest.raises(AuthenticationError):
        remote.call(listening, ["transfer", "tcp", "64", "one-way"])
    monkeypatch.delenv("TENSORWIRE_SECRET_FILE")
    with pytest.raises(ArgumentError, match="secret they share"):
        remote.call(listening, ["transfer", "tcp", "64", "one-way"])


def test_what_is_no_address() -> None:
    for where in ("7000", "host", "host:", ":7000", "host:70000", "host:x"):
        with pytest.raises(ArgumentError, match="HOST:PORT"):
            remote.parse(where)
    assert remote.parse("[::1]:7000") == ("::1", 7000)
    assert remote.local_interface("127.0.0.1") == "127.0.0.1"


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_SECRET_FILE", secret_file(tmp_path, SECRET))
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(PeerLost, match="--listen"):
        remote.call(where, ["transfer"])


def test_on_one_machine_both_ends_are_here() -> None:
    target, _ = Ends().commands("transfer", "verbs", 64, "ping-pong")
    assert target == (*actor("transfer"), "target", "verbs", "64", "ping-pong", "127.0.0.1")


BANDWIDTH = """
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    10               160.51             150.00               0.000150
---------------------------------------------------------------------------------------
"""
LATENCY = """
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 64      100          20.00          90.00        25.00              26.13            3.00
"""


def test_perftests_figures_are_read() -> None:
    work = Work("ib_write_bw", 1 << 20, 8 << 20)
    assert seconds(work, BANDWIDTH) == pytest.approx(8 / 150)
    assert seconds(Work("ib_write_lat", 64, 64), LATENCY) == pytest.approx(50e-6)


def test_a_round_in_which_perftest_measured_nothing_is_said() -> None:
    with pytest.raises(SystemExit, match=r"ib_write_bw: it reports a rate of 0\.00"):
        seconds(Work("ib_write_bw", 1 << 20, 8 << 20), BANDWIDTH.replace("150.00", "0.00"))
