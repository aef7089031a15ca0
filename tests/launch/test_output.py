"""What processes print comes out line by line, with their names, and never keeps a job from ending."""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

import pytest

from tensorwire.launch import output
from tensorwire.launch.output_lines import OutputLines
from tests.harness.sandbox import HANG_SECONDS, NAMES, WAITS, Sandbox, nothing_kept, run_command


def stream() -> OutputLines:
    return OutputLines(b"w | ")


@pytest.mark.parametrize(
    ("pieces", "shown", "rest"),
    [
        ([b"one\ntwo\n"], b"w | one\nw | two\n", b""),
        ([b"on", b"e\n\ntw", b"o"], b"w | one\nw | \n", b"two"),
        ([b"\r 10%", b"\r 20%\r 30%", b"\r100%\nnext\n"], b"w | 100%\nw | next\n", b""),
        ([b"10%\r", b"20%\r"], b"", b"\r20%\r"),
        ([b"10%\r", b"20%\r", b"done\r\n"], b"w | done\n", b""),
        ([b"dos\r", b"\nlines\r\n"], b"w | dos\nw | lines\n", b""),
        ([b"\r\n"], b"w | \n", b""),
    ],
)
def test_lines_come_whole(pieces: list[bytes], shown: bytes, rest: bytes) -> None:
    one = stream()
    assert b"".join(map(one.take, pieces)) == shown
    assert one.rest == rest


def test_an_endless_line_is_cut_and_memory_bounded() -> None:
    one = stream()
    shown = b"".join(one.take(b"x" * output.READ_BYTES) for _ in range(40)) + one.flush()
    lines = shown.splitlines()
    assert {line[:4] for line in lines} == {b"w | "}
    assert sum(len(line) - 4 for line in lines) == 40 * output.READ_BYTES
    assert 1 < len(lines) <= 4


def test_a_progress_bar_becomes_a_line_now_and_then_and_none_twice() -> None:
    one = stream()
    assert one.progress(0.0) == b""
    assert one.take(b"\r1%") == b""
    assert one.progress(1.0) == b""
    assert one.progress(10.0) == b""
    assert one.progress(11.0) == b"w | 1%\n"
    assert one.progress(30.0) == b""
    one.take(b"\r2%")
    assert (one.progress(31.0), one.progress(41.0), one.flush()) == (b"", b"w | 2%\n", b"")
    one.take(b"a prompt: ")
    assert (one.progress(1e9), one.flush()) == (b"", b"w | a prompt: \n")


def test_both_streams_keep_their_place(sandbox: Sandbox) -> None:
    body = "job.barrier()\nos.write(2, f'wrong {job.rank}\\n'.encode()); os.write(1, b'no end')"
    program = sandbox.run(sandbox.script(body), "--servers", "0")
    result = program.finish()
    assert result.status == 0
    said = sorted(line for line in result.raw.splitlines() if "pid" not in line)
    assert said == ["worker 0 | no end", "worker 1 | no end"]
    assert sorted(program._errors.read_text().splitlines()) == ["worker 0 | wrong 0", "worker 1 | wrong 1"]


def test_lines_of_several_processes_do_not_mix(sandbox: Sandbox) -> None:
    """Each line is written in pieces, as fast as both can."""
    body = """
        job.barrier()
        for i in range(2000):
            for piece in ("begin ", str(job.rank), f" line {i} ", "end", "\\n"):
                os.write(1, piece.encode())
    """
    result = sandbox.run(sandbox.script(body), "--servers", "0").finish()
    assert result.status == 0
    lines = [line for line in result.raw.splitlines() if "pid-" not in line]
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"worker {rank} | ")]
        assert mine == [f"worker {rank} | begin {rank} line {i} end" for i in range(2000)]
    assert len(lines) == 4000


def test_what_a_killed_worker_had_printed_is_kept(sandbox: Sandbox) -> None:
    """Through Python's own buffers, too."""
    body = """
        for i in range(3000):
            sys.stdout.write(f"line {i}\\n")
        job.barrier()  # both have printed
        if job.rank: os.kill(os.getpid(), signal.SIGKILL)
        job.barrier()
    """
    result = sandbox.run(sandbox.script(body)).finish()
    assert (result.status, result.one_line()) == (137, "tensorwire: worker 1 was killed by SIGKILL")
    assert [result.raw.count(f"worker {rank} | line ") for rank in (0, 1)] == [3000, 3000]


def test_without_names_processes_keep_our_streams(sandbox: Sandbox) -> None:
    program = sandbox.run(
        sandbox.script("print('hello', os.readlink('/proc/self/fd/2'))"), "--no-prefix", "--servers", "0", workers=1
    )
    result = program.finish()
    assert result.raw.splitlines()[-1] == f"hello {program._errors}"


def test_a_reader_that_has_gone_is_gone_for_the_workers(sandbox: Sandbox) -> None:
    """``tensorwire run ... | head``: as without us, whoever prints on is told."""
    body = "job.barrier()\nwhile True: os.write(1, b'more\\n')"
    run = shlex.join(run_command(sandbox.script(body), "--servers", "0"))
    result = sandbox.start("bash", "-c", f"set -o pipefail; {run} | head -1").finish()
    assert result.status == 1
    assert "raised BrokenPipeError" in result.err.splitlines()[0]
    sandbox.nothing_left()


def test_closed_streams_are_no_sockets(sandbox: Sandbox) -> None:
    script = sandbox.script("job.barrier(); print('nobody reads this'); os.write(2, b'nor this')")
    run = shlex.join(run_command(script, "--servers", "0"))
    result = sandbox.start("bash", "-c", f"{run} >&- 2>&-").finish()
    assert (result.status, result.raw, result.err) == (0, "", "")


