"""What the doctor says of accelerators: on machines that are only folders here, and of this one's PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from tensorwire.doctor import accelerators
from tensorwire.doctor.accelerator_probe import Seen, look, page_lock_refusal
from tensorwire.doctor.findings import Finding
from tensorwire.torch import page_locking

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01\nGCC version: 12\n"


def test_gpus_are_counted_by_model(tmp_path: Path) -> None:
    nvidia, amd = tmp_path / "nvidia", tmp_path / "amd"
    assert accelerators.gpus(nvidia, amd) == Finding("GPUs", "none seen", number=0)
    for slot in ("0000:01:00.0", "0000:02:00.0"):
        (nvidia / "gpus" / slot).mkdir(parents=True)
        (nvidia / "gpus" / slot / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\n")
    for node, units in (("0", 0), ("1", 304)):
        (amd / node).mkdir(parents=True)
        (amd / node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\n")
    assert accelerators.gpus(nvidia, amd) == Finding("GPUs", "2 NVIDIA H200, 1 AMD", number=3)


@pytest.mark.parametrize(
    ("file", "torch_version", "asked"),
    [
        ("null", "2.13.0", False),
        ("nvidiactl", "2.13.0", False),
        ("nvidia0", "2.13.0", True),
        ("kfd", "2.13.0+rocm6.4", True),
        ("accel/accel0", "2.13.0", True),
        ("davinci3", "2.13.0+cpu", True),
        ("dri/renderD128", "2.13.0", False),
        ("dri/renderD128", "2.13.0+xpu", True),
        ("nvidia0", None, False),
    ],
)
def test_pytorch_is_asked_only_where_an_accelerator_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, torch_version: str | None, asked: bool
) -> None:
    def version(name: str) -> str:
        if torch_version is None:
            raise PackageNotFoundError(name)
        return torch_version

    monkeypatch.setattr(accelerators, "version", version)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert accelerators.may_be_here(tmp_path) == asked


def fails() -> Seen:
    raise OSError("no driver")


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda: Seen("cuda", ["H200", "H200"]), [("fine", "cuda: 2 H200", 2), ("fine", "works: cuda reaches", None)]),
        (lambda: Seen("xpu", ["Max"], "no call"), [("fine", "xpu: 1 Max", 1), ("note", "no: no call", None)]),
        (Seen, [("note", "none", 0)]),
        (fails, [("note", "failed: no driver", None)]),
    ],
)
def test_what_pytorch_sees(ask: Callable[[], Seen], expected: list[tuple[str, str, int | None]]) -> None:
    found = list(accelerators.pytorch_sees(ask))
    for one, (level, value, number) in zip(found, expected, strict=True):
        assert (one.level, one.number, bool(one.advice)) == (level, number, level == "note")
        assert one.value.startswith(value)


def test_the_process_that_is_asked_answers_what_this_one_sees() -> None:
    assert accelerators.ask() == look()


def test_a_process_that_fails_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    for text, why in (("echo first >&2; echo last >&2", "last"), ("exit 3", "it ended with status 3")):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        with pytest.raises(OSError, match=f"^{why}$"):
            accelerators.ask()
    monkeypatch.setattr(accelerators, "_SECONDS", 0.05)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(OSError, match="no answer in 0 s"):
        accelerators.ask()


def mapping(address: int) -> str:
    """Its line in this process's table of memory, without the address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.partition(" ")[2] for line in lines if int(line.partition("-")[0], 16) == address)


def test_memory_like_a_stores_is_page_locked_and_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, tuple[bool, str]] = {}
    seen = []

    def lock(address: int, nbytes: int, read_only: bool) -> None:
        locked[address] = (read_only, mapping(address))
        seen.append(locked[address])

    def unlock(address: int) -> None:
        del locked[address]

    monkeypatch.setitem(page_locking.DRIVERS, "toy", lambda: page_locking.Driver(lock, unlock))
    assert page_lock_refusal("toy") == ""
    assert [(read_only, line[:4], "memfd:" in line) for read_only, line in seen] == [
        (False, "rw-s", True),
        (True, "r--s", True),
    ]
    assert locked == {}


def test_why_memory_cannot_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert page_lock_refusal("toy") == "PyTorch has no call that page-locks existing memory for toy"
    unlocked: list[int] = []

    def lock(address: int, nbytes: int, read_only: bool) -> None:
        if read_only:
            raise RuntimeError("not read-only\nat line 7")

    monkeypatch.setitem(page_locking.DRIVERS, "toy", lambda: page_locking.Driver(lock, unlocked.append))
    assert page_lock_refusal("toy") == "the driver of toy refused: not read-only"
    assert len(unlocked) == 1


@pytest.mark.parametrize(
    ("driver", "kernel", "by", "peermem", "dma_buf", "level"),
    [
        (PROPRIETARY, "6.1.0", "", "not loaded", "no: NVIDIA's proprietary", "note"),
        (PROPRIETARY, "6.1.0", "folder", "loaded", "no: NVIDIA's proprietary", "fine"),
        (PROPRIETARY, "6.1.0", "table", "loaded", "no: NVIDIA's proprietary", "fine"),
        (OPEN, "5.12.1-generic", "", "not loaded", "NVIDIA's open kernel modules export it", "fine"),
        (OPEN, "5.4.0-26", "", "not loaded", "no: Linux 5.4.0-26", "note"),
    ],
)
def test_gpudirect(tmp_path: Path, driver: str, kernel: str, by: str, peermem: str, dma_buf: str, level: str) -> None:
    modules, loaded = tmp_path / "module", tmp_path / "modules"
    loaded.write_text("nvidia 6025216 2 nvidia_peermem_other, Live 0x0\nnvidia_peermemory 1 0 - Live 0x0\n")
    (modules / "nvidia").mkdir(parents=True)
    assert list(accelerators.gpudirect(tmp_path, modules, loaded, kernel)) == []
    (tmp_path / "version").write_text(driver)
    if by == "folder":
        (modules / "nvidia_peermem").mkdir()
    if by == "table":
        loaded.write_text(loaded.read_text() + "nvidia_peermem 16384 0 - Live 0x0000000000000000\n")
    one, other = accelerators.gpudirect(tmp_path, modules, loaded, kernel)
    assert (one.name, one.value, one.level) == ("nvidia_peermem", peermem, level)
    assert (other.name, other.level) == ("dma-buf", level)
    assert other.value.startswith(dma_buf)
    assert all(finding.advice for finding in (one, other) if level == "note")


def test_the_doctor_imports_no_pytorch() -> None:
    code = "import sys; from tensorwire.doctor import examine; examine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_doctor_shows_them_in_a_section() -> None:
    section = accelerators.accelerators()
    assert (section.title, section.findings[0].name) == ("accelerators", "GPUs")
    if torch.accelerator.is_available():
        assert any(finding.name == "PyTorch sees" and finding.number for finding in section.findings)
