"""``tensorwire://`` by fsspec: fsspec's own tests below ``checkpoints/``, and what libraries do with versions.

fsspec's tests write first, so that they fit nothing but ``checkpoints/``. The rest of the folder can only be read, or
takes pushes: its tests are here and in the files beside.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.tests import abstract

from tensorwire.files.filesystem import TensorwireFileSystem
from tests.files.conftest import SIZE, Keys
from tests.harness.sandbox import Sandbox

W = np.arange(SIZE // 4, dtype="f4")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One job for all of fsspec's tests."""
    folder = tmp_path_factory.mktemp("job")
    sandbox, real = Sandbox(folder), folder / "kept"
    real.mkdir()
    keys = Keys(sandbox, folder, "--checkpoints", str(real))
    yield keys.name
    sandbox.close()


@pytest.fixture(scope="module")
def connected(job: str) -> Iterator[TensorwireFileSystem]:
    """The file system for all of fsspec's tests."""
    found = fsspec.filesystem("tensorwire", skip_instance_cache=True)
    yield found
    found.close()


class OfCheckpoints(abstract.AbstractFixtures):  # type: ignore[misc]
    """A folder of a job's checkpoints for each test."""

    @pytest.fixture
    def fs(self, connected: TensorwireFileSystem) -> TensorwireFileSystem:
        return connected

    @pytest.fixture
    def fs_path(self, fs: TensorwireFileSystem, job: str) -> str:
        path = f"{job}/checkpoints/{uuid.uuid4().hex}"
        fs.mkdir(path)
        return path

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)


class TestCopy(abstract.AbstractCopyTests, OfCheckpoints):  # type: ignore[misc]
    """fsspec's."""


class TestGet(abstract.AbstractGetTests, OfCheckpoints):  # type: ignore[misc]
    """fsspec's."""


class TestPut(abstract.AbstractPutTests, OfCheckpoints):  # type: ignore[misc]
    """fsspec's."""


class TestOpen(abstract.AbstractOpenTests, OfCheckpoints):  # type: ignore[misc]
    """fsspec's."""


class TestPipe(abstract.AbstractPipeTests, OfCheckpoints):  # type: ignore[misc]
    """fsspec's."""


# ---- the rest of the folder


@pytest.fixture(params=["auto", "tcp"])
def files(job: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorwireFileSystem]:
    """The file system, on the job's machine and as on another one."""
    monkeypatch.setenv("TENSORWIRE_DEVICE", request.param)
    found = fsspec.filesystem("tensorwire", skip_instance_cache=True)
    while "model.safetensors" not in {path.rpartition("/")[2] for path in found.ls(job, detail=False)}:
        pass
    yield found
    found.close()


def test_files_are_listed_and_read(files: TensorwireFileSystem, job: str) -> None:
    url = f"tensorwire://{job}/params/w"
    assert files.ls(f"tensorwire://{job}", detail=False) == [
        f"{job}/{name}" for name in ("checkpoints", "control", "model.safetensors", "params", "push", "versions")
    ]
    assert {each["name"] for each in files.ls(f"{job}/versions/1")} == {
        f"{job}/versions/1/params",
        f"{job}/versions/1/model.safetensors",
    }
    info = files.info(url)
    assert (info["size"], info["type"], info["version"][:4]) == (SIZE, "file", "0.1.")
    assert files.ls(url)[0] == info
    assert files.isdir(f"{job}/params")
    assert files.isfile(url)
    assert not files.exists(f"{job}/params/nothing")
    assert files.modified(url).timestamp() == pytest.approx(info["mtime"])
    assert files.cat(url) == W.tobytes()
    assert files.cat_file(url, 4, -4) == W[1:-1].tobytes()
    assert files.cat_file(url, -8) == W[-2:].tobytes()
    assert files.cat(f"{job}/control/clock") == b"7\n"
    assert {path.rpartition("/")[2] for path in files.glob(f"{job}/params/*.npy")} >= {"w.npy", "table.npy"}
    assert f"{job}/versions/1/params/w" in files.find(f"{job}/versions")
    assert [name for _, folders, _ in files.walk(f"{job}/versions") for name in folders][:2] == ["1", "params"]


