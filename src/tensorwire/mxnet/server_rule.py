"""MXNet's optimizers on the servers: a rule for keys and rows, given by import path.

An optimizer travels as the import path of its class and its plain attributes, in JSON. Every push carries the learning
rate, weight decay and ``rescale_grad`` of the worker's own optimizer for that key.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.store.foreign import loaded

RULE = f"{__name__}:update"
UPDATES = "updates"  # the state's count of updates
_SENT = ("lr", "wd", "rescale_grad")  # with every push
# What an optimizer of MXNet has for its own bookkeeping: workers apply it, and servers count by themselves.
_OWN = (
    "_all_index_update_counts",
    "_index_update_count",
    "allow_np_array",
    "begin_num_update",
    "idx2name",
    "lr_mult",
    "lr_scheduler",
    "num_update",
    "param_dict",
    "sym_info",
    "wd_mult",
    *_SENT,
)
_ONE_FOR_ALL = ("Nadam",)  # keep a number for all parameters together
_ELEMENTWISE = ("AdaDelta", "AdaGrad", "Adam", "Adamax", "FTML", "Ftrl", "NAG", "RMSProp", "SGD", "Signum")
_turn = threading.Lock()  # the optimizer is one for all of a server's threads


def settings_of(optimizer: Any) -> dict[str, str]:
    """The options of the rule that stand for an optimizer. Raises `Unsupported` for one that cannot travel."""
    cls = type(optimizer)
    if cls.__name__ in _ONE_FOR_ALL:
        raise Unsupported(f"{cls.__name__} keeps one schedule for all parameters, and servers have parts of them")
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise Unsupported(f"servers cannot import {cls.__qualname__}: put it into a module beside the script")
    plain = {}
    for name, value in vars(optimizer).items():
        if name in _OWN:
            continue
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise Unsupported(
                f"{cls.__name__} has a {type(value).__name__} as {name!r}, which cannot be sent to servers"
            )
        plain[name] = value
    return {"optimizer": f"{cls.__module__}:{cls.__qualname__}", "settings": json.dumps(plain, sort_keys=True)}


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer treats each element of a parameter by itself."""
    cls = type(optimizer)
    return cls.__name__ in _ELEMENTWISE and cls is getattr(mx.optimizer, cls.__name__)


def numbers_of(optimizer: Any, key: int | str) -> dict[str, float]:
    """What goes with the next push of a key: the optimizer counts it as an update."""
    optimizer._update_count(key)
    return {
        "lr": float(optimizer._get_lr(key)),
        "wd": float(optimizer._get_wd(key)),
        "rescale_grad": float(optimizer.rescale_grad),
    }


def update(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """The rule: one update of a key, or of some rows as if they were all."""
    with _turn:
        optimizer, names = _optimizer(options["optimizer"], options["settings"], str(parameter.dtype), parameter.ndim)
        for name in _SENT:
            setattr(optimizer, name, options[name])
        optimizer._index_update_count[0] = optimizer.num_update = int(state.get(UPDATES, 0))
        weight, pushed = over(parameter), over(gradient)
        if names is not None and not all(name in state for name in _leaves(names)):
            made = optimizer.create_state_multi_precision(0, weight)
            state.update(zip(_leaves(names), (each.asnumpy() for each in _leaves(made)), strict=True))
        kept = _spread(names, lambda name: over(state[name]))
        optimizer.update_multi_precision(0, weight, pushed, kept)
        for each in (weight, *_leaves(kept)):
            each.wait_to_read()
        state[UPDATES] = optimizer._index_update_count[0]


update.numpy = True  # type: ignore[attr-defined]
update.imports = lambda options: [options["optimizer"]]  # type: ignore[attr-defined]


def over(array: Any) -> Any:
    """An NDArray over the memory of an array."""
    return mx.nd.from_numpy(array.view(), zero_copy=True)  # which makes the array it is given read-only


@functools.lru_cache(maxsize=64)
def _optimizer(path: str, settings: str, dtype: str, ndim: int) -> tuple[Any, Any]:
    """The optimizer, and the names of what it keeps, in the form in which it keeps them."""
    cls = loaded(path)
    if not isinstance(cls, type) or not issubclass(cls, mx.optimizer.Optimizer):
        raise ArgumentError(f"the rule {RULE} takes an optimizer of MXNet, not {path}")
    optimizer: Any = object.__new__(cls)
    mx.optimizer.Optimizer.__init__(optimizer)
    vars(optimizer).update(json.loads(settings))
    like = mx.nd.zeros((1,) * ndim, dtype=dtype)
    counted = iter(range(1 << 10))
    return optimizer, _spread(optimizer.create_state_multi_precision(0, like), lambda _: f"state{next(counted)}")


def _leaves(value: Any) -> list[Any]:
    """The values in a nest of tuples and lists."""
    if value is None:
        return []
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, (tuple, list)) else [value]


def _spread(value: Any, make: Any) -> Any:
    """The same nest, with what ``make`` makes of each value."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        made: Sequence[Any] = type(value)(_spread(each, make) for each in value)
        return made
    return make(value)
