"""The optimizer's state in the form of torch's ``state_dict``: assembled from the servers' pieces, and split again.

``Optimizer.state`` itself is empty, but while torch's own ``state_dict`` reads it, and while a state that was loaded
waits for the next step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorwire.store.client_state import fetch_state
from tensorwire.store.foreign import is_elementwise
from tensorwire.store.kept import join, number_item, pieces_of
from tensorwire.store.rule_names import is_foreign
from tensorwire.store.rules import is_whole
from tensorwire.store.sharding import ParameterSpec
from tensorwire.store.state_transfer import GROUP, MASTER, VALUE, Entry, Item
from tensorwire.store.store_client import StoreClient
from tensorwire.store.tensor_items import tensor_bytes, tensor_of, whole_item
from tensorwire.torch.foreign_state import ForeignChecker
from tensorwire.torch.layout import Checker, OptimizerClass, Options, Values, build, layouts
from tensorwire.torch.options import plain


@dataclass(frozen=True)
class Share:
    """The parameters of one store, in the plan's order; ``groups`` and their options at construction, ``fixed``."""

    client: StoreClient
    params: Sequence[torch.nn.Parameter]
    groups: Sequence[Options]
    fixed: Sequence[Options]


class SavedState:
    """What ``state_dict`` and ``load_state_dict`` of ``optimizer`` are made of."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, optimizer_class: OptimizerClass, rule: str, arguments: Options
    ) -> None:
        self._optimizer: torch.optim.Optimizer = weakref.proxy(optimizer)  # which has this
        self._class, self._rule, self._arguments = optimizer_class, rule, arguments
        self.pending = False  # whether ``optimizer.state`` is what the next step is to begin from
        self._numbers: dict[int, dict[str, Any]] = {}  # by group: what servers keep there, of what waits or is shown

    @contextlib.contextmanager
    def shown(self, shares: Sequence[Share]) -> Iterator[None]:
        """Inside it ``optimizer.state`` is what the servers keep, or what was loaded and waits."""
        if self.pending:
            yield
            return
        try:
            for share in shares:
                self._fetch(share)
            yield
        finally:
            self._optimizer.state, self._numbers = defaultdict(dict), {}

    def _fetch(self, share: Share) -> None:
        """Into ``optimizer.state``, in whole tensors. In other modes than Sync, parameters come as well."""

        def room(entry: Entry) -> memoryview | None:
            """Only the pieces of a master that say more than the parameter does are sent."""
            return tensor_bytes(share.params[entry.tensor].float()) if entry.key == MASTER else None

        items = (item for item in fetch_state(share.client) if item[0].kind != VALUE)
        for (tensor, key, kind), item in join(items, room).items():
            if kind == GROUP:
                group = share.groups[share.client.plan.tensors[tensor].group]
                self._numbers.setdefault(self._index(group), {})[key] = tensor_of(*item)
            else:
                self._optimizer.state[share.params[tensor]][key] = tensor_of(*item)

    def _index(self, group: Options) -> int:
        return next(i for i, each in enumerate(self._optimizer.param_groups) if each is group)

    def complete(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict``, with what the servers' optimizers keep in their groups themselves; inside of `shown`."""
        for index, numbers in self._numbers.items():
            state_dict["param_groups"][index].update(numbers)
        return state_dict

    def _checker(self, groups: Sequence[Options], fixed: Sequence[Options]) -> Checker:
        kind = ForeignChecker if is_foreign(self._rule) else Checker
        return kind(self._class, groups, fixed)

    def check(self, state_dict: dict[str, Any]) -> None:
        """Raises `ArgumentError` for a state that does not fit, before there is any store."""
        groups = self._optimizer.param_groups
        self._checker(groups, plain(groups)).checked(state_dict)

    @contextlib.contextmanager
    def taken(self, fixed: Sequence[Options]) -> Iterator[None]:
        """Inside it the stock ``load_state_dict`` checks first, against groups with the options ``fixed``.

        It keeps the state as it is in float32, and refuses by `ArgumentError`, before anything has changed. The
        dictionaries of ``param_groups`` stay the same.
        """
        optimizer, groups = self._optimizer, list(self._optimizer.param_groups)
        checker = self._checker(groups, fixed)
        found: dict[torch.Tensor, Values] = {}

        def check(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            options, state = checker.checked(given)
            found.update(state)
            return {"state": {}, "param_groups": options}

        def keep(_: torch.optim.Optimizer) -> None:
            for old, new in zip(groups, optimizer.param_groups, strict=True):
                old.clear()
                old.update(new)
            optimizer.param_groups = groups
            optimizer.state, self.pending = defaultdict(dict, found), True
            self._numbers = dict(enumerate(checker.numbers)) if isinstance(checker, ForeignChecker) else {}

        # After the user's hooks before loading, and before those after it.
        handles = [
            optimizer.register_load_state_dict_pre_hook(check),
            optimizer.register_load_state_dict_post_hook(keep, prepend=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def items(self, share: Share, server: int) -> Iterator[Item]:
        """What ``server`` is to keep of the state that waits."""
        return pieces_of(self._whole(share), share.client.plan, server)

    def _whole(self, share: Share) -> Iterator[Item]:
        tensors, rows = share.client.plan.tensors, self._rows(share)
        for g, group in enumerate(share.groups):
            first = next((i for i, t in enumerate(tensors) if t.group == g), None)
            for key, number in self._numbers.get(self._index(group), {}).items():
                if first is not None:
                    yield number_item(first, key, number, GROUP)
        for i, (spec, p) in enumerate(zip(tensors, share.params, strict=True)):
            for key, value in self._optimizer.state.get(p, {}).items():
                yield whole_item(i, key, value, rows(spec, key, value))

    def _rows(self, share: Share) -> Callable[[ParameterSpec, str, Any], bool]:
        """Whether a value that is kept for a tensor under a key is cut with it."""
        if is_whole(self._rule):
            return lambda *_: False
        if is_elementwise(self._rule):
            return lambda spec, _, value: isinstance(value, torch.Tensor) and tuple(value.shape) == spec.shape
        rows = []
        for options in zip(share.fixed, share.groups, strict=True):
            kept = [layouts(self._class, o, (2,), torch.float32)[0] for o in options]
            rows.append({MASTER, *(key for found in kept for key, layout in found.items() if layout.rows)})
        return lambda spec, key, _: key in rows[spec.group]

    def loaded(self) -> None:
        """The servers have the state that waited."""
        self._optimizer.state, self._numbers, self.pending = defaultdict(dict), {}, False

    def copied(self, state_dict: dict[str, Any]) -> tuple[Any, ...]:
        """How to make a copy, for ``__reduce_ex__``: a store has one end in each worker, so that it is a stock one."""
        if is_foreign(self._rule):
            return _detached, (
                self._class,
                [dict(g) for g in self._optimizer.param_groups],
                state_dict,
                self._arguments,
            )
        named = [
            {**g, "params": list(zip(g["param_names"], g["params"], strict=True))} for g in self._optimizer.param_groups
        ]
        return _detached, (self._class, named, state_dict, None)


def _detached(
    optimizer_class: OptimizerClass,
    groups: list[dict[str, Any]],
    state_dict: dict[str, Any],
    arguments: dict[str, Any] | None,
) -> torch.optim.Optimizer:
    made = build(optimizer_class, groups) if arguments is None else optimizer_class(groups, **arguments)
    stock = {i: {k: v for k, v in values.items() if k != MASTER} for i, values in state_dict["state"].items()}
    made.load_state_dict({**state_dict, "state": stock})
    return made
