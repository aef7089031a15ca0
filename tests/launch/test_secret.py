"""The job's secret: in a file for several machines, handed out for one."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from tensorwire.errors import ArgumentError, AuthenticationError, WaitTimeout
from tensorwire.launch import secret
from tests.harness.sandbox import Sandbox, every


def file(tmp_path: Path, content: bytes, mode: int = 0o600) -> dict[str, str]:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return {"TENSORWIRE_SECRET_FILE": str(path)}


def test_a_file_of_any_bytes_is_a_secret(tmp_path: Path) -> None:
    first = secret.file_secret(file(tmp_path, b"\xff\x00\xfe" * 20))
    assert len(first) == 64
    assert first.isascii()
    assert secret.file_secret(file(tmp_path, b"0123456789abcdef\n")) == secret.file_secret(
        file(tmp_path, b"0123456789abcdef")
    )
    assert first != secret.file_secret(file(tmp_path, b"\xff\x00\xfe" * 19 + b"\xff\x00\xfd"))


def test_without_a_file_the_refusal_has_the_line_that_makes_one() -> None:
    with pytest.raises(ArgumentError) as caught:
        secret.file_secret({})
    assert secret.HOW_TO in str(caught.value)


def test_that_line_makes_one(tmp_path: Path) -> None:
    os.system(f"HOME={tmp_path}; cd {tmp_path}; {secret.HOW_TO.replace('~', str(tmp_path))}")
    assert len(secret.file_secret({"TENSORWIRE_SECRET_FILE": str(tmp_path / ".tensorwire-secret")})) == 64


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"0123456789abcdef", 0o644, "others can read .*: chmod 600 it"),
        (b"0123456789abcdef", 0o620, "others can read"),
        (b"short", 0o600, "holds 5 bytes; at least 16"),
        (b"", 0o600, "holds 0 bytes"),
    ],
)
def test_a_file_that_is_no_secret(tmp_path: Path, content: bytes, mode: int, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        secret.file_secret(file(tmp_path, content, mode))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ArgumentError, match=r"TENSORWIRE_SECRET_FILE: .*: (No such file|Is a directory)"):
            secret.file_secret({"TENSORWIRE_SECRET_FILE": str(path)})


@pytest.fixture
def runtime(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's jobs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sandbox.runtime))
    return sandbox.runtime / "tensorwire"


def test_the_other_ranks_may_come_first(runtime: Path) -> None:
    made = secret.new_secret()
    handouts: list[secret.Handout] = []

    def hand_out() -> None:
        handouts.append(secret.Handout("job", made))

    found, _ = every([partial(secret.pick_up, "job", 30.0), hand_out])
    assert found == made.encode()
    assert (runtime / "job").stat().st_mode & 0o777 == 0o600
    assert runtime.stat().st_mode & 0o777 == 0o700
    handouts[0].close()
    handouts[0].close()
    assert list(runtime.iterdir()) == []


def test_what_a_killed_job_has_left_is_not_believed(runtime: Path, sandbox: Sandbox) -> None:
    code = "from tensorwire.launch.secret import *; import os; Handout('job', new_secret()); os._exit(0)"
    sandbox.start(sys.executable, "-c", code).finish()
    assert len((runtime / "job").read_bytes()) == 64
    with pytest.raises(WaitTimeout, match=r"rank 0 has not started this job within 0\.1 s"):
        secret.pick_up("job", 0.1)
    made = secret.new_secret()
    handout = secret.Handout("job", made)
    assert secret.pick_up("job", 0.0) == made.encode()
    handout.close()


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_a_runtime_folder_that_others_control_is_refused(runtime: Path, tmp_path: Path, what: str) -> None:
    if what == "open to others":
        runtime.mkdir(mode=0o700)
        runtime.chmod(0o770)
    elif what == "a link":
        runtime.symlink_to(tmp_path)
    else:
        runtime.write_text("")
    with pytest.raises(AuthenticationError, match="must be a folder that only this user can enter"):
        secret.runtime_folder()


def test_a_rank_that_waits_for_rank_0_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(secret, "WARN_SECONDS", 0.0)
    with pytest.raises(WaitTimeout):
        secret.pick_up("job", 0.1)
    (message,) = caplog.messages
    assert message.startswith("rank 0 has not started this job yet (")
