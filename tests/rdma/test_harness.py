"""The harness itself: what a guest says and how it ends reaches the user, and nothing stays behind, whoever ends it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import VARIABLE, patient
from tests.levels import mostly_slow
from tests.rdma import host, kernel
from tests.rdma.__main__ import main
from tests.rdma.errors import Impossible

HANG_SECONDS = patient(200.0)  # only a guard


def command(*words: str) -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.rdma", *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=HANG_SECONDS)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_output_and_status_are_the_commands_and_patience_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3.5")
    done = run("--", "bash", "-c", f"echo this is out; echo this is err >&2; id -u; pwd; echo ${VARIABLE}; exit 7")
    assert done.returncode == 7
    assert done.stdout == f"this is out\n0\n{Path.cwd()}\n3.5\n"
    assert "this is err\n" in done.stderr


@pytest.mark.slow
def test_what_a_guest_writes_stays_in_it_but_in_the_folder_that_is_named(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    done = run("--writable", str(inside), "--", "touch", str(inside / "file"), str(outside))
    assert (done.returncode, list(tmp_path.rglob("*"))) == (0, [inside, inside / "file"])


@pytest.mark.slow
def test_a_guest_that_takes_too_long_ends_with_its_console() -> None:
    done = run("--timeout", "5", "--", "bash", "-c", "echo a last word >/dev/console; sleep 1000")
    assert done.returncode == 124
    assert "the guest rdma did not end within 5 s" in done.stderr
    assert "a last word" in done.stderr


@pytest.mark.slow
def test_a_guest_that_breaks_off_ends_with_its_console() -> None:
    done = run("--", "bash", "-c", "echo c >/proc/sysrq-trigger")
    assert done.returncode == 124
    assert "the guest rdma broke off" in done.stderr
    assert "Kernel Offset" in done.stderr  # the last line of a panic


@pytest.mark.slow
def test_two_guests_reach_each_other_and_both_statuses_count() -> None:
    # perftest's little sister: its client gives up where nobody listens yet.
    ask = "until ibv_rc_pingpong -d rxe0 -g 1 -n 10 10.77.0.1 2>/dev/null; do :; done; exit 3"
    done = run("--two", "--", "ibv_rc_pingpong", "-d", "rxe0", "-g", "1", "-n", "10", "--", "bash", "-c", ask)
    assert done.stdout.count("81920 bytes in") == 2, done.stdout + done.stderr
    assert done.returncode == 3


@pytest.mark.parametrize("number", mostly_slow([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]))
def test_no_guest_outlives_the_harness(number: signal.Signals) -> None:
    with subprocess.Popen(command("--", "bash", "-c", "echo up; sleep 1000"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (machine,) = children(process.pid)
        watched = os.pidfd_open(machine)
        process.send_signal(number)
        assert select.select([watched], [], [], HANG_SECONDS)[0], "the machine lives on"
        os.close(watched)
        assert process.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)


def test_a_broken_cache_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = kernel.image()
    monkeypatch.setenv(kernel.VARIABLE, str(tmp_path))
    entry = tmp_path / real.kernel.parent.name
    built = []

    def build(cache: Path, where: Path, *_: str) -> None:
        built.append(where)
        where.symlink_to(real.kernel.parent)

    monkeypatch.setattr(kernel, "_build", build)
    entry.mkdir()
    (tmp_path / "building-killed").mkdir()
    (entry / "manifest").write_text((real.kernel.parent / "manifest").read_text())
    (entry / "vmlinux").write_bytes(real.kernel.read_bytes()[:-1])
    (entry / "initrd").write_bytes(real.initrd.read_bytes())
    assert kernel.image().kernel == entry / "vmlinux"
    assert built == [entry]
    assert "is broken" in capsys.readouterr().err
    assert kernel.image().kernel == entry / "vmlinux"  # and then it is whole
    assert built == [entry]
    assert sorted(path.name for path in tmp_path.iterdir()) == [entry.name, "lock"]


@pytest.mark.parametrize(("ci", "status", "word"), [("", 0, "SKIPPED"), ("true", 1, "FAILED")])
def test_where_it_cannot_work_it_skips_with_the_reason_but_not_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, status: int, word: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(host.os, "geteuid", lambda: 1000)
    assert main(["--", "true"]) == status
    assert f"{word}: it needs root" in capsys.readouterr().err


def test_a_refusal_of_apt_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Impossible, match="no-such-package-of-tensorwire"):
        host.apt("download", "no-such-package-of-tensorwire")
