"""The models that can be planned: built-in ones by name, or one defined in a script."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tensorwire.cli.plan import llama
from tensorwire.errors import ArgumentError
from tensorwire.models import MODELS

NAMES = ("alexnet", "inception", "vgg16", "lstm", "gru", "fcn5", "gpt2")


@dataclass(frozen=True)
class PlannedModel:
    """``make()`` makes the module, ``inputs()`` its arguments; ``workers``: the rank that runs each of its modules, if
    it says so.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Sequence[Any]]
    workers: Mapping[str, int | str] | None = None


def find_model(what: str, batch: int | None) -> PlannedModel:
    """The model of that name or script. Raises `ArgumentError` if there is none, or the script fails."""
    if what in NAMES:
        known = MODELS[what]
        size = batch or known.size
        _check_size(known.inputs(1, torch.Generator()), size)
        return PlannedModel(what, lambda: known.build(1), lambda: known.inputs(size, torch.Generator().manual_seed(0)))
    if what == "llama-70b":
        _check_size(llama.tokens(1), batch or 1)
        return PlannedModel(what, llama.model, lambda: llama.tokens(batch or 1))
    path = Path(what)
    if path.suffix != ".py" and not path.exists():
        raise ArgumentError(f"there is no model {what!r}: it is {', '.join(NAMES)}, llama-70b, or a Python file")
    if not path.is_file():
        raise ArgumentError(f"there is no script {what}")
    if path.suffix != ".py":
        raise ArgumentError(f"{what} is not a Python file: its name must end with .py")
    return _of_script(path, batch)


def _check_size(one: Sequence[torch.Tensor], batch: int) -> None:
    """Inputs are really made: a mistyped batch must not take the machine's memory. ``one``: those of one sample."""
    need = batch * sum(tensor.nbytes for tensor in one)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if need > most:
        raise ArgumentError(
            f"--batch {batch}: its inputs take {need / 2**30:,.1f} GiB; at most half of this machine's memory, "
            f"{most / 2**30:,.1f} GiB, is taken for them"
        )


def _of_script(path: Path, batch: int | None) -> PlannedModel:
    script = _Script(path)
    module = script.run(lambda: _import(path))
    for name in ("model", "inputs"):
        if not callable(getattr(module, name, None)):
            raise ArgumentError(f"{path} has no function {name}(): see tensorwire plan --help")
    takes = bool(inspect.signature(module.inputs).parameters)
    if batch is not None and not takes:
        raise ArgumentError(f"--batch {batch}: inputs() of {path} takes no batch: write def inputs(batch=8)")
    given = () if batch is None else (batch,)
    workers = getattr(module, "workers", None)
    if workers is not None and not isinstance(workers, dict):
        raise ArgumentError(f"{path}: workers must be a dict of module paths to ranks, not {type(workers).__name__}")
    make, inputs = partial(script.module, module.model), partial(script.inputs, module.inputs, given)
    return PlannedModel(path.stem, make, inputs, workers)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tensorwire_planned", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Script:
    """Runs what a user wrote, and reports an error there in one line, with its place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ArgumentError:
            raise
        except (Exception, SystemExit) as error:
            where = str(self.path.resolve())
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 0
            what = str(error).strip().partition("\n")[0]
            place = f"{self.path}, line {line}" if line else f"{self.path}"
            raise ArgumentError(f"{place}: {type(error).__name__}: {what}") from error

    def module(self, make: Callable[[], Any]) -> nn.Module:
        made = self.run(make)
        if not isinstance(made, nn.Module):
            raise ArgumentError(f"{self.path}: model() must return a torch.nn.Module, not {type(made).__name__}")
        return made

    def inputs(self, make: Callable[..., Any], given: tuple[int, ...]) -> Sequence[Any]:
        made = self.run(lambda: make(*given))
        if isinstance(made, torch.Tensor):
            return (made,)
        if not isinstance(made, (tuple, list)):
            raise ArgumentError(f"{self.path}: inputs() must return a tuple of arguments, not {type(made).__name__}")
        return tuple(made)
