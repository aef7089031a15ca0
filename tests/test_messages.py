"""Messages of one kind may be decoded first in several threads at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = '''
import sys, threading, types
import msgspec
from tensorwire.messages import decode_message

SOURCE = """
from __future__ import annotations
import msgspec
from typing import Literal
class Inner(msgspec.Struct, frozen=True):
    a: int
    b: Literal["x", "y"]
    c: list[tuple[int, str]]
class Outer(msgspec.Struct, frozen=True):
    a: Inner
    b: dict[int, Inner]
    c: Literal["q", "r"] | None = None
    d: list[bytes] = []
"""
sys.setswitchinterval(1e-6)
for number in range(200):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(SOURCE, module.__dict__)
    message = module.Outer(module.Inner(1, "x", [(1, "a")]), {1: module.Inner(1, "y", [])}, "q", [b"z"])
    packed, together, found = msgspec.msgpack.encode(message), threading.Barrier(4), []
    def run():
        together.wait()
        found.append(decode_message(packed, module.Outer))
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert found == [message] * 4
'''


def test_threads_that_decode_first_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
