"""Programs and packages that only some jobs need: PyTorch, a compiler, GPUs."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tensorwire.doctor.findings import Finding, Section
from tensorwire.extras import how_to_install

NVIDIA = Path("/proc/driver/nvidia/gpus")
AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def software(environment: Mapping[str, str] = os.environ) -> Section:
    """What is installed. PyTorch is not imported, which would take seconds."""
    return Section("software", (Finding("Python", platform.python_version()), pytorch(), compiler(environment), gpus()))


def pytorch() -> Finding:
    """Which PyTorch jobs would train with."""
    try:
        return Finding("PyTorch", version("torch"))
    except PackageNotFoundError:
        return Finding("PyTorch", "not installed", "note", f"tw.torch and plans need it: {how_to_install('torch')}")


def compiler(environment: Mapping[str, str]) -> Finding:
    """What builds the allocator by which outputs of a compiled model are born in registered memory."""
    name = (shlex.split(environment.get("CXX", "")) or ["g++"])[0]
    found = shutil.which(name, path=environment.get("PATH"))
    if found is not None:
        return Finding("compiler", f"{found} (models over several workers need it, once for each PyTorch)")
    advice = 'only backend="tensorwire" needs it: install g++, or set CXX'
    return Finding("compiler", f"no {name}", "note", advice)


def gpus(nvidia: Path = NVIDIA, amd: Path = AMD) -> Finding:
    """The GPUs that the kernel's drivers know."""
    models = Counter(_nvidia(path) for path in sorted(nvidia.glob("*/information")))
    radeons = sum(_is_gpu(path) for path in amd.glob("*/properties"))
    if radeons:
        models["AMD"] = radeons
    if not models:
        return Finding("GPUs", "none seen", number=0)
    text = ", ".join(f"{count} {model}" for model, count in models.items())
    return Finding("GPUs", f"{text}: not used yet, parameters live on the CPU", number=models.total())


def _nvidia(path: Path) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "NVIDIA")


def _is_gpu(path: Path) -> bool:
    """The driver lists processors, too; they have no SIMD units."""
    try:
        words = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
    except OSError:
        return False
    return int(words.get("simd_count", "0")) > 0
