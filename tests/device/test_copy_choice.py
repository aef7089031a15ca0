"""Which kernel copies: its bits, that the chosen one is used, and how the choice is made, kept and read."""

from __future__ import annotations

import fcntl
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tensorwire import _native
from tensorwire._native import Memory
from tensorwire.device import LoopbackDevice, copy_choice
from tensorwire.device.copy_choice import KERNELS, Kernel, Steps, described, measure_copy, parse
from tensorwire.errors import ArgumentError

MIB = 1 << 20
TIMES = [(MIB, [1.0, 1.04, 2.0]), (4 * MIB, [3.0, 2.0, 2.5]), (16 * MIB, [9.0, 8.0, 4.0])]
STEPS: Steps = [(4 * MIB, "movsb"), (16 * MIB, "streaming")]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has made no choice, with a cache of its own, on a quiet machine."""
    before = _native.copy_steps()
    monkeypatch.delenv(copy_choice.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(copy_choice, "_origin", "")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    yield
    _native.set_copy_steps(before)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that measurements were given, which find TIMES."""
    seconds: list[float] = []

    def time_copies(given: float) -> list[tuple[int, list[float]]]:
        seconds.append(given)
        return TIMES

    monkeypatch.setattr(_native, "time_copies", time_copies)
    return seconds


# ---- the kernels


@pytest.mark.parametrize("kernel", KERNELS)
def test_bit_for_bit_at_any_place_and_of_any_size(kernel: Kernel) -> None:
    _native.set_copy_steps([(1, kernel)])
    used = _native.copied_by(kernel)
    chance = random.Random(kernel)
    room = 3 * MIB
    source, target = Memory.allocate(room), Memory.allocate(room)
    from_, to = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    np.copyto(from_, np.random.default_rng(0).integers(0, 256, room, np.uint8))
    sizes = [64 << 10, (64 << 10) + 1, 128 << 10, (128 << 10) + 63, MIB - 1, 2 * MIB + 127]
    for nbytes in sizes + [chance.randrange(64 << 10, 2 * MIB) for _ in range(60)]:
        there, here = chance.randrange(200), chance.randrange(200)
        to[:] = 0x5A
        _native.put(source, here, target, there, nbytes)
        assert np.array_equal(to[there : there + nbytes], from_[here : here + nbytes])
        assert (to[:there] == 0x5A).all()
        assert (to[there + nbytes :] == 0x5A).all()
    copies = _native.copied_by(kernel) - used
    assert copies == (0 if _native.copy_kernel(MIB) == "memcpy" else 66)


def test_pieces_of_something_large_are_copied_as_the_whole_would_be() -> None:
    _native.set_copy_steps([(8 * MIB, "streaming")])
    assert [_native.copy_is_large(n * MIB) for n in (7, 8)] == [False, True]
    if _native.copy_kernel(8 * MIB) == "memcpy":
        pytest.skip("this processor has no other kernel")
    source, target = np.arange(MIB, dtype=np.uint8), np.zeros(MIB, np.uint8)
    counts = []
    for part, nbytes in ((False, MIB), (True, MIB), (True, (64 << 10) - 1)):
        before = _native.copied_by("streaming")
        _native.gather(target[:nbytes], source[:nbytes], part)
        counts.append(_native.copied_by("streaming") - before)
        assert np.array_equal(target[:nbytes], source[:nbytes])
    assert counts == [0, 1, 0]


def test_a_write_uses_the_chosen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(copy_choice.VARIABLE, "streaming:1MiB")
    with LoopbackDevice() as device, LoopbackDevice() as target, device.connect(target.address) as channel:
        kernel = _native.copy_kernel(MIB)
        before = _native.copied_by(kernel)
        channel.write(device.allocate(MIB).view(), target.allocate(MIB).remote().view()).wait()
        assert _native.copied_by(kernel) - before == (kernel != "memcpy")


def test_a_measurement_times_each_kernel_that_is_here() -> None:
    found = _native.time_copies(60.0)
    assert [nbytes for nbytes, _ in found] == [n * MIB for n in (1, 2, 4, 8, 16)]
    for _, seconds in found:
        assert len(seconds) == len(KERNELS)
        assert 0 < seconds[0] < 60
    assert _native.time_copies(0.0) == []


# ---- the setting


