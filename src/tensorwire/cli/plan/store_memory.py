"""The memory that a store takes on its servers for a model's parameters, and saves on the workers' devices.

All sizes come from the store's own plan and from what torch's optimizer keeps of such a parameter.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorwire.cli.plan.catalog import PlannedModel, find_model
from tensorwire.errors import ArgumentError
from tensorwire.sizes import counted, size_text
from tensorwire.store.rule_names import ELEMENTWISE, WHOLE
from tensorwire.store.rules import is_whole, with_implementation
from tensorwire.store.sharding import ParameterSpec, StorePlan, make_plan
from tensorwire.tables import print_table
from tensorwire.torch.layout import Layout, layouts
from tensorwire.torch.options import check_groups, defaults
from tensorwire.torch.sparse_rows import sparse_parameters

_HALF = ("bfloat16", "float16")


class ServerMemory(msgspec.Struct, frozen=True):
    """Bytes on one server: its parameters with a gradient of every worker, float32 masters, the optimizer's state."""

    registered: int
    masters: int
    state: int


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes on a worker's device if torch alone trained there.

    The store leaves parameters and gradients there: these a step copies up and down.
    """

    parameters: int
    gradients: int
    masters: int
    state: int


class StoreMemory(msgspec.Struct, frozen=True):
    """What a store takes. ``nbytes``: of all parameters; ``device``: None where nobody asked."""

    model: str
    optimizer: str
    workers: int
    parameters: int
    variables: int
    nbytes: int
    device: DeviceMemory | None
    servers: list[ServerMemory]

    def show(self) -> None:
        """Prints it."""
        variables = counted(self.variables, "variable")
        click.echo(f"{self.model}: {self.parameters:,} parameters in {variables}, {size_text(self.nbytes)}\n")
        if self.device is not None:
            _show_device(self.device, self.optimizer)
        rows = []
        for number, one in enumerate(self.servers):
            cells = (one.registered, one.masters, one.state, one.registered + one.masters + one.state)
            rows.append((f"server {number}", *(f"{cell:,}" for cell in cells)))
        print_table(("bytes on", "registered", "float32 masters", "optimizer's state", "together"), rows)
        click.echo(f"registered: the parameters, and the gradients of {counted(self.workers, 'worker')}")

    def json(self) -> str:
        """All of it, as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def _show_device(found: DeviceMemory, optimizer: str) -> None:
    stays, goes = found.parameters + found.gradients, found.masters + found.state
    rows = [
        ("parameters", found.parameters, found.parameters),
        ("gradients, until zero_grad()", found.gradients, found.gradients),
        ("float32 masters", found.masters, 0),
        ("optimizer's state", found.state, 0),
        ("together", stays + goes, stays),
    ]
    head = ("bytes on each device", f"{optimizer} there", "in the store")
    print_table(head, [(what, f"{there:,}", f"{here:,}") for what, there, here in rows])
    click.echo(f"saved on each device: {goes:,} bytes, {goes / max(1, stays + goes):.0%}")
    click.echo(f"copied a step, per worker: {found.gradients:,} bytes down, {found.parameters:,} bytes up\n")


