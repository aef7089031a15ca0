"""What the name of a rule stands for, in workers and on servers: a function, or a class of torch's optimizers.

A function is called as ``function(parameter, gradient, state, options)``. It gets tensors of torch, or arrays of numpy
if it says so by an attribute, ``function.numpy = True``. What it keeps between calls it puts into ``state``, as
numbers and arrays, which are saved and restored with the values; or as what numpy takes for arrays. What it keeps for
rows begins as zeros, or as what ``function.initial(options)`` returns, a number for each name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensorwire.store.arithmetic import NAMED, ArrayFunction
from tensorwire.store.foreign import imported, load_rule
from tensorwire.store.rule_names import ELEMENTWISE, WHOLE, is_foreign, no_rule
from tensorwire.store.store_layout import StoreSpec


def find_rule(rule: str, load: Callable[[str], Any] = imported, optimizers: Sequence[str] = ELEMENTWISE + WHOLE) -> Any:
    """The function or class. ``load`` imports a path; ``optimizers``: those of torch's that will do.

    Raises `ArgumentError` for a name that no rule has; and as ``load``.
    """
    if rule in NAMED:
        return NAMED[rule]
    if is_foreign(rule):
        return load(rule)
    if rule not in optimizers:
        raise no_rule(rule)
    import torch  # functions of arrays do without

    return getattr(torch.optim, rule)


def rule_of(spec: StoreSpec, optimizers: Sequence[str] = ELEMENTWISE + WHOLE) -> Any:
    """The same on a server, which imports only what worker 0 has named. Raises also as `load_rule`."""
    return find_rule(spec.rule, lambda rule: load_rule(rule, spec.folders, spec.sources, spec.groups[0]), optimizers)


def array_function(spec: StoreSpec) -> ArrayFunction | None:
    """The function of arrays that a rule is; None for other rules. Imports no framework. Raises as `load_rule`."""
    if spec.rule in NAMED:
        return NAMED[spec.rule]
    found = rule_of(spec) if is_foreign(spec.rule) else None
    return found if getattr(found, "numpy", False) else None
