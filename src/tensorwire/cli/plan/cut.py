"""The default cut of a model: as many bytes of parameters on each worker, in the order of layers.

It does not weigh the cost of computation.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorwire.errors import ArgumentError


def cut(layers: Mapping[str, int], workers: int) -> dict[str, int]:
    """The rank of the worker that runs each of the modules ``layers``: bytes of parameters by path, in the order in
    which they run.

    A module of up to half a worker's share is not cut in two. Raises `ArgumentError` for fewer modules than workers.
    """
    share = sum(layers.values()) / workers
    whole = _whole(layers, share / 2)
    left = sum(nbytes > 0 for nbytes in whole.values())
    if left < workers:
        raise ArgumentError(f"{workers} workers need as many modules with parameters; the model has {left}")
    before, last = 0, 0
    found: dict[str, int] = {}
    for path, nbytes in whole.items():
        if nbytes:  # what has none stays with the one before
            middle = int((before + nbytes / 2) / share)
            wanted = max(last, middle, workers - left)  # each worker gets one at least
            last = min(wanted, last + (before > 0), workers - 1)
            left -= 1
        found[path] = last
        before += nbytes
    return found


def _whole(layers: Mapping[str, int], most: float) -> dict[str, int]:
    """The modules of up to ``most`` bytes that are in no other such, and what is left of the others by themselves."""
    inside: dict[str, int] = {}
    for path, nbytes in layers.items():
        for module in _upwards(path):
            inside[module] = inside.get(module, 0) + nbytes
    found: dict[str, int] = {}
    for path, nbytes in layers.items():
        small = [module for module in _upwards(path) if module and inside[module] <= most]
        module = small[-1] if small else path
        found[module] = found.get(module, 0) + nbytes
    return found


def _upwards(path: str) -> list[str]:
    """The module, the one it is in, and so on; last the model, ``""``."""
    found = [path]
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found
