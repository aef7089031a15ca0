"""The limits of the machine: C programs, built on demand, that Tensorwire is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tensorwire.bench.programs import Contender, pair
from tensorwire.bench.records import size_text
from tensorwire.bench.show import Notes
from tensorwire.builds import build
from tensorwire.errors import Unsupported

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
        words = ("-O2", "-std=gnu11", f"-I{SOURCES}", str(source), *libraries)

        @contextmanager
        def announced() -> Iterator[None]:
            self._notes.say(f"building {source.name}")
            yield

        try:
            return (str(build("bench", source, words, announced, headers=[SOURCES / "lines.h"])),)
        except Unsupported as error:
            self._notes.skip(f"C {source.stem}: {error}{f' ({needs})' if needs else ''}")
            return ()
