"""Which module of a model runs on which worker, by users' dotted paths: a path covers everything below it."""

from __future__ import annotations

import difflib
import operator
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tensorwire.errors import ArgumentError
from tensorwire.graph.ir import worker_name

Ranks = Mapping[str, int | str]  # of users: module path, or "" for all: rank, or text such as "worker:1"
Workers = Mapping[str, str]  # module path: "worker 1"
_Paths = dict[torch.nn.Module, list[str]]


@dataclass(frozen=True)
class ModulePlacement:
    """A module of a placed model: its paths there (several, where parents share it), and that model's workers."""

    paths: tuple[str, ...]
    workers: Workers

    @property
    def path(self) -> str:
        """The first path, for messages."""
        return self.paths[0]

    @property
    def worker(self) -> str | None:
        """The worker of the module by its first path. None: nobody said one."""
        return worker_at(self.paths[0], self.workers)

    def below(self) -> dict[str, str]:
        """The workers of what lies in it, by paths relative to it."""
        return {p[len(self.path) :].lstrip("."): h for p, h in self.workers.items() if _inside(p, self.path)}


@dataclass(frozen=True)
class Owner:
    """Where a parameter or buffer lives: on the worker of the first module that has it. None: on every worker."""

    name: str
    worker: str | None


_placements: dict[int, tuple[weakref.ref[torch.nn.Module], ModulePlacement]] = {}
_owners = WeakIdKeyDictionary()  # Owner by tensor
_alone = WeakIdKeyDictionary()  # tensors of modules that were compiled before the model was placed


def rank_of(worker: object) -> int:
    """The rank that a user means by ``1`` or ``"worker:1"``. Raises `ArgumentError` for anything else."""
    # Dynamo traces this: nothing but integers and methods of strings. index() makes a symbolic integer a plain one.
    if isinstance(worker, int) and not isinstance(worker, bool) and worker >= 0:
        return operator.index(worker)
    digits = worker[7:] if isinstance(worker, str) and worker.startswith("worker:") else ""
    if not (digits.isdecimal() and digits.isascii()) or (len(digits) > 1 and digits.startswith("0")):
        raise ArgumentError(f"{worker!r} is not a worker: give its rank, such as 1 (or 'worker:1')")
    return int(digits)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, where ``model`` is what torch.compile made of it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def worker_at(path: str, workers: Workers) -> str | None:
    """The worker of the module ``path``: that of the longest path that covers it."""
    while path and path not in workers:
        path = path.rpartition(".")[0]
    return workers.get(path)


def checked(model: torch.nn.Module, workers: Ranks) -> dict[str, str]:
    """The names of ``workers``, by all paths of each module they name.

    Raises `ArgumentError` for what is not a worker or not a module of ``model``, and for two workers of one module.
    """
    return _checked(_paths_of(model), workers)


def known(model: torch.nn.Module) -> Workers | None:
    """The workers that ``model`` was registered with, as `checked` gives them."""
    placement = placement_of(model)
    return placement.workers if placement is not None and placement.path == "" else None


def register(model: torch.nn.Module, workers: Ranks) -> None:
    """Keeps where the modules, parameters and buffers of ``model`` are. Raises `ArgumentError`; changes nothing then.

    Warns of tied tensors that modules of several workers use: they cross in every step.
    """
    paths = _paths_of(model)
    named = _checked(paths, workers)
    for module, (path, *_) in paths.items():
        before = placement_of(module)
        if before is not None:
            what = f"module {path!r}" if path else "this model"
            raise ArgumentError(f"{what} was placed before, as {before.path!r}: unplace() that model first")
    for module, its in paths.items():
        key = id(module)
        module_ref = weakref.ref(module, lambda _, key=key: _placements.pop(key, None))  # type: ignore[misc]
        _placements[key] = (module_ref, ModulePlacement(tuple(its), named))
    for tensor, owners in _tensors_of(model, named):
        _owners[tensor] = owners[0]
        _warn_of_ties(tensor, owners)


