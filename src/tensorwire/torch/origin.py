"""The origin of a `StoreOptimizer`: a class and its options, or an existing optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.store.arithmetic import NAMED
from tensorwire.store.find_rule import find_rule
from tensorwire.store.foreign import import_path
from tensorwire.store.function_rules import FunctionOptimizer
from tensorwire.store.rule_names import ASSIGN, MEAN, is_foreign
from tensorwire.store.rules import IMPLEMENTATION, rule_name, with_implementation
from tensorwire.torch import options as options_
from tensorwire.torch.arguments import Named, named_groups


@dataclass(frozen=True)
class Origin:
    """The rule, the class that stands for it here, groups of (name, parameter) pairs, the class's defaults.

    ``state``: a ``state_dict`` to begin from. ``arguments``: what the constructor takes of a class that is not on the
    list of torch's own.
    """

    rule: str
    optimizer_class: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    state: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def find_origin(given: Any, optimizer: Any, options: Mapping[str, Any], *, here: bool = False) -> Origin:
    """Reads the arguments of `StoreOptimizer`: (parameters, rule), (parameters, optimizer) or (optimizer).

    A rule is a class, a function, or the name of one. ``here``: it runs in this worker, as the user gives it; servers
    choose the fastest implementation, and look after what that lacks.

    Raises `ArgumentError` or `Unsupported`.
    """
    if isinstance(given, torch.optim.Optimizer):
        if optimizer is not None:
            raise ArgumentError("pass an optimizer alone, or second, after model.named_parameters()")
        return _of_instance(given, None, options, here)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, given, options, here)
    if isinstance(optimizer, str) and optimizer not in NAMED:
        optimizer = find_rule(optimizer)
    if isinstance(optimizer, (str, FunctionType)):
        return _of_function(optimizer, named_groups(given), dict(options))
    rule, groups = rule_name(optimizer), named_groups(given)
    if is_foreign(rule):
        return _of_foreign(rule, optimizer, groups, dict(options))
    chosen = dict(options) if here else with_implementation(optimizer, dict(options))
    return Origin(rule, optimizer, groups, options_.defaults(optimizer, chosen))


def _of_function(function: str | FunctionType, groups: list[dict[str, Any]], options: dict[str, Any]) -> Origin:
    """A function, which takes any options; or ``"sum"`` and its like, which take none."""
    taken = [key for group in (options, *groups) for key in group if key not in ("params", "param_names")]
    if isinstance(function, str):
        if taken:
            raise ArgumentError(f"the rule {function!r} has no options, and there is {taken[0]!r}")
        rule, path = function, f"{NAMED[function].__module__}:{NAMED[function].__name__}"
    else:
        if "function" in taken:
            raise ArgumentError("the option 'function' names the rule: call yours otherwise")
        rule = path = import_path(function)
    found = _of_foreign(rule, FunctionOptimizer, groups, {"function": path, **options})
    return found if is_foreign(rule) else replace(found, rule=MEAN if rule == ASSIGN else rule)


def _of_instance(instance: torch.optim.Optimizer, given: Any, options: Mapping[str, Any], here: bool) -> Origin:
    kind = type(instance).__name__
    rule = rule_name(type(instance))
    if options:
        raise ArgumentError(f"option {next(iter(options))!r} belongs to the {kind} that is given: set it there")
    if hasattr(instance.step, "_wrapped_by_lr_sched"):
        raise ArgumentError(f"a learning rate scheduler holds the {kind}: construct it on the StoreOptimizer instead")
    if instance._optimizer_step_pre_hooks or instance._optimizer_step_post_hooks:
        raise ArgumentError(f"the {kind} has step hooks: register them on the StoreOptimizer instead")
    names = None if given is None else _names(given)
    foreign = is_foreign(rule)
    arguments = arguments_of(instance) if foreign else {}
    chosen = {} if foreign or here else _implementation(instance)
    groups = [
        {**{k: v for k, v in g.items() if k != "param_names"}, **chosen, "params": _pairs(kind, g, names)}
        for g in instance.param_groups
    ]
    state = instance.state_dict() if any(instance.state.values()) else None
    return Origin(rule, type(instance), named_groups(groups), {**instance.defaults, **chosen}, state, arguments)


def _of_foreign(
    rule: str, cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], options: dict[str, Any]
) -> Origin:
    """Its groups are what its own constructor makes of them."""
    for key, value in options.items():
        options_.plain_value(key, value)
    bare = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    try:
        made = cls(bare, **options)
    except Exception as error:
        raise ArgumentError(f"{cls.__name__}: {type(error).__name__}: {error}") from None
    names = {id(p): name for group in groups for name, p in group["params"]}
    named = [{**g, "params": _pairs(cls.__name__, g, names)} for g in made.param_groups]
    return Origin(rule, cls, named, dict(made.defaults), None, options)


def arguments_of(instance: torch.optim.Optimizer) -> dict[str, Any]:
    """What to construct another one from, for servers. Raises `Unsupported` where the optimizer does not tell."""
    found: dict[str, Any] = {}
    for cls in type(instance).__mro__:
        if "__init__" not in vars(cls):
            continue
        constructor: Any = vars(cls)["__init__"]
        parameters = list(inspect.signature(constructor).parameters.values())[2:]  # without self and params
        for p in parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                continue
            if p.name not in instance.defaults:
                raise Unsupported(
                    f"the {type(instance).__name__} does not expose its {p.name!r}: pass the class and its options, "
                    f"StoreOptimizer(model.named_parameters(), {type(instance).__name__}, {p.name}=...)"
                )
            found[p.name] = options_.plain_value(p.name, instance.defaults[p.name])
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return found  # whatever else it takes, it takes none of its bases' options
    return found


def _names(given: Any) -> dict[int, str]:
    groups = named_groups(given)
    if len(groups) > 1 or groups[0].keys() != {"params"}:
        raise ArgumentError("the optimizer that is given has the groups: pass model.named_parameters() beside it")
    return {id(p): name for name, p in groups[0]["params"]}


def _pairs(kind: str, group: Mapping[str, Any], names: Mapping[int, str] | None) -> list[Named]:
    if names is None:
        if "param_names" not in group:
            raise ArgumentError(
                f"the {kind} has no names for its parameters: build it from model.named_parameters(), or pass "
                f"StoreOptimizer(model.named_parameters(), optimizer)"
            )
        return list(zip(group["param_names"], group["params"], strict=True))
    for p in group["params"]:
        if id(p) not in names:
            raise ArgumentError(
                f"the {kind} has a parameter {list(p.shape)} that is not among those with names: pass the "
                "named_parameters() of all its models"
            )
    return [(names[id(p)], p) for p in group["params"]]


def _implementation(instance: torch.optim.Optimizer) -> dict[str, Any]:
    """How updates are computed: as the optimizer's options say, else fused where that exists."""
    if any(group.get(key) is not None for group in instance.param_groups for key in IMPLEMENTATION[:2]):
        return {}
    options = {k: v for k, v in instance.param_groups[0].items() if k not in ("params", "param_names")}
    found = with_implementation(type(instance), options_.known(type(instance), options))
    return {"fused": True} if found.get("fused") else {}
