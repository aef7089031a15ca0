"""Versions as files: their layout, the states of buffers, and what the kernel says of who has a file."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tensorwire._native import FileMap
from tensorwire.errors import ArgumentError, OutOfMemory, ProtocolError
from tensorwire.store.sharding import ParameterSpec, make_plan
from tensorwire.store.versions import version_files as files
from tensorwire.store.versions.buffers import Buffers, BufferState
from tensorwire.store.versions.selection import select
from tensorwire.store.versions.staging import copy_into
from tensorwire.store.versions.version_layout import SAFE_DTYPES, FileTensor, Manifest, VersionLayout, parse_manifest
from tests.harness.sandbox import nothing_kept

TENSORS = [
    ParameterSpec("odd", (3,), "int8"),
    ParameterSpec("whole", (40, 16), "float32"),
    ParameterSpec("none", (0, 4), "float64"),
    ParameterSpec("half", (33,), "bfloat16"),
    ParameterSpec("wide", (5,), "float64"),
    ParameterSpec('quo"ted', (), "int64"),
    ParameterSpec("large", (3000,), "float16"),
]


def layout_of(tensors: list[ParameterSpec], by_bucket: bool = False, shards: int = 2) -> VersionLayout:
    return VersionLayout(make_plan(tensors, shards, bucket_bytes=4096), by_bucket=by_bucket)


# ---- the format


@pytest.mark.parametrize("by_bucket", [False, True])
def test_the_libraries_read_a_file_with_every_dtype(tmp_path: Path, by_bucket: bool) -> None:
    tensors = [ParameterSpec(f"t.{dtype}", (5, 3), dtype) for dtype in SAFE_DTYPES] + TENSORS
    layout = layout_of(tensors, by_bucket)
    numbers = tuple(range(len(layout.buckets)))
    manifest = Manifest(2, 7, 41, numbers, numbers if by_bucket else ())
    data = np.random.default_rng(0).integers(0, 2, layout.nbytes - layout.data, np.uint8).tobytes()
    file = tmp_path / "model.safetensors"
    file.write_bytes(layout.header(manifest) + data)
    loaded = load_file(file)
    assert {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in loaded.items()} == {
        t.name: (t.dtype, t.shape) for t in tensors
    }
    for name, held in layout.held.items():
        value = loaded[name].contiguous().view(-1)
        at = held.start - layout.data
        if value.numel():
            assert bytes(value.view(torch.uint8).numpy()) == data[at : at + value.nbytes]
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["tensorwire.counter"].lstrip("0") == "7"
    assert parse_manifest(layout.header(manifest)) == manifest


def test_tensors_lie_without_gaps_and_are_aligned_to_their_elements() -> None:
    layout = layout_of(TENSORS)
    at = layout.data
    assert at % mmap.PAGESIZE == 0
    sizes = {t.name: t.nbytes for t in TENSORS}
    for name, held in sorted(layout.held.items(), key=lambda item: (item[1].start, sizes[item[0]])):
        assert held.start == at, name
        at += sizes[name]
        assert held.start % torch.empty(0, dtype=getattr(torch, held.dtype)).element_size() == 0
    assert at == layout.nbytes
    assert layout.held["whole"].start % 64 == layout.held["none"].start % 64 == 0


def test_every_byte_is_in_one_piece_of_one_bucket() -> None:
    layout = layout_of(TENSORS)
    filled = np.zeros(layout.nbytes, np.uint8)
    for places in layout.buckets:
        for place in places:
            filled[place.file : place.file + place.nbytes] += 1
    assert (filled[layout.data :] == 1).all()
    assert not filled[: layout.data].any()


def test_the_header_has_one_size_whatever_it_says() -> None:
    layout = layout_of(TENSORS, by_bucket=True)
    count = len(layout.buckets)
    most = 2**64 - 1
    small, large = (
        Manifest(0, 0, 0, (0,) * count, (0,) * count),
        Manifest(most, most, most, (most,) * count, (most,) * count),
    )
    assert len(layout.header(small)) == len(layout.header(large)) == layout.data
    assert parse_manifest(layout.header(large)) == large


@pytest.mark.parametrize("change", [(b'"tensorwire.checksums": "0', b'"tensorwire.checksums": "1'), (b"root", b"rood")])
def test_a_header_that_was_changed_is_refused(change: tuple[bytes, bytes]) -> None:
    layout = layout_of(TENSORS)
    header = layout.header(Manifest(0, 1, 0, (3,) * len(layout.buckets)))
    assert change[0] in header
    with pytest.raises(ProtocolError):
        parse_manifest(header.replace(*change))


def test_the_name_of_a_version_says_what_is_in_it() -> None:
    one, other = Manifest(0, 1, 0, (1, 2)).version, Manifest(0, 1, 0, (2, 1)).version
    assert one.root != other.root
    assert (one.run, one.counter) == (other.run, other.counter)
    assert str(one) == f"0.1.{one.root[:8]}"


# ---- parts of tensors


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[slice]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    slices = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bounds = st.none() | st.integers(-size, size)
        slices.append(slice(draw(bounds), draw(bounds)))
    return shape, slices


@given(st.lists(parts(), min_size=1, max_size=3))
def test_parts_are_what_indexing_gives(chosen: list[tuple[tuple[int, ...], list[slice]]]) -> None:
    arrays, held, end = {}, {}, 64
    for i, (shape, _) in enumerate(chosen):
        arrays[str(i)] = np.random.default_rng(i).integers(0, 2**31, shape, np.int32)
        held[str(i)] = FileTensor("int32", shape, end)
        end += arrays[str(i)].nbytes
    file = np.concatenate([np.zeros(64, np.uint8), *(a.reshape(-1).view(np.uint8) for a in arrays.values())])
    selection = select(held, slices={str(i): slices for i, (_, slices) in enumerate(chosen)})
    memory = np.zeros(selection.nbytes, np.uint8)
    for span in selection.spans:
        memory[span.memory : span.memory + span.nbytes] = file[span.file : span.file + span.nbytes]
    expected = {str(i): arrays[str(i)][tuple(slices)] for i, (_, slices) in enumerate(chosen)}
    assert selection.payload == sum(each.nbytes for each in expected.values())
    for name, (_, shape, at) in selection.tensors.items():
        count = expected[name].nbytes
        np.testing.assert_array_equal(memory[at : at + count].view(np.int32).reshape(shape), expected[name])


def test_whole_tensors_that_lie_side_by_side_are_read_at_once() -> None:
    layout = layout_of([ParameterSpec(n, (64, 16), "float32") for n in "abc"])
    assert len(select(layout.held).spans) == 1


@pytest.mark.parametrize(
    ("slices", "what"),
    [
        ({"x": [slice(1)]}, "no tensor 'x'"),
        ({"a": [slice(0, 5)]}, "outside of a dimension of 4"),
        ({"a": [slice(0, 4, 2)]}, "slices of step 1"),
        ({"a": [1]}, "slices of step 1"),
        ({"a": [slice(1), slice(1), slice(1)]}, "2 dimensions, and 3 slices"),
    ],
)
def test_parts_that_do_not_fit_are_refused(slices: dict[str, list[slice]], what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        select({"a": FileTensor("int8", (4, 4), 0)}, slices=slices)


# ---- buffers


@given(st.integers(2, 4), st.lists(st.integers(0, 3), max_size=30))
def test_one_buffer_is_published_and_at_most_one_is_filled(count: int, choices: list[int]) -> None:
    buffers, filling = Buffers(count), None
    published: list[int] = []
    for choice in choices:
        if filling is None:
            filling = buffers.fill()
        elif choice:
            buffers.publish(filling)
            published.append(filling)
            filling = None
        if choice == 3 and buffers.draining:
            buffers.drained(buffers.draining[0])
        assert buffers.published == (published[-1] if published else None)
        assert buffers.states.count(BufferState.FILLING) == (filling is not None)
        assert buffers.states.count(BufferState.PUBLISHED) == bool(published)


def test_changes_of_state_that_there_are_not() -> None:
    buffers = Buffers(2)
    assert buffers.fill() == 0
    with pytest.raises(ValueError, match="one version at a time"):
        buffers.fill()
    buffers.publish(0)
    for change in (buffers.publish, buffers.drained):
        with pytest.raises(ValueError, match="buffer 0 is published"):
            change(0)


# ---- files


def test_a_private_map_keeps_its_changes_and_lives_as_long_as_its_views() -> None:
    nbytes = (4 << 20) + 100
    fd = os.memfd_create("file")
    os.posix_fallocate(fd, 0, nbytes)
    shared = memoryview(FileMap(fd, nbytes, shared=True))
    private = memoryview(FileMap(fd, nbytes, shared=False))
    os.close(fd)
    want = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    shared[:] = want.tobytes()
    assert np.array_equal(np.frombuffer(private, np.uint8), want)
    private[5] = want[5] ^ 1
    assert shared[5] == want[5]
    shared[6] ^= 1
    assert private[6] == want[6], "its page is its own now"


def test_huge_pages_have_the_bytes_that_small_ones_had() -> None:
    nbytes = (6 << 20) + 100
    fd = os.memfd_create("file")
    os.posix_fallocate(fd, 0, nbytes)
    made = FileMap(fd, nbytes, shared=True)
    want = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    memoryview(made)[:] = want.tobytes()
    huge = made.make_huge()
    assert np.array_equal(np.frombuffer(made, np.uint8), want)
    if huge:
        memoryview(made)[::4096].tobytes()
        mapped = [line for line in Path("/proc/self/smaps").read_text().splitlines() if "ShmemPmdMapped" in line]
        assert any(int(line.split()[1]) >= 6 << 10 for line in mapped)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        FileMap(fd, nbytes, shared=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> files.JobFolder:
    monkeypatch.setattr(files, "MEMORY", tmp_path)
    return files.JobFolder.open("a1", "127.0.0.1:1", b"secret")


def test_a_file_is_free_while_nobody_else_has_it(folder: files.JobFolder) -> None:
    made = files.VersionFiles(folder, "store/0", 8192, 2)
    memory = files.map_buffer(made.descriptors[0], 8192)
    memory[:] = b"x" * 8192
    path = made.publish(0, 1, 1) / files.MODEL
    assert made.take(0), "the one that fills it has it, which does not count"
    with path.open("rb") as opened:
        assert not made.take(0)
        private = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)
    assert not made.take(0), "it is mapped"
    made.withdraw(0)
    assert not path.exists()
    assert private[8:12] == b"xxxx"
    assert not made.take(0), "it is mapped, though it has no name"
    private.close()
    assert made.take(0)
    assert made.take(1)
    made.close()
    assert list(files.MEMORY.iterdir()) == []


def test_who_has_found_a_name_and_opens_it_too_late_finds_no_version(folder: files.JobFolder) -> None:
    layout = layout_of(TENSORS)
    made = files.VersionFiles(folder, "store/0", layout.nbytes, 1)
    memory = files.map_buffer(made.descriptors[0], layout.nbytes)
    header = layout.header(Manifest(0, 1, 0, (0,) * len(layout.buckets)))
    files.write_header(memory, header)
    path = made.publish(0, 1, 1) / files.MODEL
    late = made._names[0]  # what a name leads to
    assert bytes(files.map_version(path, layout.nbytes)[: layout.data]) == header
    with safe_open(late, "pt") as opened:
        assert set(opened.keys()) == {t.name for t in TENSORS}
    del opened
    made.withdraw(0)
    assert made.take(0)
    with pytest.raises(FileNotFoundError):
        files.map_version(late, layout.nbytes)
    with pytest.raises(SafetensorError):
        safe_open(late, "pt").__enter__()
    files.write_header(memory, header)
    assert bytes(files.map_version(late, layout.nbytes)[: layout.data]) == header
    made.close()


def test_who_opens_a_file_while_it_is_looked_at_is_not_ended_by_a_signal(folder: files.JobFolder) -> None:
    made = files.VersionFiles(folder, "store/0", 4096, 1)
    path = made.publish(0, 1, 1) / files.MODEL
    program = f"for _ in range(20000): open({str(path)!r}, 'rb').close()"
    other = subprocess.Popen([sys.executable, "-c", program])
    while other.poll() is None:
        made.take(0)
    assert other.returncode == 0
    made.close()


def test_the_newest_version_is_found_and_names_do_not_come_again(folder: files.JobFolder) -> None:
    made = files.VersionFiles(folder, "store/0", 4096, 2)
    first = made.publish(0, 1, 1)
    second = made.publish(1, 2, 2)
    assert (made.path / files.CURRENT).resolve() == second.resolve()
    assert first.exists()
    made.withdraw(0)
    assert sorted(p.name for p in made.path.iterdir()) == ["2", "current"]
    assert (second / files.MODEL).stat().st_mode & 0o777 == 0o400
    assert (made.path.stat().st_mode & 0o777, folder.path.stat().st_mode & 0o777) == (0o700, 0o700)
    made.close()


def test_folders_that_nobody_keeps_are_removed(folder: files.JobFolder) -> None:
    assert files.living_jobs() == ["a1"]
    left = files.job_folder("b2")
    left.mkdir()
    (left / "owner").touch()
    other = files.MEMORY / "somebody-else"
    other.mkdir()
    files.remove_left("a1")
    files.remove_left()
    assert not left.exists()
    assert folder.path.exists()
    assert other.exists()
    assert files.find_job("a1") == ("127.0.0.1:1", b"secret")
    with pytest.raises(ArgumentError, match=r"no job 'b2' of this user publishes versions on this machine \(a1 does\)"):
        files.find_job("b2")
    folder.close()
    assert files.living_jobs() == []


@contextlib.contextmanager
def most_bytes(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_is_not_there_is_an_error_and_leaves_nothing(folder: files.JobFolder) -> None:
    with nothing_kept():
        again = files.JobFolder.open("a1", "", b"")
        with most_bytes(4096), pytest.raises(OutOfMemory, match=r"publish= needs 2 snapshot buffers of 8 KiB"):
            files.VersionFiles(again, "store/0", 8192, 2)
    assert sorted(path.name for path in folder.path.rglob("*")) == ["buffers", "job", "owner"]
    folder.close()
    assert not folder.path.exists()


def test_where_the_folder_is_too_small_versions_are_files_of_the_kernels_own(
    folder: files.JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_in_folder", lambda name, nbytes: None)
    layout = layout_of(TENSORS)
    with nothing_kept():
        again = files.JobFolder.open("a1", "", b"")
        made = files.VersionFiles(again, "store/0", layout.nbytes, 2)
        memory = files.map_buffer(made.descriptors[1], layout.nbytes)
        memory[: layout.data] = layout.header(Manifest(0, 1, 0, (0,) * len(layout.buckets)))
        path = made.publish(1, 1, 1) / files.MODEL
        assert str(path.resolve()).startswith("/memfd:")
        with safe_open(path, "pt") as opened:
            assert not made.take(1)
            assert set(opened.keys()) == {t.name for t in TENSORS}
        del opened
        made.withdraw(1)
        assert made.take(1)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(made.descriptors[1], 0)
        made.close()
        memory.release()


# ---- into a module


@pytest.mark.parametrize("elements", [1000, 1 << 18])
def test_what_is_copied_into_a_tensor_is_a_change_that_autograd_sees(elements: int) -> None:
    weight = torch.nn.Parameter(torch.full((elements,), 2.0))
    loss = (weight * weight).sum()
    with torch.no_grad():
        copy_into(weight, torch.full((elements,), 3.0))
        copy_into(weight, weight.detach())  # the tensor itself, as after load_state_dict(assign=True)
    assert (weight == 3.0).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_copied_into_a_tensor_without_a_history_is_no_error() -> None:
    with torch.inference_mode():
        weight = torch.zeros(1 << 18)
    with torch.inference_mode():
        copy_into(weight, torch.ones(1 << 18))
    assert (weight == 1.0).all()