def test_settings() -> None:
    assert parse("memcpy") == []
    assert parse("streaming:1MiB") == [(MIB, "streaming")]
    assert parse("movsb:64KiB, streaming:8MiB,memcpy:1GiB") == [
        (1 << 16, "movsb"),
        (8 * MIB, "streaming"),
        (1 << 30, "memcpy"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "fast",
        "streaming",
        "streaming:0MiB",
        "streaming:63KiB",
        "streaming:1",
        "streaming:8MiB,movsb:2MiB",
        "movsb:1MiB,",
        "memcpy,movsb:1MiB",
        "streaming:99999999999GiB",
        "streaming:1MB",
        "streaming:²MiB",
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(copy_choice.VARIABLE, text)
    before = _native.copy_steps()
    with pytest.raises(ArgumentError, match=r"TENSORWIRE_COPY=.*such as streaming:16MiB") as caught:
        LoopbackDevice()
    assert "\n" not in str(caught.value)
    assert _native.copy_steps() == before


def test_a_setting_wins_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, timed: list[float]) -> None:
    measure_copy()
    monkeypatch.setattr(copy_choice, "_origin", "")
    monkeypatch.setenv(copy_choice.VARIABLE, "memcpy")
    measure_copy()
    assert len(timed) == 1
    assert described() == "memcpy (set by TENSORWIRE_COPY)"


# ---- the measurement and its file


def only_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "tensorwire").glob("copy-*.json")
    return path


def test_it_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[float]) -> None:
    LoopbackDevice().close()
    assert timed == []  # opening a device only looks
    assert described() == "memcpy, streaming from 16 MiB (not measured yet)"
    measure_copy()
    path = only_file(tmp_path)
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    monkeypatch.setattr(copy_choice, "_origin", "")  # as in another process
    _native.set_copy_steps([])
    LoopbackDevice().close()
    measure_copy()
    assert timed == [copy_choice.SECONDS]
    here = [(nbytes, kernel) for nbytes, kernel in STEPS if _native.copy_kernel(nbytes) == kernel]
    assert _native.copy_steps() == here
    assert described().endswith("(measured on this processor)")


def test_beyond_what_was_measured_the_c_library_decides_rather_than_movsb() -> None:
    assert copy_choice._fastest(TIMES) == STEPS
    assert copy_choice._fastest(TIMES[:2]) == [(4 * MIB, "movsb"), (8 * MIB, "memcpy")]
    assert copy_choice._fastest(TIMES[:1]) == []


def _other(**changed: object) -> Callable[[bytes], bytes]:
    return lambda data: msgspec.json.encode({**msgspec.json.decode(data), **changed})


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"\xff" * 100,
        lambda data: b"[" * 100_000,
        _other(format=0),
        _other(processor="another"),
        _other(steps=[[4 * MIB, "fast"]]),
        _other(steps=[[4 * MIB, "movsb"], [MIB, "streaming"]]),
        _other(steps=[[8, "movsb"]]),
        _other(steps=[[2**70, "movsb"]]),
        _other(more=1),
    ],
)
def test_a_damaged_file_or_that_of_another_machine_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[float], change: Callable[[bytes], bytes]
) -> None:
    measure_copy()
    path = only_file(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    monkeypatch.setattr(copy_choice, "_origin", "")
    assert not copy_choice.choose_copy()
    measure_copy()  # and replaced
    assert len(timed) == 2
    assert copy_choice.choose_copy()


def test_what_is_no_file_of_this_user_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[float]
) -> None:
    measure_copy()
    path = only_file(tmp_path)
    monkeypatch.setattr(copy_choice, "_origin", "")
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        assert not copy_choice.choose_copy()
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    assert not copy_choice.choose_copy()
    path.unlink()
    os.mkfifo(path)
    assert not copy_choice.choose_copy()
    path.unlink()
    path.mkdir()
    measure_copy()  # which cannot be replaced
    assert not copy_choice.choose_copy()
    assert sorted(each.name for each in path.parent.iterdir()) == sorted([path.name, "copy.lock"])


def test_without_a_place_to_keep_it_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[float]
) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
        measure_copy()
    assert timed == []


def test_while_another_process_measures_nobody_else_does(tmp_path: Path, timed: list[float]) -> None:
    folder = tmp_path / "cache" / "tensorwire"
    folder.mkdir(parents=True)
    with (folder / "copy.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        measure_copy()
        assert timed == []
    measure_copy()
    assert timed == [copy_choice.SECONDS]


def test_what_was_measured_on_a_busy_machine_is_measured_again_on_a_quiet_one(
    monkeypatch: pytest.MonkeyPatch, timed: list[float]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    measure_copy()
    assert described().endswith("(measured on this processor while it was busy)")
    measure_copy()
    assert len(timed) == 1
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    for _ in range(2):
        measure_copy()
    assert len(timed) == 2
    assert described().endswith("(measured on this processor)")


def test_a_process_without_a_launcher_measures_aside(timed: list[float], tmp_path: Path) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = copy_choice.measure_copy_aside()
    assert thread is not None
    thread.join()
    assert timed == [copy_choice.SECONDS]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert copy_choice.measure_copy_aside() is None
