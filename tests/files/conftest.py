"""Jobs whose files the tests read and write."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire.errors import Unsupported
from tensorwire.files import Folder
from tensorwire.files.mounting import check_can_mount, unmount
from tests.fixtures import sandbox as sandbox
from tests.harness.sandbox import Sandbox

# A job of keys: `w` of three buckets over two servers, small and empty keys, names that no file may have, rows. It does
# what lines of its input say.
KEYS = """
    import numpy as np
    every = tw.store.Every(buffers=int(os.environ.get("BUFFERS", 3)))
    kv = tw.store.KeyValue(tw.store.Async(), "sum", publish=every, bucket_bytes=65536)
    values = [np.arange(40_003, dtype="f4"), np.ones((2, 3), "i8"), np.zeros((0, 4)), np.ones(3)]
    kv.init(["w", "a/b", 7, "."], values)
    kv.init_rows("table", (50, 3), values=np.ones((50, 3), "f4"))
    kv.publish(step=7)
    print("job", job.name)
    print("address", os.environ["TENSORWIRE_COORDINATOR"])
    print("servers", *[each.process.pid for each in job._worker._children])
    for line in open(os.environ["WORDS"]):
        word = line.strip()
        if word == "publish":
            kv.push("w", np.ones(40_003, "f4")).wait()
            print("published", kv.publish())
        elif word == "values":
            np.savez(os.environ["VALUES"], *kv.pull(["w", "a/b", "."]).wait())
            print("values", os.environ["VALUES"])
        elif word == "raise":
            raise ValueError("as asked")
        elif word == "end":
            break
    kv.close()
"""
SIZE = 4 * 40_003  # bytes of `w`


class Keys:
    """A running job of keys."""

    def __init__(self, sandbox: Sandbox, tmp_path: Path, *options: str, **environment: str) -> None:
        self._pipe, self._values = tmp_path / "words", tmp_path / "values.npz"
        os.mkfifo(self._pipe)
        given = {"WORDS": str(self._pipe), "VALUES": str(self._values), **environment}
        self.program = sandbox.run(sandbox.script(KEYS), "--servers", "2", *options, workers=1, **given)
        self._to = os.open(self._pipe, os.O_WRONLY)
        self.name = self.program.said("job")
        self.address = self.program.said("address")
        weakref.finalize(self, os.close, self._to)

    def say(self, word: str) -> None:
        """Makes the job do something."""
        os.write(self._to, f"{word}\n".encode())

    def _ask(self, word: str, answer: str) -> str:
        self.program.lines = [line for line in self.program.lines if not line.startswith(answer)]
        self.say(word)
        return self.program.said(answer)

    def publish(self) -> int | None:
        """One more push of ones to `w`, and a version; its counter, unless readers hold all buffers."""
        said = self._ask("publish", "published")
        return None if said == "None" else int(said)

    def values(self) -> list[np.ndarray[Any, Any]]:
        """The present values of `w`, `a/b` and `.`."""
        self._ask("values", "values")
        with np.load(self._values) as found:
            return [found[name] for name in found]

    def end(self) -> None:
        """Ends it in good order."""
        self.say("end")
        assert self.program.finish().status == 0


@pytest.fixture
def keys(sandbox: Sandbox, tmp_path: Path) -> Keys:
    """A job of keys; the sandbox ends it."""
    return Keys(sandbox, tmp_path)


@pytest.fixture(params=["auto", "tcp"])
def folder(keys: Keys, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """Its folder: as files of this machine, and as from another one."""
    monkeypatch.setenv("TENSORWIRE_DEVICE", request.param)
    with tw.files.connect(keys.name) as found:
        wait_for(found, 1)
        yield found


def wait_for(folder: Folder, counter: int) -> None:
    """Returns when there is a version of that number."""
    while not folder.exists(f"versions/{counter}"):
        time.sleep(0.002)


@pytest.fixture(params=["auto", "tcp"])
def mounted(keys: Keys, sandbox: Sandbox, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The job's folder as a mount: on its machine, and as on another one."""
    with mounting(keys.name, sandbox, tmp_path, TENSORWIRE_DEVICE=request.param) as found:
        yield found


@contextlib.contextmanager
def mounting(job: str, sandbox: Sandbox, tmp_path: Path, *options: str, **environment: str) -> Iterator[Path]:
    """A mount of a job, by a program of the sandbox."""
    need_mounts()
    at = tmp_path / "mount"
    program = sandbox.launch("mount", job, str(at), *options, **environment)
    try:
        program.line(f"{job} is mounted")
        while not (at / "model.safetensors").is_symlink():
            time.sleep(0.002)
        yield at
    finally:
        unmount(at)


def need_mounts() -> None:
    """Skips a test where nothing can be mounted."""
    try:
        check_can_mount()
    except Unsupported as error:
        pytest.skip(str(error))
