"""The backend of torch.compile: captures, plans, agrees with the other hosts, and runs this host's part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.graph import Analysis, Output, analyze
from tensorwire.graph.ir import INPUT, PARAMETER, SAVED
from tensorwire.graph.rpc import RpcWires
from tensorwire.graph.wires import Wires
from tensorwire.launch.job import Job, current
from tensorwire.torch.graph.importer import Origin, import_graph
from tensorwire.torch.graph.partition import Boxed, partition
from tensorwire.torch.graph.party import party_of
from tensorwire.torch.graph.post import Post

SMALL = 64 * 2**10  # bytes; outputs up to here reach every host

_forwards: weakref.WeakKeyDictionary[Any, _Part] = weakref.WeakKeyDictionary()


@dataclass
class Options:
    """What ``torch.compile(options=...)`` says."""

    hosts: dict[str, str]
    outputs: str = "small"
    mode: str = "zerocopy"


def backend(module: fx.GraphModule, examples: Sequence[Any], *, options: dict[str, Any] | None = None) -> Any:
    """``torch.compile(model, backend="tensorwire", options=...)``."""
    chosen = Options(**(options or {}))
    job = current()

    def forward(graph: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        context = torch._guards.TracingContext.get()
        metadata = context.fw_metadata
        assert metadata is not None
        metadata.bw_donated_idxs = []  # buffers that are donated forbid retain_graph=True
        part = _Forward(graph, job, chosen, metadata)
        _forwards[context] = part
        return _boxed(part)

    def backward(graph: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        return _boxed(_Backward(graph, job, chosen, _forwards[torch._guards.TracingContext.get()]))

    compiler = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=forward, keep_inference_input_mutations=True
    )
    with torch._functorch.config.patch(donated_buffer=False):
        return compiler(module, examples)


def _boxed(part: _Part) -> Boxed:
    def call(args: list[Any]) -> Any:
        return part(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class _Part:
    """One graph at this host. Planned at its first run: only then it is known where its inputs are."""

    name = ""
    keeps = True  # something in the place of what another host holds; gradients are None there

    def __init__(self, module: fx.GraphModule, job: Job, options: Options) -> None:
        self.module, self.job, self.options = module, job, options
        self.party = party_of(job)
        self.hosts, self.me = self.party.hosts, self.party.me
        self.analysis: Analysis | None = None
        self.wires: Wires | RpcWires | None = None
        self.run: Boxed | None = None

    def __call__(self, args: list[Any]) -> Any:
        try:
            if self.run is None:
                self.run = self._prepare(args)
            assert self.wires is not None
            self.wires.begin()
            results = self.run(args)
            self.wires.end()
            return results
        except TensorwireError as error:
            raise self.job.member.explain(error) from None

    def _prepare(self, args: list[Any]) -> Boxed:
        graph = import_graph(
            self.module,
            f"{self.party.next_number} ({self.name})",
            self.hosts,
            self.origins(args),
            self.outputs(),
            self.host_of,
        )
        mode = self.options.mode
        self.analysis = analyze(graph, self.options.hosts.get(""), copies=mode != "zerocopy")
        plan = self.analysis.plan
        self.wires = self.party.connect(plan, self.borrowed(), rpc=mode == "rpc")
        post = Post(self.wires)
        places = {node.name: place for place, node in enumerate(self._given())}
        for index, edge in enumerate(plan.edges):
            if edge.lent and edge.source == self.me:
                post.house(index, args[places[edge.name]])
        shown = [output.name for output in graph.outputs if output.caller] if self.keeps else ()
        return partition(self.module, self.analysis, self.me, post, shown=shown, keeps=self.keeps)

    def borrowed(self) -> frozenset[tuple[str, str]]:
        """By lender and borrower, what is read here of what an earlier graph has lent."""
        return frozenset()

    def origins(self, args: list[Any]) -> list[Origin]:
        raise NotImplementedError

    def outputs(self) -> list[Output]:
        raise NotImplementedError

    def host_of(self, node: fx.Node) -> str | None:
        custom = (node.meta.get("custom") or {}).get("host")
        if custom:
            return str(custom)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for path, _ in reversed(stack.values()):
            path = path.removeprefix("L['self']").lstrip(".")
            if path in self.options.hosts:
                return self.options.hosts[path]
        return self.options.hosts.get("") if stack else None

    def _given(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def _returned(self) -> list[Any]:
        return list(next(iter(reversed(self.module.graph.nodes))).args[0])


class _Forward(_Part):
    name = "forward"

    def __init__(self, module: fx.GraphModule, job: Job, options: Options, metadata: Any) -> None:
        super().__init__(module, job, options)
        self.metadata = metadata
        self.given: list[Origin] = []

    def origins(self, args: list[Any]) -> list[Origin]:
        static = set(self.metadata.static_input_indices)
        for index, node in enumerate(self._given()):
            if index in static:
                owner = next((host for host in map(self.host_of, node.users) if host), self.hosts[0])
                self.given.append(Origin(PARAMETER, (owner,)))
            else:
                home = getattr(args[index], "_tensorwire_host", None)
                self.given.append(Origin(INPUT, None if home is None else (home,)))
        return self.given

    def outputs(self) -> list[Output]:
        found = []
        for index, value in enumerate(self._returned()):
            if isinstance(value, fx.Node):
                caller = index < self.metadata.num_forward_returns
                found.append(Output(value.name, self.hosts if caller and self._for_all(value) else (), caller))
        return found

    def _for_all(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if self.options.outputs == "all" or not isinstance(value, torch.Tensor):
            return True
        nbytes = value.numel() * value.element_size()
        return isinstance(nbytes, int) and nbytes <= SMALL


class _Backward(_Part):
    name = "backward"
    keeps = False

    def __init__(self, module: fx.GraphModule, job: Job, options: Options, forward: _Part) -> None:
        super().__init__(module, job, options)
        assert isinstance(forward, _Forward)
        self.forward = forward

    def origins(self, args: list[Any]) -> list[Origin]:
        analysis = self.forward.analysis
        assert analysis is not None
        found = []
        for node in self._given():
            holds = analysis.crossing.holds.get(node.name)
            found.append(Origin(INPUT) if holds is None else Origin(SAVED, self._ordered(holds)))
        return found

    def borrowed(self) -> frozenset[tuple[str, str]]:
        assert self.forward.analysis is not None
        return self.forward.analysis.plan.loans

    def _ordered(self, hosts: frozenset[str]) -> tuple[str, ...]:
        return tuple(host for host in self.hosts if host in hosts)

    def outputs(self) -> list[Output]:
        found = []
        for origin, value in zip(self.forward.given, self._returned(), strict=False):
            if isinstance(value, fx.Node):
                found.append(Output(value.name, origin.present or self.hosts, True))
        return found


__all__: list[str] = ["backend"]
_ = (ArgumentError, Callable)
