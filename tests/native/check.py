"""The native core under sanitizers: ``python tests/native/check.py [threads] [address] [leaks]``, by default all.

``threads``: a program of C++ under ThreadSanitizer, in which threads and engines share regions. ``leaks``: the same
program under LeakSanitizer, with AddressSanitizer and UndefinedBehaviorSanitizer. ``address``: the tests of devices
and edges, with the native module built for the latter two. Each first makes a mistake on purpose, which must be found.
Needs g++ with libtsan, libasan and libubsan.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
KINDS = ("ShmDevice", "TcpDevice")  # what loopback has of native code, shm has, too
TESTS = [
    *(f"--device=tensorwire.device:{kind}" for kind in KINDS),
    "--pyargs",
    "tensorwire.testing.conformance",
    "tests/device",
    "tests/edge",
    *("--ignore=tests/edge/test_pool.py", "--ignore=tests/edge/test_header.py"),  # of Python alone, and long
    "tests/store/test_native_rows.py",
]
# Shadow memory takes more address space than any limit would leave, freed memory is kept back for a while, SIGSEGV is
# caught and told, and whoever forks while another thread holds a lock of the allocator has a child that waits for it.
IMPOSSIBLE = (
    "not RLIMIT_AS and not flat and not hundred_dead_peers and not freed_memory and not has_no_page"
    " and not no_fork_comes_between"
)
OVERFLOW = "import ctypes; ctypes.memset(ctypes.create_string_buffer(64), 0, 65)"


def run(*command: str | Path, environment: Mapping[str, str] | None = None, quiet: bool = False) -> None:
    """Runs a command that must succeed; if ``quiet``, its output is shown only if it does not."""
    words = [str(word) for word in command]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **(environment or {})}, text=True, **output)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}\ncheck-native: failed ({done.returncode}): {' '.join(words)}")


def must_find(what: str, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs a command that makes a mistake on purpose: a sanitizer must say ``what``."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True
    )
    if done.returncode == 0 or what.encode() not in done.stderr:
        sys.exit(f"check-native: a mistake on purpose was not found: {done.stderr.decode()[-2000:]}")


def build(source: Path, name: str, *options: str) -> Path:
    """Configures and builds with cmake; the folder it built in."""
    folder = BUILD / name
    where = ("-S", source, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}")
    run("cmake", *where, *options, quiet=True)
    run("cmake", "--build", folder, quiet=True)
    return folder


def threads() -> None:
    """ThreadSanitizer over regions, doors, engines and the monitor."""
    program = build(ROOT / "tests" / "native", "threads") / "threads"
    # ThreadSanitizer of older compilers cannot live with as much address randomisation as new kernels have.
    fixed = (
        ["setarch", "-R"]
        if subprocess.run(["setarch", "-R", "true"], stderr=subprocess.DEVNULL).returncode == 0
        else []
    )
    must_find("data race", *fixed, program, "racy")
    run(*fixed, program)


def leaks() -> None:
    """LeakSanitizer over the same: no engine, connection or span keeps itself alive."""
    program = build(ROOT / "tests" / "native", "leaks", "-DSANITIZER=address,undefined") / "threads"
    environment = {"ASAN_OPTIONS": "detect_leaks=1"}
    must_find("detected memory leaks", program, "leaky", environment=environment)
    run(program, environment=environment)


def library(name: str) -> str:
    """Where the compiler has a library of its own."""
    compiler = os.environ.get("CXX", "g++")
    return subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


def overlay(built: Path) -> Path:
    """A folder with the package as it is in the source tree, and the native module that was built."""
    site = built / "site"
    shutil.rmtree(site, ignore_errors=True)
    package = site / "tensorwire"
    package.mkdir(parents=True)
    for path in (ROOT / "src" / "tensorwire").iterdir():
        (package / path.name).symlink_to(path)
    module = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    (package / module).symlink_to(built / module)
    shutil.copy(Path(__file__).with_name("sitecustomize.py"), site)
    return site


def address() -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer over the tests of devices and edges."""
    built = build(ROOT, "address", "-DCMAKE_BUILD_TYPE=Debug", "-DTENSORWIRE_SANITIZE=address,undefined")
    environment = {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",  # Python itself is not built with it
        "PYTHONPATH": str(overlay(built)),
        "PYTHONMALLOC": "malloc",  # so that Python's own buffers are watched too
        "ASAN_OPTIONS": "detect_leaks=0",  # of an interpreter that frees little when it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    loaded = "import tensorwire._native as n, sys; sys.exit('/build/address/' not in n.__file__)"
    run(sys.executable, "-c", loaded, environment=environment)
    must_find("AddressSanitizer: heap-buffer-overflow", sys.executable, "-c", OVERFLOW, environment=environment)
    files = ("-n", "2", "--dist", "loadfile")  # two at a time
    run(sys.executable, "-m", "pytest", *files, "--capture=sys", "-k", IMPOSSIBLE, *TESTS, environment=environment)


def main() -> None:
    """Runs the parts that are named, or all."""
    parts = {"threads": threads, "leaks": leaks, "address": address}
    for name in sys.argv[1:] or list(parts):
        start = time.monotonic()
        parts[name]()
        print(f"check-native: {name}: nothing found, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
