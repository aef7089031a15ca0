"""Optimizers that are not torch's own: imported by path, and given all tensors at once.

A rule ``package.module:Class`` names one. Servers import it, as the workers did; nothing of it is sent but its name,
the folders that worker 0 found it in, and a hash of the files that define it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import threading
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import torch

from tensorwire.errors import PlanMismatch, Unsupported

_importing = threading.Lock()  # stores begin in threads of one server


def is_foreign(rule: str) -> bool:
    """Whether a rule is an import path."""
    return ":" in rule


def import_path(optimizer: type[torch.optim.Optimizer]) -> str:
    """The rule of a class. Raises `Unsupported` for what servers cannot import or drive, with what to do about it."""
    module, name = optimizer.__module__, optimizer.__qualname__
    if module in ("__main__", "__mp_main__"):
        raise Unsupported(
            f"servers cannot import {name}, which the script itself defines: put it into a module beside the script"
        )
    if "<locals>" in name:
        raise Unsupported(f"servers cannot import {name}, which a function defines: put it at the top of its module")
    try:
        found = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        found = None
    if found is not optimizer:
        raise Unsupported(f"servers cannot import {module}.{name}: that name is not this class")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(f"{name}.step() needs a closure that evaluates the model, which a server cannot")
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise Unsupported(f"{name} changes parameters in methods train and eval, too: servers run its step() alone")
    return f"{module}:{name}"


def folders_of(optimizer: type[torch.optim.Optimizer]) -> list[str]:
    """Where this process found the class: entries of `sys.path`, and the script's own folder."""
    found = []
    for name in [*(cls.__module__.partition(".")[0] for cls in _defining(optimizer)), "__main__"]:
        file = _file(name)
        if file is not None:
            found.append(file.parent.parent if file.name == "__init__.py" else file.parent)
    known = {Path(entry).absolute() for entry in sys.path}
    return [str(folder) for folder in dict.fromkeys(found) if folder in known]


def source_of(optimizer: type[torch.optim.Optimizer]) -> str:
    """A hash of the files that define the class and its bases, as far as they are not torch's: all are to run one."""
    digest = hashlib.sha256()
    for cls in _defining(optimizer):
        file = _file(cls.__module__)
        if file is not None and file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _file(module: str) -> Path | None:
    name = getattr(sys.modules.get(module), "__file__", None)
    return Path(name).absolute() if name else None


def _defining(optimizer: type[torch.optim.Optimizer]) -> list[type]:
    mro = inspect.getmro(optimizer)
    return [c for c in mro if c is not object and c.__module__.partition(".")[0] not in ("torch", "typing", "abc")]


def load_class(rule: str, folders: Sequence[str], source: str) -> type[torch.optim.Optimizer]:
    """The class of a rule, on a server. Raises `Unsupported` or `PlanMismatch`, in one line for people."""
    module, _, name = rule.partition(":")
    with _importing:
        before = list(sys.path)
        new = [folder for folder in folders if folder not in before]
        sys.path[:0] = new
        try:
            found = attrgetter(name)(importlib.import_module(module))
        except Exception as error:
            raise Unsupported(
                f"cannot import the optimizer {name} from {module} ({type(error).__name__}: {error}): install that "
                "module on the servers' machines, or put it into the script's folder there"
            ) from None
        finally:
            sys.path[:] = [*before, *new]  # for what it imports later; servers' own modules stay the first
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise Unsupported(f"{module}.{name} is not an optimizer on the server")
    if source_of(found) != source:
        raise PlanMismatch(
            f"{_file(module)} on the server is not the {module} that workers have: install one everywhere"
        )
    return found
