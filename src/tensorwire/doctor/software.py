"""Programs and packages that only some jobs need: PyTorch, a compiler."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from tensorwire.doctor.findings import Finding, Section
from tensorwire.errors import Unsupported
from tensorwire.extras import how_to_install
from tensorwire.files.mounting import check_can_mount


def software(environment: Mapping[str, str] = os.environ) -> Section:
    """What is installed. PyTorch is not imported, which would take seconds."""
    return Section(
        "software", (Finding("Python", platform.python_version()), pytorch(), compiler(environment), mounts())
    )


def pytorch() -> Finding:
    """Which PyTorch jobs would train with."""
    try:
        return Finding("PyTorch", version("torch"))
    except PackageNotFoundError:
        return Finding("PyTorch", "not installed", "note", f"tw.torch and plans need it: {how_to_install('torch')}")


def mounts() -> Finding:
    """Whether ``tensorwire mount`` works here, and how."""
    try:
        return Finding("tensorwire mount", check_can_mount())
    except Unsupported as error:
        what, _, advice = str(error).partition(": ")
        return Finding("tensorwire mount", f"no: {what}", "note", advice)


def compiler(environment: Mapping[str, str]) -> Finding:
    """What builds the allocator by which outputs of a compiled model are born in registered memory."""
    name = (shlex.split(environment.get("CXX", "")) or ["g++"])[0]
    found = shutil.which(name, path=environment.get("PATH"))
    if found is not None:
        return Finding("compiler", f"{found} (models over several workers need it, once for each PyTorch)")
    advice = 'only backend="tensorwire" needs it: install g++, or set CXX'
    return Finding("compiler", f"no {name}", "note", advice)
