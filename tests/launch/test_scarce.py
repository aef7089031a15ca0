"""What is too scarce on a machine is said in one line, and once."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess

import pytest

from tensorwire.errors import OutOfMemory
from tensorwire.launch.scarce import as_out_of_memory, scarcity
from tests.harness.sandbox import Sandbox, run_command


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        *((f"ulimit -n {most}", f": raise ulimit -n (now {most})") for most in (9, 16, 24)),
        ("ulimit -f 0", "regions are files in memory: raise ulimit -f (now 0 bytes)"),
    ],
)
def test_a_limit_that_stops_a_job_is_one_line_before_anything_starts(sandbox: Sandbox, limits: str, why: str) -> None:
    script = sandbox.script("print('started')", init=False)
    run = shlex.join(run_command(script))
    # What it says goes through a pipe: it may not even write to a file.
    done = subprocess.run(
        ["bash", "-c", f"{limits}; exec {run}"], env=sandbox.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tensorwire: ")
    assert done.stderr.endswith(f"{why}\n")
    assert done.stderr.count("\n") == 1
    sandbox.nothing_left()


def test_a_machine_without_a_loopback_interface_is_one_line(sandbox: Sandbox) -> None:
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a network of its own needs root")
    script = sandbox.script("print('started')")
    result = sandbox.start("unshare", "-n", *run_command(script)).finish()
    assert (result.status, result.out.strip()) == (1, "")
    assert result.one_line().endswith(
        "no process of this machine reaches 127.0.0.1 (Network is unreachable): ip link set lo up"
    )
    sandbox.nothing_left()


def test_a_process_alone_says_it_as_a_typed_error(sandbox: Sandbox) -> None:
    body = """
        from tensorwire.errors import OutOfMemory
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
        import tensorwire as tw
        try:
            tw.init()
        except OutOfMemory as error:
            print(error)
    """
    result = sandbox.python(sandbox.script(body, init=False)).finish()
    assert (result.status, result.err) == (0, "")
    assert "raise ulimit -n (now 8)" in result.out or "Too many open files" in result.out
    sandbox.nothing_left()


def test_only_what_means_scarcity_is_called_so() -> None:
    for error in (OSError(errno.EMFILE, "x"), OSError(errno.EAGAIN, "x"), MemoryError(), OSError(errno.EFBIG, "x")):
        with pytest.raises(OutOfMemory, match="ulimit"), as_out_of_memory():
            raise error
    with pytest.raises(OutOfMemory, match="no more processes or threads"), as_out_of_memory():
        raise RuntimeError("can't start new thread")
    for other in (OSError(errno.ENOENT, os.strerror(errno.ENOENT)), RuntimeError("mine"), ValueError()):
        assert scarcity(other) == ""
        with pytest.raises(type(other)), as_out_of_memory():
            raise other
    with pytest.raises(OutOfMemory, match="own words"), as_out_of_memory():
        raise OutOfMemory("own words")