class _Kept:
    """What an optimizer keeps of a parameter, by shape and type."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._class: type[torch.optim.Optimizer] = getattr(torch.optim, name)
        self._options = defaults(self._class, with_implementation(self._class, dict(options)))
        self._found: dict[tuple[tuple[int, ...], torch.dtype], tuple[dict[str, Layout], bool]] = {}

    def of(self, spec: ParameterSpec, p: torch.Tensor) -> list[Layout]:
        """Of half precision it is that of the float32 master. Raises `ArgumentError`."""
        if not p.is_floating_point() or not p.numel():
            return []  # never updated
        dtype = torch.float32 if spec.dtype in _HALF else getattr(torch, spec.dtype)
        if (key := (spec.shape, dtype)) not in self._found:
            check_groups(self._class, [{**self._options, "params": [p]}])
            try:
                self._found[key] = layouts(self._class, self._options, spec.shape, dtype)
            except (ValueError, RuntimeError, AssertionError) as error:  # options for devices alone
                raise ArgumentError(f"{self._class.__name__}, on a server: {error}") from None
        found, at_once = self._found[key]
        return list(found.values()) if p.requires_grad or at_once else []


def parse_optimizer(given: str) -> tuple[str, dict[str, Any]]:
    """A name and options: ``SGD,momentum=0.9``. Raises `ArgumentError`."""
    name, *pairs = given.split(",")
    if name not in (*ELEMENTWISE, *WHOLE):
        raise ArgumentError(f"--optimizer {name}: it is one of {', '.join((*ELEMENTWISE, *WHOLE))}")
    options = {}
    for key, _, value in (pair.partition("=") for pair in pairs):
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            raise ArgumentError(f"--optimizer takes NAME,KEY=VALUE, such as SGD,momentum=0.9, not {given!r}") from None
    return name, options


def store_memory(
    what: str, optimizer: str, *, servers: int, workers: int, dtype: str | None = None, device: bool = False
) -> StoreMemory:
    """What a store of the model of that name or script takes. Raises `ArgumentError`.

    ``dtype``: of its parameters, if not what it says; ``device``: also what is on each device.
    """
    rule, options = parse_optimizer(optimizer)
    kept = _Kept(rule, options)
    model = find_model(what, None)
    named = _parameters(model)
    specs = [ParameterSpec(name, tuple(p.shape), _type(p, dtype)) for name, p in named.items()]
    plan = make_plan(specs, servers, whole=is_whole(rule))
    state = [kept.of(spec, p) for spec, p in zip(specs, named.values(), strict=True)]
    trained = [spec for spec, p in zip(specs, named.values(), strict=True) if p.requires_grad]
    on_device = DeviceMemory(
        sum(spec.nbytes for spec in specs),
        sum(spec.nbytes for spec in trained),
        sum(_master(spec, spec.elements) for spec in trained),
        sum(_nbytes(value) for values in state for value in values),
    )
    on_servers = [_on_server(plan, number, workers, state) for number in range(servers)]
    elements = sum(spec.elements for spec in specs)
    shown = on_device if device else None
    return StoreMemory(model.name, rule, workers, elements, len(specs), on_device.parameters, shown, on_servers)


def _on_server(plan: StorePlan, number: int, workers: int, state: Sequence[Sequence[Layout]]) -> ServerMemory:
    """``state``: by parameter, what is kept of it; of a piece there is a part, with counts of its own."""
    shards = plan.buckets[number :: plan.servers]
    pieces = [(p.tensor, p.stop - p.start) for buckets in shards for bucket in buckets for p in bucket.pieces]
    return ServerMemory(
        plan.registered_bytes(number, workers),
        sum(_master(plan.tensors[tensor], elements) for tensor, elements in pieces),
        sum(_nbytes(value, elements) for tensor, elements in pieces for value in state[tensor]),
    )


def _parameters(model: PlannedModel) -> dict[str, nn.Parameter]:
    """The model's, by name. Raises `ArgumentError` for what no store, or not this part of one, takes."""
    module = _made(model)
    sparse, named = sparse_parameters(module.modules()), dict(module.named_parameters())
    if not named:
        raise ArgumentError(f"{model.name} has no parameters to store")
    for name, p in named.items():
        if is_lazy(p):
            raise ArgumentError(f"--store: parameter {name!r} has no shape before the model runs")
        if id(p) in sparse:
            raise ArgumentError(f"--store: parameter {name!r} has sparse gradients, of which rows alone are moved")
    return named


def _made(model: PlannedModel) -> nn.Module:
    """The module, without memory unless its constructor reads tensors."""
    try:
        with torch.device("meta"):
            return model.make()
    except Exception:  # whatever a constructor raises that finds no values; what is wrong with it, it raises again
        return model.make()


def _type(p: torch.Tensor, dtype: str | None) -> str:
    return dtype if dtype and p.is_floating_point() else str(p.dtype).removeprefix("torch.")


def _master(spec: ParameterSpec, elements: int) -> int:
    """Bytes of the float32 master of so many elements, where there is one."""
    return elements * torch.float32.itemsize if spec.dtype in _HALF else 0


def _nbytes(layout: Layout, elements: int | None = None) -> int:
    """Bytes of a value of the state; where a parameter is cut, of the piece with so many elements."""
    count = elements if layout.rows and elements is not None else math.prod(layout.shape)
    return count * layout.dtype.itemsize
