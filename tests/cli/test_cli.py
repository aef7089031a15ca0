"""The command line itself: help that teaches, and one line for every mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tensorwire
from tensorwire.cli import main
from tests.harness.sandbox import Result, Sandbox, nothing_kept


def tensorwire_(sandbox: Sandbox, *arguments: str) -> Result:
    return sandbox.launch(*arguments).finish()


def test_help_teaches(sandbox: Sandbox) -> None:
    top = tensorwire_(sandbox, "--help")
    run = tensorwire_(sandbox, "run", "--help")
    assert (top.status, run.status) == (0, 0)
    assert "tensorwire run --workers 2 --servers 1 -- python train.py" in top.out
    for part in (
        "tensorwire run --workers 2 --servers 1 -- python train.py",
        "export TENSORWIRE_SECRET_FILE=~/.tensorwire-secret",
        "--rendezvous HOST:PORT --nodes 2 --node 0",
        "TENSORWIRE_FAILURE_TIMEOUT",
        "exit status",
    ):
        assert part in run.out
    assert max(len(line) for line in (top.out + run.out).splitlines()) <= 120


def test_without_arguments_there_is_help(sandbox: Sandbox) -> None:
    result = tensorwire_(sandbox)
    assert result.status == 2
    assert "Start here" in result.err + result.out


def test_version(sandbox: Sandbox) -> None:
    assert tensorwire.__version__ in tensorwire_(sandbox, "--version").out


SECOND_NODE = ("--nodes", "2", "--node", "1", "--rendezvous", "h:1")
MISTAKES = [
    (["fly"], "No such command 'fly'"),
    (["--fly"], "No such option '--fly'"),
    (["run"], "Missing argument 'COMMAND...': see tensorwire run --help"),
    (["run", "--fly", "--", "true"], "No such option '--fly': see tensorwire run --help"),
    (["run", "--workers", "0", "--", "true"], "'--workers': 0 is not in the range 1<=x<=512"),
    (["run", "--workers", "9" * 20, "--", "true"], f"'--workers': {'9' * 20} is not in the range 1<=x<=512"),
    (["run", "--workers", "many", "--", "true"], "'--workers': 'many' is not a valid integer"),
    (["run", "--workers"], "'--workers' requires an argument"),
    (["run", "--servers", "-1", "--", "true"], "'--servers': -1 is not in the range 0<=x<=512"),
    (["run", "--servers", "513", "--", "true"], "'--servers': 513 is not in the range 0<=x<=512"),
    (["run", "--device", "fax", "--", "true"], "'--device': device must be one of auto, shm, tcp, verbs, not 'fax'"),
    (["run", "--nodes", "0", "--", "true"], "'--nodes': 0 is not in the range 1<=x<=4096"),
    (["run", "--nodes", "4097", "--", "true"], "'--nodes': 4097 is not in the range 1<=x<=4096"),
    (["run", "--nodes", "4096", "--workers", "512", "--", "true"], "the workers of all nodes: at most 65536, not "),
    (["run", "--nodes", "4096", "--servers", "17", "--", "true"], "the servers of all nodes: at most 65536, not 69632"),
    (["run", "--node", "-1", "--", "true"], "'--node': -1 is not in the range 0<=x<=4095"),
    (["run", "--node", "1", "--", "true"], "--node 1 is not one of 1 nodes (0 to 0)"),
    (["run", "--nodes", "2", "--", "true"], "several nodes need --rendezvous HOST:PORT"),
    (["run", "--nodes", "2", "--rendezvous", "h:0", "--", "true"], "needs a port that the other nodes know, not 0"),
    (["run", "--rendezvous", "127.0.0.1:²³", "--", "true"], "an address must be HOST:PORT, not '127.0.0.1:²³'"),
    (["run", "--rendezvous", "h:" + "1" * 5000, "--", "true"], "an address must be HOST:PORT, not 'h:1111"),
    (["run", "--rendezvous", "here", "--", "true"], "an address must be HOST:PORT, not 'here'"),
    (["run", "--rendezvous", "10.255.255.1:4000", "--", "true"], "cannot listen on 10.255.255.1:4000"),
    (["run", "--rendezvous", "no.such.host.invalid:4000", "--", "true"], "cannot listen on no.such.host.invalid"),
    (["run", "--", "no-such-command"], "there is no command 'no-such-command'"),
    (["run", "--metrics", "here", "--", "true"], "--metrics takes PORT or HOST:PORT, not 'here'"),
    (["run", "--metrics", "99999", "--", "true"], "--metrics takes PORT or HOST:PORT, not '127.0.0.1:99999'"),
    (["run", "--metrics", "1", *SECOND_NODE, "--", "true"], "--metrics belongs to node 0"),
    (["run", "--trace", "/no/such/place/t.json", "--", "true"], "t.json: there is no folder /no/such/place"),
    (["run", "--trace", "/", "--", "true"], "--trace /: it is a folder"),
    (["doctor", "--between", "1"], "requires 2 arguments"),
    (["doctor", "--between", "7", "7"], "needs two processes"),
    (["doctor", "--between", "1", "99999999"], "process"),
    (["doctor", "--between", "0", "1"], "not in the range"),
    (["doctor", "--peer", "here"], "an address must be HOST:PORT, not 'here'"),
]


def complaint(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    command: Callable[[], None] = main,
) -> str:
    """The answer to a mistake, one line. Nothing was started, so this process may stand for the command's."""
    monkeypatch.setattr(sys, "argv", ["tensorwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        command()
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert captured.err.startswith("tensorwire: ")
    return captured.err


@pytest.mark.parametrize(("arguments", "why"), MISTAKES, ids=lambda a: " ".join(a) if isinstance(a, list) else "")
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    with nothing_kept():
        assert why in complaint(capsys, monkeypatch, *arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TENSORWIRE_FAILURE_TIMEOUT", "x"),
        ("TENSORWIRE_FAILURE_TIMEOUT", "0"),
        ("TENSORWIRE_GRACE", "-1"),
        ("TENSORWIRE_SERVER_THREADS", "x"),
        ("TENSORWIRE_SERVER_THREADS", "1000000000"),
        ("TENSORWIRE_TIMEOUT", "0"),
    ],
)
def test_a_wrong_setting_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert name in complaint(capsys, monkeypatch, "run", "--", "true")


def test_a_file_that_is_no_program(sandbox: Sandbox) -> None:
    path = sandbox.folder / "no-program"
    path.write_bytes(b"\x7fELF of no kind")
    path.chmod(0o700)
    result = tensorwire_(sandbox, "run", "--workers", "2", "--", str(path))
    assert result.one_line() == f"tensorwire: cannot start {str(path)!r}: Exec format error"
    assert result.status == 2
    sandbox.nothing_left()


def test_the_installed_command(sandbox: Sandbox) -> None:
    command = Path(sys.executable).parent / "tensorwire"
    result = sandbox.start(str(command), "run", "--", "sh", "-c", "exit 7").finish()
    assert result.one_line() == "tensorwire: worker 0 exited with status 7"
    assert result.status == 7


def test_options_after_the_command_belong_to_it(sandbox: Sandbox) -> None:
    result = tensorwire_(sandbox, "run", sys.executable, "-c", "import sys; sys.exit(sys.argv[1])", "--workers")
    assert result.err.splitlines() == ["--workers", "tensorwire: worker 0 exited with status 1"]


def test_help_into_a_closed_pipe_is_quiet(sandbox: Sandbox) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tensorwire.cli", "run", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=sandbox.environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
