"""Versions for readers: ``server|worker|reader INDEX DEVICE NBYTES TENSORS READERS HOST [LIBRARY]``.

All elements of the parameters are the number of steps. Words of readers: ``STATE:WHAT:COUNT``. In the state
``training`` the worker trains meanwhile and makes a version of each step, in the state ``idle`` it sleeps. COUNT
readers take part; see `VersionReader.operation` for what they do. Words of a worker alone: ``K:steps``, so many steps,
``K:version``, these and a version, ``K:loaded``, these while another program loads the newest version once, and
``K:NAME``, one copy of the parameters by NAME of the library (``c/memory.c``).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch

import tensorwire as tw
from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import Lines, Run, timed
from tensorwire.bench.actors.transfer import counts, since
from tensorwire.launch.start import module_command
from tensorwire.store.versions.staging import Staged
from tensorwire.store.versions.version_files import job_folder

BUFFERS = 3  # one is published, one is filled, and one is read
_LONG = 60.0  # seconds between two looks at what there is to do


class Trainer:
    """Worker 0, which makes versions. Attributes count them, and steps."""

    def __init__(self, job: tw.Job, nbytes: int, tensors: int) -> None:
        elements = nbytes // 4 // tensors
        self.params = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(tensors)]
        self.optimizer = tw.torch.StoreOptimizer(
            [(f"p{i}", p) for i, p in enumerate(self.params)],
            torch.optim.SGD,
            lr=1.0,
            fused=True,
            publish=tw.store.Every(buffers=BUFFERS),
        )
        for p in self.params:
            p.grad = torch.full_like(p, -1.0)
        self.steps = self.versions = 0
        self.job = job
        self._loader: subprocess.Popen[bytes] | None = None
        self.seen = tw.store.connect(job.name)  # sees which versions there are

    def step(self, count: int = 1, *, version: bool = True) -> None:
        """Steps, and a version of the last one."""
        for _ in range(count):
            self.optimizer.step()
        self.steps += count
        if version:
            self.publish()

    def publish(self) -> int:
        """The counter of the version that the present state becomes; 0: readers hold all buffers."""
        counter = self.optimizer.publish() or 0
        self.versions += counter > 0
        return counter

    def meanwhile(self, lines: Lines, state: str) -> dict[str, float]:
        """Trains, or sleeps, while readers work; then there is another version."""
        steps, versions, start = self.steps, self.versions, time.perf_counter()
        while lines.others_work(0.0 if state == "training" else _LONG):
            if state == "training":
                self.step()
        seconds, steps, versions = time.perf_counter() - start, self.steps - steps, self.versions - versions
        self.step(version=False)
        self.seen.wait(self.publish())  # readers find no version that is about to go
        return {"steps_per_second": steps / seconds, "versions_per_second": versions / seconds} if steps else {}

    def alone(self, run: Run, library: str) -> float:
        """A round without readers."""
        steps, what = run.word.split(":")
        if what in ("steps", "version"):
            return timed(run, repeated(lambda: self.step(int(steps), version=what == "version")))
        if what == "loaded":
            return timed(run, repeated(lambda: self._loaded(int(steps))))
        pairs = [(torch.empty_like(p), p) for p in self.params]
        return timed(run, repeated(lambda: copy_all(pairs, library, what)))

    def _loaded(self, steps: int) -> None:
        if self._loader is None:
            command = module_command("tensorwire.bench.actors.load_newest", job_folder(self.job.name))
            self._loader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._loader.stdin is not None
        assert self._loader.stdout is not None
        self._loader.stdin.write(b"\n")
        self._loader.stdin.flush()
        self.step(steps, version=False)
        self._loader.stdout.readline()


def repeated(work: Callable[[], object]) -> Callable[[int], object]:
    """``work`` so many times."""

    def repeat(count: int) -> None:
        for _ in range(count):
            work()

    return repeat


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], library: str, name: str) -> None:
    """Copies by the copy ``name`` of the library: to the first of each pair."""
    copy_and_flag, flag = ctypes.CDLL(library).copy_and_flag, ctypes.c_uint64()
    for to, source in pairs:
        ends = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
        copy_and_flag(name.encode(), *ends, ctypes.c_size_t(to.nbytes), ctypes.byref(flag), ctypes.c_uint64(1))


class VersionReader:
    """A process that is no part of the job."""

    def __init__(self, address: str, library: str) -> None:
        self.reader = tw.store.connect(address)
        self.reader.wait()
        shapes = {name: shape for name, (_, shape) in self.reader.tensors.items()}
        self.module = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
        self.mine = {name: p.detach() for name, p in self.module.items()}
        self.shown = self.mine  # what was read last
        self._library = library
        self._current = f"{self.reader.path.parents[1]}/current" if self.reader.route == "shm" else ""
        self._staged: Staged | None = None
        self._plain: IO[bytes] | None = None

    def run(self, run: Run, what: str) -> dict[str, float]:
        """A round: its seconds, and what else is told of it."""
        self.shown = self.mine
        operation, before = self.operation(what), counts()
        for _ in range(run.warm):
            operation()
        seconds = sum(operation() for _ in range(run.count))
        counted = since(before)
        self.check()
        if self._staged is not None:
            self._staged.close()
        return {"seconds": seconds, **counted}

    def operation(self, what: str) -> Callable[[], float]:
        """Does it once and returns the seconds of it.

        ``pull``: reads all tensors into this process's own. ``commit``: copies a version that was staged into the
        module; ``copy`` copies the same from private memory. ``map`` opens the newest version's file with safetensors;
        ``load`` copies its tensors into this process's own, too; with ``plain-`` a file of the same bytes. Others are
        copies of the library from the newest version into this process's tensors.
        """
        if what == "pull":
            return lambda: clocked(lambda: self.reader.pull(1, into=self.mine))
        if what == "commit":
            return self._commit
        if what == "copy":
            private = {name: tensor.clone() for name, tensor in self.mine.items()}
            return lambda: clocked(lambda: [self.mine[name].copy_(private[name]) for name in private])
        if what.endswith(("map", "load")):
            path = self._plain_file if what.startswith("plain") else self._live_file
            return lambda: clocked(lambda: self._open(path(), load=what.endswith("load")))
        self._staged = self.reader.stage(1)
        pairs = [(self.mine[name], tensor) for name, tensor in self._staged.tensors.items()]
        return lambda: clocked(lambda: copy_all(pairs, self._library, what))

    def _commit(self) -> float:
        self._staged = self.reader.stage(1, module=self.module)
        self._staged.commit(self.module)
        return self.reader.seconds["pause"]

    def _live_file(self) -> str:
        return f"{os.path.realpath(self._current)}/model.safetensors"

    def _plain_file(self) -> str:
        """Of the same bytes, in the same file system. It has no name, and so goes with this process."""
        if self._plain is None:
            self._plain = TemporaryFile(dir="/dev/shm")  # noqa: SIM115
            self._plain.write(Path(self._live_file()).read_bytes())
            self._plain.flush()
        return f"/proc/self/fd/{self._plain.fileno()}"

    def _open(self, path: str, *, load: bool) -> None:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            for name, own in self.mine.items():
                tensor = file.get_tensor(name)
                if load:
                    own.copy_(tensor)

    def check(self) -> None:
        """Raises `SystemExit` unless all tensors are of one version."""
        found = {float(value) for tensor in self.shown.values() for value in (tensor.min(), tensor.max())}
        if len(found) != 1:
            raise SystemExit(f"what was read is of {len(found)} versions")


def clocked(work: Callable[[], object]) -> float:
    """The seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(role: str, index: str, device: str, nbytes: str, tensors: str, readers: str, *rest: str) -> None:
    """Runs until its input ends. ``rest``: HOST [LIBRARY]."""
    torch.set_num_threads(1)
    lines, host, library = Lines(), rest[0], "".join(rest[1:])
    if role == "server":
        store_job.serve(lines, 0, "auto", 1, 1, host)
        for _ in lines.runs():
            lines.answer()
    elif role == "worker":
        store_job.join(lines, 0, "auto", 1, 1)
        trainer = Trainer(tw.init(), int(nbytes), int(tensors))
        for run in lines.runs():
            if int(readers):
                lines.answer(**trainer.meanwhile(lines, run.word.split(":")[0]))
            else:
                lines.answer(trainer.alone(run, library))
    else:
        os.environ["TENSORWIRE_DEVICE"] = device
        from tensorwire.bench.actors.job_folder import FolderReader  # which stands on this

        reader = FolderReader(lines.hello().split()[0], library)
        for run in lines.runs():
            _, what, count = run.word.split(":")
            lines.answer(**(reader.run(run, what) if int(index) < int(count) else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
