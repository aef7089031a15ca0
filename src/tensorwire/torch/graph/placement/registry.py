"""Which module of a model runs on which host, as users said it: by dotted paths, a path covering all below it."""

from __future__ import annotations

import difflib
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tensorwire.errors import ArgumentError

Hosts = Mapping[str, str]  # module path, or "" for all: host
_Paths = dict[torch.nn.Module, list[str]]


@dataclass(frozen=True)
class Spot:
    """A module of a placed model: its paths there (several, where parents share it), and that model's hosts."""

    paths: tuple[str, ...]
    hosts: Hosts

    @property
    def path(self) -> str:
        """The first path, for messages."""
        return self.paths[0]

    @property
    def host(self) -> str | None:
        """The host of the module by its first path. None: nobody said one."""
        return host_at(self.paths[0], self.hosts)

    def below(self) -> dict[str, str]:
        """The hosts of what lies in it, by paths relative to it."""
        return {p[len(self.path) :].lstrip("."): h for p, h in self.hosts.items() if _inside(p, self.path)}


@dataclass(frozen=True)
class Owner:
    """Where a parameter or buffer lives: on the host of the first module that has it. None: on every host."""

    name: str
    host: str | None


_spots: dict[int, tuple[weakref.ref[torch.nn.Module], Spot]] = {}
_owners = WeakIdKeyDictionary()  # Owner by tensor
_alone = WeakIdKeyDictionary()  # tensors of modules that were compiled before somebody said a host


def check_host(name: object) -> None:
    """Raises `ArgumentError` unless ``name`` is a host, such as ``worker:1``."""
    # Dynamo traces this: no more than methods of strings.
    digits = name[7:] if isinstance(name, str) and name.startswith("worker:") else ""
    if not (digits.isdecimal() and digits.isascii()) or (len(digits) > 1 and digits.startswith("0")):
        raise ArgumentError(f"a host is 'worker:' and the number of a worker, such as 'worker:1', not {name!r}")


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, where ``model`` is what torch.compile made of it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def host_at(path: str, hosts: Hosts) -> str | None:
    """The host of the module ``path``: that of the longest path that covers it."""
    while path and path not in hosts:
        path = path.rpartition(".")[0]
    return hosts.get(path)


def checked(model: torch.nn.Module, hosts: Hosts) -> dict[str, str]:
    """``hosts``, with all paths of each module they name.

    Raises `ArgumentError` for what is no host, no module of ``model``, or two hosts of one module.
    """
    return _checked(_paths_of(model), hosts)


def known(model: torch.nn.Module) -> Hosts | None:
    """The hosts that ``model`` was registered with, as `checked` gives them."""
    spot = spot_of(model)
    return spot.hosts if spot is not None and spot.path == "" else None


def register(model: torch.nn.Module, hosts: Hosts) -> None:
    """Keeps where the modules, parameters and buffers of ``model`` are. Raises `ArgumentError`; changes nothing then.

    Warns of tied tensors that modules of several hosts use: they cross in every step.
    """
    paths = _paths_of(model)
    hosts = _checked(paths, hosts)
    for module, (path, *_) in paths.items():
        before = spot_of(module)
        if before is not None:
            what = f"module {path!r}" if path else "this model"
            raise ArgumentError(f"{what} was placed before, as {before.path!r}: unplace() that model first")
    for module, its in paths.items():
        key = id(module)
        _spots[key] = (weakref.ref(module, lambda _, key=key: _spots.pop(key, None)), Spot(tuple(its), hosts))  # type: ignore[misc]
    for tensor, owners in _tensors_of(model, hosts):
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
    return bool(_spots)


def forget(model: torch.nn.Module) -> None:
    """Undoes `register`."""
    for module in model.modules():
        _spots.pop(id(module), None)
    for tensor in (*model.parameters(), *model.buffers()):
        _owners.pop(tensor, None)  # type: ignore[no-untyped-call]


def spot_of(module: torch.nn.Module) -> Spot | None:
    """What is known of ``module``."""
    found = _spots.get(id(module))
    return found[1] if found is not None and found[0]() is module else None


def owner_of(tensor: torch.Tensor) -> Owner | None:
    """Where a parameter or buffer of a placed model lives; None if it is of no placed model."""
    owner: Owner | None = _owners.get(tensor)  # type: ignore[no-untyped-call]
    return owner


def host_of_call(ids: Iterable[int], around: Spot | None) -> str | None:
    """The host of what a module computes, found as the innermost of ``ids``, in a frame of the module ``around``.

    ``ids``: of the modules that were called, outermost first. They tell by which of its parents a shared one was.
    """
    spots = [found[1] for key in ids if (found := _spots.get(key)) is not None]
    if not spots:
        return around.host if around is not None else None
    paths: tuple[str, ...] = around.paths if around is not None else ("",)
    for spot in spots if len(spots[-1].paths) > 1 else spots[-1:]:
        paths = tuple(p for p in spot.paths if any(_inside(p, q) for q in paths)) or spot.paths
    return host_at(paths[0], spots[-1].hosts)


def _inside(path: str, parent: str) -> bool:
    return path != parent and (not parent or path.startswith(f"{parent}."))


def _paths_of(model: torch.nn.Module) -> _Paths:
    paths: _Paths = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def _checked(paths: _Paths, hosts: Hosts) -> dict[str, str]:
    if not isinstance(hosts, Mapping):
        raise ArgumentError(f"hosts is a dict of module paths to hosts, not {type(hosts).__name__}")
    modules = {path: module for module, its in paths.items() for path in its}
    said: dict[str, str] = {}
    for path, host in hosts.items():
        check_host(host)
        if path not in modules:
            close = difflib.get_close_matches(str(path), modules, n=3)
            hint = f"; close to it: {', '.join(map(repr, close))}" if close else ""
            raise ArgumentError(f"{path!r} is no module of the model, as its named_modules() names them{hint}")
        for alias in paths[modules[path]]:
            if said.setdefault(alias, host) != host:
                raise ArgumentError(f"{alias!r} and {path!r} are one module, on {said[alias]} and {host}: say one host")
    return said


def _tensors_of(model: torch.nn.Module, hosts: Hosts) -> Iterable[tuple[torch.Tensor, list[Owner]]]:
    """Parameters and buffers, each with all who have it, the first module first."""
    found: dict[int, tuple[torch.Tensor, list[Owner]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None:
                    owner = Owner(f"{path}.{key}".lstrip("."), host_at(path, hosts))
                    found.setdefault(id(tensor), (tensor, []))[1].append(owner)
    return found.values()


def _warn_of_ties(tensor: torch.Tensor, owners: list[Owner]) -> None:
    first = owners[0]
    away = [o for o in owners if None not in (o.host, first.host) and o.host != first.host]
    if away:
        hosts = len({o.host for o in away})
        warnings.warn(
            f"{first.name} of {first.host} is tied to {', '.join(f'{o.name} of {o.host}' for o in away)}: its "
            f"{tensor.numel() * tensor.element_size():,} bytes go to {hosts} other host{'s' if hosts > 1 else ''} in "
            "every step",
            stacklevel=4,
        )
