"""Optimizers and functions that are not torch's own, which servers import by path.

A rule ``package.module:Class`` names an optimizer's class, ``package.module:function`` a function. Only its name, the
folders where worker 0 found it, and the hashes of its files are sent. A server imports a module only if worker 0 has
named it, and only after comparing its file and those of its packages.

A function of arrays may use classes that its options name: ``function.imports(options)`` returns their import paths.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from tensorwire.errors import ArgumentError, PlanMismatch, Unsupported
from tensorwire.store.rule_names import check_path, file_of, folders_with, hash_of, hashes_of, is_foreign, module_file

if TYPE_CHECKING:
    import torch

Imported: TypeAlias = "type[torch.optim.Optimizer] | FunctionType"
_importing = threading.Lock()  # stores begin in threads of one server
# Their files are not compared one by one, but their versions are, before any of this.
_COMPARED = ("torch", "tensorwire", "numpy", "mxnet", "tensorflow", "keras", "typing", "abc", "builtins")


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
    found = _import(rule)
    _check(found, rule)
    return cast("Imported", found)


def is_elementwise(rule: str) -> bool:
    """Whether a rule is a function that says of itself, by an attribute, that it may be given parts of tensors."""
    return is_foreign(rule) and bool(getattr(imported(rule), "elementwise", False))


def folders_of(rule: str) -> list[str]:
    """Where this process found the rule: entries of `sys.path`, and the script's own folder."""
    return folders_with(file_of(module.partition(".")[0]) for module in _defining(imported(rule)))


def sources_of(rule: str) -> dict[str, str]:
    """By module, the hashes of the files that define a rule and its bases: servers are to have the same."""
    return hashes_of(_defining(imported(rule)))


def named_by(rule: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a `StoreSpec` says of a rule of keys or rows that is an import path; nothing of other rules.

    The rule itself is not imported here: workers need not be able to.
    """
    if not is_foreign(rule):
        return {}
    module, _, name = rule.partition(":")
    modules = [module]
    for path in imports_of(getattr(sys.modules.get(module), name, None), options):
        modules += _defining(loaded(path))
    packages = [module_file(m.partition(".")[0]) for m in modules]
    return {"arguments": dict(options), "sources": hashes_of(modules), "folders": folders_with(packages)}


def imports_of(function: object, options: Mapping[str, Any]) -> list[str]:
    """The import paths of the classes that a function drives with these options."""
    found: list[str] = getattr(function, "imports", lambda _: [])(options)
    return found


def loaded(path: str) -> Any:
    """What an import path names, of a module that has been imported. Raises `Unsupported` for others."""
    module, _, name = path.partition(":")
    try:
        return attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        raise Unsupported(f"{module} has not been imported, or has no {name}") from None


def _defining(rule: Any) -> list[str]:
    if isinstance(rule, FunctionType):
        return [rule.__module__]
    modules = [c.__module__ for c in inspect.getmro(rule)]
    return [m for m in modules if m.partition(".")[0] not in _COMPARED]


def load_rule(
    rule: str, folders: Sequence[str], sources: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> Imported:
    """The class or function, on a server. Raises `Unsupported`, `ArgumentError` or `PlanMismatch`, in one line.

    Args:
        rule: Its import path.
        folders: Where worker 0 found it.
        sources: From `sources_of` or `named_by`: nothing is imported before all these files have been compared.
        options: With which a function is going to be called.
    """
    with _importing:
        before = list(sys.path)
        new = [folder for folder in folders if folder not in before]
        sys.path[:0] = new
        try:
            _compare(rule, sources)
            found = imported(rule)
            for path in imports_of(found, options or {}):
                module = path.partition(":")[0]
                if module not in sources and module.partition(".")[0] not in _COMPARED:
                    raise Unsupported(f"worker 0 has not said which file {module} is: servers do not import it")
                _import(path)
        finally:
            sys.path[:] = [*before, *new]  # for what it imports later; servers' own modules stay the first
    return found


def _compare(rule: str, sources: Mapping[str, str]) -> None:
    """Raises `PlanMismatch` where this process would import another file than the workers have."""
    for module, expected in sources.items():
        file = module_file(module)
        if file is None:
            raise _cannot(rule, ModuleNotFoundError(f"No module named {module!r}"))
        if not file.is_file() or hash_of(file) != expected:
            raise PlanMismatch(f"{file} on the server is not the {module} that workers have: install one everywhere")


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return attrgetter(name)(importlib.import_module(module))
    except Exception as error:
        raise _cannot(path, error) from None


def _cannot(path: str, error: Exception) -> Unsupported:
    module, _, name = path.partition(":")
    return Unsupported(
        f"cannot import the rule {name} from {module} ({type(error).__name__}: {error}): install that "
        "module on the servers' machines, or put it into the script's folder there"
    )
