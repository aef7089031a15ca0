"""Finds the worker of a captured node: from a ``worker`` block, else from the module that called it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node, traceback

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.graph.ir import worker_name
from tensorwire.torch.graph.placement import compile_check
from tensorwire.torch.graph.placement.place_model import place
from tensorwire.torch.graph.placement.placed_models import (
    ModulePlacement,
    Ranks,
    checked,
    forget,
    is_placed,
    known,
    placement_of,
    rank_of,
    register,
    worker_of_call,
)

WORKER = "tensorwire.worker"  # the key in node.meta["custom"]


@contextmanager
def worker(rank: int | str) -> Iterator[None]:
    """A ``with`` block in a compiled model: its operators, and their gradients, run on one worker.

    Of nested blocks the innermost counts, and a block also covers the modules that it calls, wherever they were placed.

    Args:
        rank: The worker; ``"worker:1"`` means the same as ``1``.

    Raises:
        ArgumentError: ``rank`` is not a rank.
        Unsupported: Nothing is captured here: the code runs outside torch.compile, or dynamo left the frame out, as it
            does with a graph break inside the block.
    """
    name = worker_name(rank_of(rank))
    if not torch.compiler.is_compiling():
        raise Unsupported(
            f"{compile_check.called_at()}: the block of worker({rank!r}) is not in a compiled graph, so it would run "
            "on every worker. Compile the model with torch.compile(model, backend='tensorwire'); if it is, dynamo left "
            "this frame out, mostly because of a graph break inside the block: TORCH_LOGS=graph_breaks says where"
        )
    # A generator around torch's own block: dynamo traces into it, and can leave it where the graph breaks.
    with traceback.annotate({WORKER: name}):
        yield


@dataclass(frozen=True)
class Scope:
    """The frame that dynamo compiles: inside which module of a placed model it was found. None: in none.

    Nodes do not say this: their stacks hold the modules that were called from the frame. Dynamo does not guard on it
    either, and may run what it compiled for one block for another one of the same shape: call `enter` in every run.
    """

    placement: ModulePlacement | None

    @classmethod
    def of_frame(cls, workers: Ranks | None = None, *, worker: int | str | None = None) -> Scope:
        """For a backend, while dynamo calls it. ``workers``: of its options, relative to the compiled model, which is
        placed now unless it was; ``worker``: as for `place`.

        So such a model is placed from its first graph on only: what ran uncompiled before is not noticed, and a model
        of which dynamo captures nothing never comes here. Whoever calls ``place`` notices both.

        Raises what `place` raises, and `ArgumentError` for workers that differ from what it was given.
        """
        if workers:
            _adopt(workers, worker)
        module = compile_check.running_module()
        return cls(placement_of(module) if module is not None else None)

    def worker_of(self, node: Node) -> str | None:
        """The worker of a node of this frame's forward, backward or inference graph; None where nothing was placed."""
        said = (node.meta.get("custom") or {}).get(WORKER)
        if said is not None:
            return str(said)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        # A key is the module's id, and after an "@" the number of the call.
        return worker_of_call(
            (int(k) for k in (str(key).split("@")[0] for key in stack) if k.isdecimal()), self.placement
        )

    def enter(self) -> None:
        """Before each run of a forward or inference graph. Raises `Unsupported` if it runs for another module."""
        compile_check.graph_runs()
        if self.placement is None and not is_placed():
            return
        module = compile_check.running_module()
        placement = placement_of(module) if module is not None else None
        if placement is self.placement or placement is None:
            return
        if self.placement is None:
            raise Unsupported(
                f"torch.compile runs for {placement.path or 'the model'!r} what it compiled before the model was "
                "placed, or for another one: call place() before the first compiled call, or torch.compiler.reset() on "
                "every worker after it"
            )
        if (placement.worker, placement.below()) != (self.placement.worker, self.placement.below()):
            raise Unsupported(
                f"torch.compile runs for {placement.path!r} on {placement.worker} what it compiled for "
                f"{self.placement.path!r} on {self.placement.worker}, as both look alike to it. Compile the model as a "
                "whole, without graph breaks in these modules, such as those of torch.where() and nonzero() without "
                "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
            )


def _adopt(workers: Ranks, worker: int | str | None) -> None:
    """The options' workers, for the model that is being compiled: it is placed now, unless it was."""
    model = compile_check.compiled_model()
    if model is None:
        raise ArgumentError(
            "options['workers'] are of a model that torch.compile was given, and this is a function: place the model "
            "in it by tensorwire.torch.place(model, workers=...)"
        )
    before = known(model)
    if before is None:
        place(model, workers, worker=worker)
        for module in model.modules():
            compile_check.check_momentum(module)
    elif before != (asked := checked(model, workers)):
        raise ArgumentError(f"options['workers'] are {asked}, but the model was placed with {before}")


@contextmanager
def placed(model: nn.Module, workers: Ranks) -> Iterator[Scope]:
    """While ``model`` is placed so, the workers of its nodes, as they are when it runs.

    Raises `ArgumentError` for what is not a module of it.
    """
    register(model, workers)
    try:
        yield Scope(placement_of(model))
    finally:
        forget(model)


def worker_of(scope: Scope, node: Node, *, backward: bool) -> str | None:
    """The worker that the user chose for a node. Sums of gradients belong to no module, and go with their operands."""
    return None if backward and node.meta.get("is_gradient_acc") else scope.worker_of(node)