def note_alone(tensors: Iterable[torch.Tensor]) -> None:
    """Parameters and buffers of a graph that each process runs by itself."""
    for tensor in tensors:
        _alone[tensor] = True


def was_alone(model: torch.nn.Module) -> bool:
    """Whether any of ``model`` was compiled before it was placed."""
    return any(tensor in _alone for tensor in (*model.parameters(), *model.buffers()))


def is_placed() -> bool:
    """Whether any model is placed."""
    return bool(_placements)


def forget(model: torch.nn.Module) -> None:
    """Undoes `register`."""
    for module in model.modules():
        _placements.pop(id(module), None)
    for tensor in (*model.parameters(), *model.buffers()):
        _owners.pop(tensor, None)  # type: ignore[no-untyped-call]


def placement_of(module: torch.nn.Module) -> ModulePlacement | None:
    """What is known of ``module``."""
    found = _placements.get(id(module))
    return found[1] if found is not None and found[0]() is module else None


def owner_of(tensor: torch.Tensor) -> Owner | None:
    """Where a parameter or buffer of a placed model lives; None if it is of no placed model."""
    owner: Owner | None = _owners.get(tensor)  # type: ignore[no-untyped-call]
    return owner


def worker_of_call(ids: Iterable[int], around: ModulePlacement | None) -> str | None:
    """The worker of what a module computes, found as the innermost of ``ids``, in a frame of the module ``around``.

    ``ids``: of the modules that were called, outermost first. They show through which parent a shared one was called.
    """
    placements = [found[1] for key in ids if (found := _placements.get(key)) is not None]
    if not placements:
        return around.worker if around is not None else None
    paths: tuple[str, ...] = around.paths if around is not None else ("",)
    for placement in placements if len(placements[-1].paths) > 1 else placements[-1:]:
        paths = tuple(p for p in placement.paths if any(_inside(p, q) for q in paths)) or placement.paths
    return worker_at(paths[0], placements[-1].workers)


def _inside(path: str, parent: str) -> bool:
    return path != parent and (not parent or path.startswith(f"{parent}."))


def _paths_of(model: torch.nn.Module) -> _Paths:
    paths: _Paths = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def _checked(paths: _Paths, workers: Ranks) -> dict[str, str]:
    if not isinstance(workers, Mapping):
        raise ArgumentError(f"workers must be a dict of module paths to ranks, not {type(workers).__name__}")
    modules = {path: module for module, its in paths.items() for path in its}
    said: dict[str, str] = {}
    for path, given in workers.items():
        worker = worker_name(rank_of(given))
        if path not in modules:
            close = difflib.get_close_matches(str(path), modules, n=3)
            hint = f"; close to it: {', '.join(map(repr, close))}" if close else ""
            raise ArgumentError(f"{path!r} is not a module of the model, as its named_modules() names them{hint}")
        for alias in paths[modules[path]]:
            if said.setdefault(alias, worker) != worker:
                raise ArgumentError(
                    f"{alias!r} and {path!r} are one module, on {said[alias]} and {worker}: name one of them"
                )
    return said


def _tensors_of(model: torch.nn.Module, workers: Workers) -> Iterable[tuple[torch.Tensor, list[Owner]]]:
    """Parameters and buffers, each with all modules that have it, the first one first."""
    found: dict[int, tuple[torch.Tensor, list[Owner]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None:
                    owner = Owner(f"{path}.{key}".lstrip("."), worker_at(path, workers))
                    found.setdefault(id(tensor), (tensor, []))[1].append(owner)
    return found.values()


def _warn_of_ties(tensor: torch.Tensor, owners: list[Owner]) -> None:
    first = owners[0]
    away = [o for o in owners if None not in (o.worker, first.worker) and o.worker != first.worker]
    if away:
        others = len({o.worker for o in away})
        warnings.warn(
            f"{first.name} of {first.worker} is tied to {', '.join(f'{o.name} of {o.worker}' for o in away)}: its "
            f"{tensor.numel() * tensor.element_size():,} bytes go to {others} other "
            f"worker{'s' * (others > 1)} in every step",
            stacklevel=4,
        )
