"""The limits of the machine: C programs, built on demand, that Tensorwire is compared with."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tensorwire.bench.programs import Contender, pair
from tensorwire.bench.records import size_text
from tensorwire.bench.show import Notes
from tensorwire.device.copy_choice import cache_folder
from tensorwire.errors import Unsupported

_FLAGS = ("-O2", "-std=gnu11")
SOURCES = Path(__file__).parent / "c"
POLLING = "C sockets, polling"


class Limits:
    """Contenders in C. What cannot be built is told by a note."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def copies(self, nbytes: int, mode: str, names: Sequence[str], group: str) -> list[Contender]:
        """Copies and a flag in shared memory."""
        program = self.program(SOURCES / "memory.c")
        asleep = mode == "one-way"
        return [Contender(f"C {name}", pair(program, nbytes, mode, name), group, asleep) for name in names if program]

    def same_memory(self, ours: Contender, names: Sequence[str], group: str) -> tuple[Contender, list[Contender]]:
        """The same copies, done by our own processes: where a large payload lies decides how fast it is."""
        library = self.program(SOURCES / "memory.c", "-shared", "-fPIC")
        if not library:
            return ours, []
        ours = replace(ours, commands=tuple((*command, *library) for command in ours.commands))
        return ours, [replace(ours, name=f"C {name}", word=name, group=group, how="") for name in names]

    def sockets(self, nbytes: int, buffers: Sequence[int], window: int = 1, *, polls: bool = False) -> list[Contender]:
        """Sockets with buffers of several sizes, 0 being the kernel's own choice; one byte back.

        ``window``: how many payloads may be on their way before the first is answered. ``polls``: both ends poll, which
        takes the time that the kernel itself needs, without a wake-up; else they block.
        """
        program, group = self.program(SOURCES / "sockets.c"), POLLING if polls else "C sockets"
        names = {buffer: f"{group}, {size_text(buffer)}" if buffer else group for buffer in buffers if program}
        arguments = {buffer: (nbytes, window, buffer, "127.0.0.1", int(polls)) for buffer in names}
        return [Contender(name, pair(program, *arguments[buffer]), group) for buffer, name in names.items()]

    def program(self, source: Path, *libraries: str, needs: str = "") -> tuple[str, ...]:
        """The command of the program of ``source``; empty, with a note that names what it ``needs``, without it."""
        try:
            return (str(build(source, libraries, self._notes)),)
        except Unsupported as error:
            self._notes.skip(f"C {source.stem}: {error}{f' ({needs})' if needs else ''}")
            return ()


def build(source: Path, libraries: Sequence[str], notes: Notes) -> Path:
    """The program of ``source``, built if the cache has none of it. Raises `Unsupported`."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise Unsupported("no C compiler: apt install gcc libc6-dev")
    header = (SOURCES / "lines.h").read_bytes()
    told = [source.read_bytes(), header, repr((_FLAGS, libraries, platform.machine())).encode()]
    tag = hashlib.sha256(b"\0".join(told)).hexdigest()[:16]
    program = cache() / f"{source.stem}-{tag}"
    if program.exists():
        return program
    notes.say(f"building {source.name} into {program.parent}")
    fresh = program.with_suffix(f".{os.getpid()}")
    command = [compiler, *_FLAGS, f"-I{SOURCES}", "-o", str(fresh), str(source), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
        raise Unsupported(f"cannot be built: {errors[0]}")
    fresh.replace(program)  # another process that built it at the same time made the same
    return program


def cache() -> Path:
    """Where built programs are kept."""
    try:
        folder = cache_folder() / "tensorwire" / "bench"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unsupported(f"cannot make the folder of the cache: {error}; set XDG_CACHE_HOME") from None
    return folder
