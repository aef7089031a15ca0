"""One captured graph on this worker, planned at its first run: before, the places of its inputs are unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tensorwire.edge.group import EdgeGroup
from tensorwire.errors import ArgumentError, JobEnded, TensorwireError
from tensorwire.graph import Analysis, Graph, Output, analyze
from tensorwire.graph.ir import INPUT, PARAMETER, SAVED
from tensorwire.graph.kinds import MOST_DIMENSIONS, SMALL
from tensorwire.launch import Worker
from tensorwire.torch.graph.capture.importer import InputOrigin, import_graph, spec_of
from tensorwire.torch.graph.capture.joint import Boxed, given, returned
from tensorwire.torch.graph.compile_options import CompileOptions
from tensorwire.torch.graph.execution.job_group import group_of
from tensorwire.torch.graph.execution.partition import Partition
from tensorwire.torch.graph.execution.replica import gradients, replica, slots_of_inputs
from tensorwire.torch.graph.execution.transfers import Transfers
from tensorwire.torch.graph.placement.gradient_hooks import only_with_gradient
from tensorwire.torch.graph.placement.placed_models import note_alone, owner_of
from tensorwire.torch.graph.placement.remote_tensor import location_of
from tensorwire.torch.graph.placement.scope import Scope, worker_of

# An attribute of an output that not every worker has in every run: the worker that always has it.
HOLDER = "_tensorwire_holder"
HERE = "_tensorwire_here"  # attribute of such an output that all have in this run


class CompiledGraph:
    """A graph of one frame that was compiled."""

    what = ""
    keeps = False  # something in the place of values for the backward graph that another worker has

    def __init__(self, module: fx.GraphModule, worker: Worker, options: CompileOptions, scope: Scope) -> None:
        self.module, self.worker, self.options, self.scope = module, worker, options, scope
        self.group = group_of(worker)
        self.given, self.returned = given(module), returned(module)
        self.analysis: Analysis | None = None
        self._edges: EdgeGroup | None = None
        self._transfers: Transfers | None = None
        self._run: Boxed | None = None
        self._replica: Boxed | None = None
        self.stayed: frozenset[str] = frozenset()  # results of the last run that were too large for every worker

    def __call__(self, args: list[Any]) -> Any:
        """Runs this worker's part. An error here is one of the whole job: the others wait for what will not come.

        Where nothing was placed, it runs all of it, and nobody waits for it.
        """
        if self._run is None and self._replica is None and self.is_replica(args):
            self._replica = self.replica()
            note_alone(value for value in args if isinstance(value, torch.Tensor))
        if self._replica is not None:
            return self._run_replica(self._replica, args)
        try:
            if self._run is None:
                self._run = self._prepare(args)
            assert self._edges is not None
            assert self._transfers is not None
            self.enter(args)
            self._edges.begin()
            results = self._run(args)
            self._edges.end()
            self.stayed = self._transfers.take_stayed()
            return results
        except TensorwireError as error:
            explained = self.worker.member.explain(error)
            if not isinstance(explained, JobEnded):
                self.worker.fail(explained)
            raise explained from None
        except BaseException as error:
            self.worker.fail(error)
            raise

    def enter(self, args: list[Any]) -> None:
        """Before each run."""

    def is_replica(self, args: list[Any]) -> bool:
        """Whether nothing was placed."""
        raise NotImplementedError

    def replica(self) -> Boxed:
        """All of the graph."""
        return replica(self.module)

    def _run_replica(self, run: Boxed, args: list[Any]) -> Any:
        with self.worker.member.explained():
            self.enter(args)
            return run(args)

    def _prepare(self, args: list[Any]) -> Boxed:
        graph = self._import(args)
        self.analysis = analyze(graph, copies=self.options.mode == "copy")
        plan = self.analysis.plan
        edges = self._edges = self.group.connect(plan, self.borrowed())
        transfers = self._transfers = Transfers(edges, plan)
        places = {node.name: place for place, node in enumerate(self.given)}
        for index, edge in enumerate(plan.edges):
            if edge.lent and edge.source == self.group.me:
                transfers.adopt(index, args[places[edge.name]])
        shown = [output.name for output in graph.outputs if output.caller] if self.keeps else ()
        return Partition(
            self.module,
            self.analysis,
            self.group.me,
            transfers,
            shown=shown,
            changed=self.changed(),
            keeps=self.keeps,
            replays=self.options.replay_random,
        ).build()

    def _import(self, args: list[Any]) -> Graph:
        name = f"{self.group.next_number} ({self.what})"
        origins, outputs = self.origins(args), self.outputs()
        return import_graph(self.module, name, self.group.workers, origins, outputs, self.worker_of)

    def worker_of(self, node: fx.Node) -> str | None:
        """Where the user put a node."""
        return worker_of(self.scope, node, backward=False)

    def origins(self, args: list[Any]) -> list[InputOrigin]:
        """Where each argument is."""
        raise NotImplementedError

    def outputs(self) -> list[Output]:
        """Who wants which result."""
        raise NotImplementedError

    def changed(self) -> dict[str, str]:
        """By result, the argument that it is copied to after the run, by name."""
        return {}

    def borrowed(self) -> frozenset[tuple[str, str]]:
        """By lender and borrower, what is read here of what an earlier graph has lent."""
        return frozenset()


class Forward(CompiledGraph):
    """A forward graph, or one without gradients. ``metadata``: of AOTAutograd."""

    what = "forward"
    keeps = True

    def __init__(
        self, module: fx.GraphModule, worker: Worker, options: CompileOptions, scope: Scope, metadata: Any
    ) -> None:
        super().__init__(module, worker, options, scope)
        self.metadata = metadata
        self._static = frozenset(metadata.static_input_indices)
        self.planned_origins: list[InputOrigin] = []

    def is_replica(self, args: list[Any]) -> bool:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        return (
            self.scope.placement is None
            and not any(map(self.scope.worker_of, self.module.graph.nodes))
            and not any(holder_of(tensor) or owner_of(tensor) for tensor in tensors)
        )

    def enter(self, args: list[Any]) -> None:
        self.scope.enter()
        pairs = zip(args, self.planned_origins, strict=False)  # a replica has no origins
        for place, (value, origin) in enumerate(pairs):
            if not isinstance(value, torch.Tensor):
                continue
            if place not in self._static:
                self._check_holder(place, value, origin)
            elif origin.present != (self.group.me,) and location_of(value) is None:
                # The model was placed by options.
                only_with_gradient(value)

    def _check_holder(self, place: int, value: torch.Tensor, origin: InputOrigin) -> None:
        now, planned = holder_of(value), origin.present[0] if origin.present else None
        if now not in (None, planned) and not getattr(value, HERE, False):
            raise ArgumentError(
                f"argument {place} of graph {self.what} is on {now} now; when the graph was planned it was on "
                f"{planned or 'every worker'}"
            )

    def origins(self, args: list[Any]) -> list[InputOrigin]:
        users = {node.name: next(filter(None, map(self.scope.worker_of, node.users)), None) for node in self.given}
        for place, (node, value) in enumerate(zip(self.given, args, strict=True)):
            if place in self._static:
                owner = owner_of(value) if isinstance(value, torch.Tensor) else None
                worker = (owner.worker if owner is not None else None) or users[node.name] or self.group.workers[0]
                self.planned_origins.append(InputOrigin(PARAMETER, (worker,)))
            else:
                holder = holder_of(value) if isinstance(value, torch.Tensor) else None
                self.planned_origins.append(InputOrigin(INPUT, None if holder is None else (holder,)))
        return self.planned_origins

    def outputs(self) -> list[Output]:
        seen, changed = self.metadata.num_forward_returns, self.metadata.mutated_inp_runtime_indices
        outputs = [
            output(value, self.group.workers, caller=place < seen, everything=self.options.outputs == "all")
            for place, value in enumerate(self.returned)
            if isinstance(value, fx.Node)
        ]
        for place, argument in enumerate(changed):  # they are the first results
            owners = self.planned_origins[argument].present
            outputs[place] = replace(outputs[place], to=owners or outputs[place].to, if_small=False)
        return outputs

    def changed(self) -> dict[str, str]:
        pairs = zip(self.returned, self.metadata.mutated_inp_runtime_indices, strict=False)
        return {value.name: self.given[argument].name for value, argument in pairs}


class Backward(CompiledGraph):
    """The backward graph of ``forward``."""

    what = "backward"

    def __init__(self, module: fx.GraphModule, forward: Forward) -> None:
        super().__init__(module, forward.worker, forward.options, forward.scope)
        self.forward = forward
        self._tensors = sum(isinstance(node.meta.get("val"), torch.Tensor) for node in forward.given)
        self._bears = False  # gradients, in the slots of a store

    def is_replica(self, args: list[Any]) -> bool:
        return self.forward.analysis is None

    def replica(self) -> Boxed:
        born = gradients(self.forward.module, self.module)
        self._bears = bool(born)
        return replica(self.module, born)

    def enter(self, args: list[Any]) -> None:
        if self._bears:
            args.append(slots_of_inputs(self._tensors))

    def worker_of(self, node: fx.Node) -> str | None:
        return worker_of(self.scope, node, backward=True)

    def _planned(self) -> Analysis:
        assert self.forward.analysis is not None
        return self.forward.analysis

    def origins(self, args: list[Any]) -> list[InputOrigin]:
        holds = self._planned().crossing.holds
        return [
            InputOrigin(SAVED, tuple(worker for worker in self.group.workers if worker in holds[node.name]))
            if node.name in holds
            else InputOrigin(INPUT)
            for node in self.given
        ]

    def outputs(self) -> list[Output]:
        """A gradient goes to where what it is of is."""
        origins = self.forward.planned_origins
        return [
            Output(value.name, origin.present or self.group.workers, True)
            for origin, value in zip(origins, self.returned, strict=False)
            if isinstance(value, fx.Node)
        ]

    def borrowed(self) -> frozenset[tuple[str, str]]:
        return self._planned().plan.loans


def output(node: fx.Node, workers: tuple[str, ...], *, caller: bool, everything: bool = False) -> Output:
    """Which of ``workers`` get a result of a graph. With ``everything`` all get each that is the ``caller``'s.

    Else all get numbers and tensors that are small. Whether a tensor is whose size varies, each run decides.
    """
    if not caller:
        return Output(node.name)
    value = node.meta.get("val")
    if everything or not isinstance(value, torch.Tensor):
        return Output(node.name, workers, True)
    elements = spec_of(value).elements
    if elements is not None and elements * value.element_size() <= SMALL:
        return Output(node.name, workers, True)
    varies = elements is None or not isinstance(value.numel(), int)
    if varies and value.dim() <= MOST_DIMENSIONS:
        return Output(node.name, workers, True, if_small=True)
    return Output(node.name, (), True)


def holder_of(value: torch.Tensor) -> str | None:
    """The only worker that has ``value``, if there is but one."""
    location = location_of(value)
    if location is not None:
        return location.worker
    holder = getattr(value, HOLDER, None)
    return None if holder is None else str(holder)
