"""Rules that are not torch's own: optimizers and functions, imported by path, and given whole tensors.

A rule ``package.module:Class`` names an optimizer's class, ``package.module:function`` a function. Servers import it,
as the workers did; nothing of it is sent but its name, the folders that worker 0 found it in, and a hash of the files
that define it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Sequence
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from tensorwire.errors import ArgumentError, PlanMismatch, Unsupported
from tensorwire.store.rule_names import check_path, file_of, folders_with, hash_of, is_foreign

if TYPE_CHECKING:
    import torch

Imported: TypeAlias = "type[torch.optim.Optimizer] | FunctionType"
_importing = threading.Lock()  # stores begin in threads of one server


def import_path(rule: Imported) -> str:
    """The rule of a class or function. Raises `Unsupported` for what servers cannot import or drive: what to do."""
    module, name = rule.__module__, rule.__qualname__
    if name.endswith("<lambda>"):
        raise Unsupported("servers cannot import a lambda, which has no name: define a function in a module")
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
    if found is not rule:
        kind = "function" if isinstance(rule, FunctionType) else "class"
        raise Unsupported(f"servers cannot import {module}.{name}: that name is not this {kind}")
    _check(rule, f"{module}:{name}")
    if getattr(rule, "numpy", False):
        raise Unsupported(f"the rule {name} takes numpy arrays, as it says, and here it would get tensors")
    return f"{module}:{name}"


def _check(rule: Any, path: str) -> None:
    """Raises `ArgumentError` or `Unsupported` for what servers cannot drive."""
    name = path.partition(":")[2]
    if isinstance(rule, FunctionType):
        try:
            inspect.signature(rule).bind(None, None, None, None)
        except TypeError:
            raise ArgumentError(
                f"the rule {path} must take (parameter, gradient, state, options), and takes {inspect.signature(rule)}"
            ) from None
        return
    import torch  # functions of arrays do without

    if not isinstance(rule, type) or not issubclass(rule, torch.optim.Optimizer):
        raise Unsupported(f"the rule {path} is a {type(rule).__name__}, no class of optimizers and no function")
    closure = inspect.signature(rule.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(f"{name}.step() needs a closure that evaluates the model, which a server cannot")
    if hasattr(rule, "train") and hasattr(rule, "eval"):
        raise Unsupported(f"{name} changes parameters in methods train and eval, too: servers run its step() alone")


@functools.cache
def imported(rule: str) -> Imported:
    """The class or function of an import path. Raises `ArgumentError` or `Unsupported`, in one line for people."""
    check_path(rule)
    module, _, name = rule.partition(":")
    try:
        found = attrgetter(name)(importlib.import_module(module))
    except Exception as error:
        raise Unsupported(
            f"cannot import the rule {name} from {module} ({type(error).__name__}: {error}): install that "
            "module on the servers' machines, or put it into the script's folder there"
        ) from None
    _check(found, rule)
    return cast("Imported", found)


def is_elementwise(rule: str) -> bool:
    """Whether a rule is a function that says of itself, by an attribute, that it may be given parts of tensors."""
    return is_foreign(rule) and bool(getattr(imported(rule), "elementwise", False))


def folders_of(rule: str) -> list[str]:
    """Where this process found the rule: entries of `sys.path`, and the script's own folder."""
    return folders_with(file_of(module.partition(".")[0]) for module in _defining(imported(rule)))


def source_of(rule: str) -> str:
    """A hash of the files that define the rule and its bases, as far as they are not torch's: all are to run one."""
    return hash_of(file_of(module) for module in _defining(imported(rule)))


def _defining(rule: Imported) -> list[str]:
    if isinstance(rule, FunctionType):
        return [rule.__module__]
    mro = inspect.getmro(rule)
    modules = [c.__module__ for c in mro if c is not object]
    return [m for m in modules if m.partition(".")[0] not in ("torch", "typing", "abc")]


def load_rule(rule: str, folders: Sequence[str], source: str) -> Imported:
    """The class or function, on a server. Raises `Unsupported`, `ArgumentError` or `PlanMismatch`, in one line.

    ``source``: from `source_of`, or the hash of its module's file alone; empty where the workers found none.
    """
    with _importing:
        before = list(sys.path)
        new = [folder for folder in folders if folder not in before]
        sys.path[:0] = new
        try:
            found = imported(rule)
        finally:
            sys.path[:] = [*before, *new]  # for what it imports later; servers' own modules stay the first
    file = file_of(rule.partition(":")[0])
    if source and source not in (source_of(rule), hash_of([file])):
        raise PlanMismatch(
            f"{file} on the server is not the {rule.partition(':')[0]} that workers have: install one everywhere"
        )
    return found
