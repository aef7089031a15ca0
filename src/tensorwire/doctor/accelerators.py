"""Accelerators: what the kernel's drivers know, what PyTorch sees, and what shares memory with them."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from tensorwire.doctor import accelerator_probe
from tensorwire.doctor.accelerator_probe import Seen
from tensorwire.doctor.findings import Finding, Level, Section
from tensorwire.launch.start import module_command

NVIDIA = Path("/proc/driver/nvidia")
AMD = Path("/sys/class/kfd/kfd/topology/nodes")
DEV, MODULES, LOADED = Path("/dev"), Path("/sys/module"), Path("/proc/modules")
_FILES = ("nvidia[0-9]*", "kfd", "accel/accel[0-9]*", "davinci[0-9]*")  # in /dev, where there is an accelerator
_SECONDS = 60.0  # some drivers take long to start


def accelerators() -> Section:
    """All about accelerators. PyTorch is asked only where one may be, because that takes seconds."""
    return Section("accelerators", (gpus(), *(pytorch_sees() if may_be_here() else ()), *gpudirect()))


def gpus(nvidia: Path = NVIDIA, amd: Path = AMD) -> Finding:
    """The GPUs that the kernel's drivers know."""
    models = Counter(_nvidia(path) for path in sorted(nvidia.glob("gpus/*/information")))
    radeons = sum(_is_gpu(path) for path in amd.glob("*/properties"))
    if radeons:
        models["AMD"] = radeons
    return Finding("GPUs", _counts(models) or "none seen", number=models.total())


def _counts(models: Counter[str]) -> str:
    return ", ".join(f"{count} {model}" for model, count in models.items())


def _nvidia(path: Path) -> str:
    return next((line.partition(":")[2].strip() for line in _lines(path) if line.startswith("Model:")), "NVIDIA")


def _is_gpu(path: Path) -> bool:
    """The driver lists processors, too; they have no SIMD units."""
    words = dict(line.split(maxsplit=1) for line in _lines(path) if " " in line)
    return int(words.get("simd_count", "0")) > 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def may_be_here(dev: Path = DEV) -> bool:
    """Whether PyTorch may see an accelerator. Any graphics has a file in ``dri``: that counts for Intel's PyTorch."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return False
    return any(any(dev.glob(name)) for name in (*_FILES, *(("dri/renderD*",) if "xpu" in found else ())))


def ask() -> Seen:
    """What PyTorch says, in a process of its own. Raises `OSError` where that fails."""
    try:
        words = module_command(accelerator_probe.__name__)
        done = subprocess.run(words, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        return msgspec.json.decode(done.stdout, type=Seen)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer in {_SECONDS:.0f} s") from None
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(said[-1] if said else f"it ended with status {done.returncode}") from None


def pytorch_sees(ask: Callable[[], Seen] = ask) -> Iterator[Finding]:
    """The accelerators that jobs can use, and whether these take the memory that servers map."""
    try:
        seen = ask()
    except OSError as error:
        yield Finding("PyTorch sees", f"failed: {error}", "note", "torch.accelerator must work for jobs on devices")
        return
    if not seen.kind:
        advice = "install a PyTorch that is built for this device; does CUDA_VISIBLE_DEVICES or the like hide it?"
        yield Finding("PyTorch sees", "none", "note", advice, 0)
        return
    yield Finding("PyTorch sees", f"{seen.kind}: {_counts(Counter(seen.names))}", number=len(seen.names))
    if seen.refusal:
        advice = "gradients and parameters on devices take one more copy, through page-locked memory"
        yield Finding("page-locking", f"no: {seen.refusal}", "note", advice)
    else:
        yield Finding("page-locking", f"works: {seen.kind} reaches memory that servers map, also where it is read-only")


def gpudirect(
    nvidia: Path = NVIDIA, modules: Path = MODULES, loaded: Path = LOADED, release: str | None = None
) -> Iterator[Finding]:
    """The two ways of a NIC to an NVIDIA GPU's memory, as far as files tell; nothing without NVIDIA's driver."""
    driver = " ".join(_lines(nvidia / "version"))
    if not driver:
        return
    peermem = (modules / "nvidia_peermem").is_dir() or any(s.startswith("nvidia_peermem ") for s in _lines(loaded))
    kernel = release or platform.release()
    old = tuple(int(n) if n.isdecimal() else 0 for n in kernel.split(".")[:2]) < (5, 12)
    proprietary = "Open Kernel Module" not in driver
    level: Level = "fine" if peermem or not (old or proprietary) else "note"
    advice = "for GPU memory over RDMA: modprobe nvidia_peermem, as root; else it is copied through the host's"
    yield Finding("nvidia_peermem", "loaded" if peermem else "not loaded", level, "" if peermem else advice)
    if old:
        yield Finding("dma-buf", f"no: Linux {kernel} has none for RDMA", level, "Linux 5.12, or nvidia_peermem")
    elif proprietary:
        advice = "install NVIDIA's open kernel modules, or load nvidia_peermem"
        yield Finding("dma-buf", "no: NVIDIA's proprietary kernel modules export none", level, advice)
    else:
        yield Finding("dma-buf", "NVIDIA's open kernel modules export it; registering tells whether the NIC takes it")