def test_ranges_are_read_at_once(files: TensorwireFileSystem, job: str) -> None:
    path = f"{job}/params/w"
    starts, ends = [0, 400, 4000, None], [40, 480, None, 8]
    found = files.cat_ranges([path] * 4, starts, ends)
    assert found == [W.tobytes()[start:end] for start, end in zip(starts, ends, strict=True)]
    assert files.cat_ranges([path, path], 4, 12) == [W[1:3].tobytes()] * 2
    (bad,) = files.cat_ranges([f"{job}/nothing"], 0, 1)
    assert isinstance(bad, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        files.cat_ranges([f"{job}/nothing"], 0, 1, on_error="raise")
    with pytest.raises(ValueError, match="as many"):
        files.cat_ranges([path], [0, 1], 1)


def test_a_whole_version_has_a_path_where_it_is_a_file(files: TensorwireFileSystem, job: str) -> None:
    url = f"tensorwire://{job}/model.safetensors"
    file = files.open(url)
    if hasattr(file, "name"):
        path = fsspec.open_local(url)
        from safetensors import safe_open

        with safe_open(path, "pt") as found:
            assert found.get_tensor("w")[-1] == 40_002
        assert Path(path).stat().st_size == files.size(url)
    else:
        with pytest.raises(AttributeError, match="is no file of this machine"):
            fsspec.open_local(url, skip_instance_cache=True)
    file.close()
    with pytest.raises(AttributeError, match="read it here"):
        fsspec.open_local(f"tensorwire://{job}/params/w")


def test_libraries_read_by_url(files: TensorwireFileSystem, job: str) -> None:
    import torch
    from safetensors.torch import load

    with fsspec.open(f"tensorwire://{job}/params/w.npy", "rb", skip_instance_cache=True) as file:
        assert (np.load(file) == W).all()
    with files.open(f"{job}/model.safetensors") as file:
        assert load(file.read())["table"].sum() == 150
    with files.open(f"{job}/checkpoints/one.pt", "wb") as file:
        torch.save({"w": torch.arange(5.0)}, file)
    with files.open(f"{job}/checkpoints/one.pt") as file:
        assert torch.load(file)["w"].tolist() == [0, 1, 2, 3, 4]
    files.get(f"{job}/params/w", local := f"/dev/shm/{uuid.uuid4().hex}")
    assert Path(local).read_bytes() == W.tobytes()
    Path(local).unlink()


def test_versions_are_copied_below_checkpoints(files: TensorwireFileSystem, job: str) -> None:
    files.copy(f"{job}/model.safetensors", f"{job}/checkpoints/kept.safetensors")
    assert files.cat(f"{job}/checkpoints/kept.safetensors") == files.cat(f"{job}/model.safetensors")
    files.rm(f"{job}/checkpoints/kept.safetensors")


def test_pushes_go_by_url(files: TensorwireFileSystem, job: str) -> None:
    with files.open(f"{job}/push/a%2Fb", "wb") as file:
        file.write(np.ones((2, 3), "i8"))
    with pytest.raises(OSError) as found, files.open(f"{job}/push/w", "wb") as file:
        file.write(b"1234")
    assert found.value.errno == errno.EINVAL


CHANGES: list[tuple[str, tuple[Any, ...]]] = [
    ("mkdir", ("new",)),
    ("makedirs", ("new/a",)),
    ("rmdir", ("params",)),
    ("rm_file", ("params/w",)),
    ("rm", ("params/w",)),
    ("touch", ("params/w",)),
    ("pipe_file", ("params/w", b"x")),
    ("pipe_file", ("control/clock", b"x")),
]


def test_nothing_else_can_be_changed(files: TensorwireFileSystem, job: str) -> None:
    for call, (path, *more) in CHANGES:
        with pytest.raises(OSError) as found:
            getattr(files, call)(f"{job}/{path}", *more)
        assert found.value.errno == errno.EROFS, (call, path)
    with pytest.raises(FileNotFoundError, match="say which job"):
        files.cat("tensorwire://")