def test_a_process_that_lives_on_does_not_hold_the_end(sandbox: Sandbox) -> None:
    """A daemon that a worker started has its streams, and leaves the worker's process group."""
    body = """
        import subprocess
        if job.rank == 0:
            print("daemon", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        job.barrier()
    """
    program = sandbox.run(sandbox.script(body))
    daemon = program.number("daemon")
    assert program.process.wait(HANG_SECONDS) == 0
    os.kill(daemon, signal.SIGKILL)


def test_an_interrupt_does_not_wait_for_a_reader(sandbox: Sandbox) -> None:
    """Our output is a pipe that is full, and nobody reads it."""
    body = f"job.barrier(); print('ready', job.rank)\nif job.rank: os.write(1, bytes(1 << 22))\n{WAITS}"
    program = sandbox.run(sandbox.script(body))
    program.expect("ready 0", "ready 1")
    program.signal(signal.SIGINT)
    assert program.process.wait(HANG_SECONDS) == 130
    sandbox.nothing_left()


def on_a_terminal(
    sandbox: Sandbox, *argv: str, act: Callable[[str, int], None] | None = None, **environment: str
) -> str:
    """Runs a program on a terminal of 100 columns; what it shows. ``act`` sees what is there so far."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {**sandbox.environment, "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(argv, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    shown = b""
    end = time.monotonic() + HANG_SECONDS
    try:
        while True:
            if not select.select([master], [], [], max(0.0, end - time.monotonic()))[0] or time.monotonic() > end:
                raise AssertionError(f"it did not end; the last that it showed: {shown[-4000:].decode()}")
            try:
                shown += os.read(master, 1 << 16)
            except OSError:  # how a terminal tells that nobody has it any more
                break
            if act is not None:
                act(shown.decode("utf-8", "replace"), process.pid)
        return f"{shown.decode()}\nstatus {process.wait(HANG_SECONDS)}"
    finally:
        os.close(master)
        process.kill()
        process.wait()


def test_a_terminal_shows_lines_above_a_table_and_the_table_stays(sandbox: Sandbox) -> None:
    flag = sandbox.folder / "flag"
    body = f"""
        from pathlib import Path
        from tensorwire.observe import spans
        for step in range(2, 9):
            spans.add("compute", step, 4.0 * step, 4.0 * step + 3)
            spans.add("wait", step, 4.0 * step + 3, 4.0 * step + 4)
        os.write(1, b"loading 7 of 9")
        while not Path({str(flag)!r}).exists(): time.sleep(0.02)
        os.write(1, b" done\\n")
    """

    def let_go(shown: str, pid: int) -> None:
        if "75%" in shown and "loading 7 of 9" in shown:
            flag.touch()

    shown = on_a_terminal(sandbox, *run_command(sandbox.script(body)), act=let_go)
    assert shown.endswith("status 0")
    for part in ("steps/s", "compute", "25%", "server 0", "\x1b[36mworker 0 |\x1b[0m ", "loading 7 of 9 done"):
        assert part in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is there again
    last = shown[shown.rindex("steps/s") :]
    assert [last.count(name) for name in ("worker 0", "worker 1", "server 0")] == [1, 1, 1]
    sandbox.nothing_left()


def test_ctrl_c_on_a_terminal_leaves_table_and_message(sandbox: Sandbox) -> None:
    sent: list[int] = []

    def interrupt(shown: str, pid: int) -> None:
        if not sent and all(f"ready {rank}" in shown for rank in (0, 1)):
            sent.append(pid)
            os.kill(pid, signal.SIGINT)

    script = sandbox.script(f"job.barrier(); print('ready', job.rank)\n{WAITS}")
    shown = on_a_terminal(sandbox, *run_command(script), act=interrupt)
    assert shown.endswith("status 130")
    assert shown.rindex("tensorwire: the user interrupted the job") > shown.rindex("steps/s")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    sandbox.nothing_left()


def test_a_dumb_terminal_has_lines_only(sandbox: Sandbox) -> None:
    script = sandbox.script("job.barrier(); print('hello')")
    shown = on_a_terminal(sandbox, *run_command(script), TERM="dumb", NO_COLOR="1")
    assert "steps/s" not in shown
    assert "\x1b" not in shown
    assert shown.count("worker 0 | hello") == 1


def test_names_line_up_and_an_output_leaves_nothing_behind(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with nothing_kept():
        made = output.ProcessOutput(["worker 0", "server 10"])
        out, err = made.open("worker 0")
        assert out is not None
        assert err is not None
        os.write(out, b"one\ntw")
        os.write(err, b"wrong\n")
        made.print_line("said")
        os.close(out)
        os.close(err)
        made.close()
        made.close()
    captured = capfd.readouterr()
    assert captured.out == "worker 0  | one\nworker 0  | tw\n"
    assert captured.err == "worker 0  | wrong\nsaid\n"
    assert NAMES.sub("", captured.out) == "one\ntw\n"


def test_whatever_goes_wrong_no_process_waits_for_a_reader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(lines: OutputLines, data: bytes) -> bytes:
        raise ValueError("out of order")

    monkeypatch.setattr(OutputLines, "take", fail)
    with nothing_kept():
        made = output.ProcessOutput(["worker 0"])
        out, err = made.open("worker 0")
        assert out is not None
        assert err is not None
        os.write(out, b"one")
        assert made._thread is not None
        made._thread.join(HANG_SECONDS)
        with pytest.raises(BrokenPipeError):
            os.write(out, b"two")
        os.close(out)
        os.close(err)
        made.close()
    assert "out of order" in caplog.text
