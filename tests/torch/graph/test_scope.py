"""Which worker a node of a captured graph is given, and what happens where nothing was captured."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.torch_version import TorchVersion

import tensorwire as tw
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.testing.patience import patient
from tests.torch.graph import zoo
from tests.torch.graph.recording import Graph, Recorder

# Dynamo looks at the gradients of what crosses a graph break, and torch warns of that.
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
A, B, C = 0, 1, 2


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 4)))


class Block(nn.Module):
    """A linear layer, a sine of its own, and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(torch.sin(self.linear(x)))


class Model(nn.Module):
    """Two blocks in a ModuleList, which is never called itself, and a cosine outside all of them."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # No loop: dynamo leaves out a frame whose graph breaks in one.
        return self.layers[1](self.layers[0](x)).cos().sum()


def placed(model: nn.Module, workers: dict[str, int]) -> nn.Module:
    """Placed on one worker, whose process this is: all parameters stay."""
    (mine,) = set(workers.values())
    return tw.torch.place(model, workers, worker=mine)


def recorded(model: Any, x: torch.Tensor | None = None, **options: Any) -> Recorder:
    """What one step of training gave."""
    recorder = Recorder()
    torch.compile(model, backend=recorder, **options)(batch() if x is None else x).sum().backward()
    return recorder


# The block


class InBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with tw.worker(B):
            x = self.b(x).tanh()
            with tw.worker(C):
                x = x.sin()
            x = x.exp()
        return x.cos()


def test_a_block_reaches_forward_and_backward_and_the_innermost_wins() -> None:
    forward, backward = recorded(InBlocks(), fullgraph=True).graphs
    assert (forward.of("addmm"), forward.of("tanh"), forward.of("exp")) == ([None, B], [B], [B])
    assert (forward.of("sin"), forward.of("cos")) == ([C], [None])
    # In the backward the cosine is the sine's gradient, and the sine that of the cosine.
    assert (backward.of("cos"), backward.of("sin")) == ([C], [None])
    assert backward.of("mm") == [B, B, None]  # the second layer's two gradients come first


def test_a_block_beats_the_placement_of_a_module() -> None:
    model = placed(InBlocks(), {"b": A})
    forward, backward = recorded(model).graphs
    assert forward.of("addmm") == [None, B]
    assert backward.of("mm") == [B, B, None]


class BreaksInBlock(InBlocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with tw.worker(B):  # here
            x = self.b(x)
            torch._dynamo.graph_break()
            return x.sin()


class CallsThat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), BreaksInBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("model", [BreaksInBlock, CallsThat])
def test_a_block_that_dynamo_leaves_out_names_its_line(model: type[nn.Module]) -> None:
    lines, first = inspect.getsourcelines(BreaksInBlock.forward)
    line = first + next(i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(Unsupported, match=rf"test_scope.py:{line}: the block of worker\(1\).*graph break"):
        recorded(model())


def test_a_block_in_a_model_that_is_not_compiled_names_its_line() -> None:
    with pytest.raises(Unsupported, match=r"test_scope.py:\d+: the block of worker\(1\) is not in a compiled"):
        InBlocks()(batch())


@pytest.mark.parametrize(
    "name",
    ["worker:", "worker:x", "worker:01", "worker:-1", "server:1", "worker:1 ", "worker 1", "1", -1, 1.0, True, None],
)
def test_names_that_are_no_worker_are_refused(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r"is not a worker: give its rank, such as 1"), tw.worker(name):
        pass
    with pytest.raises(ArgumentError, match=r"is not a worker: give its rank, such as 1"):
        tw.torch.place(Model(), {"layers.0": name}, worker=A)


def test_a_bad_name_is_refused_in_a_compiled_model_too() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        with tw.worker("worker:one"):
            return x.sin()

    with pytest.raises(ArgumentError, match="worker:one"):
        torch.compile(bad, backend=Recorder())(batch())


def test_a_rank_may_be_an_argument_and_both_spellings_mean_the_same() -> None:
    def on(x: torch.Tensor, rank: int | str) -> torch.Tensor:
        with tw.worker(rank):
            return x.sin()

    recorder = Recorder()
    compiled = torch.compile(on, backend=recorder, fullgraph=True)
    for rank in (0, 1, 2, "worker:3"):
        compiled(batch(), rank)
    assert [graph.of("sin") for graph in recorder.graphs] == [[0], [1], [2], [3]]


def test_dynamo_may_be_the_first_to_look_at_the_block() -> None:
    code = (
        "import tensorwire as tw, sys; assert 'torch' not in sys.modules\n"
        "import torch\n"
        "def f(x):\n"
        "    with tw.worker('worker:1'):\n"
        "        return x.sin()\n"
        "seen = []\n"
        "def backend(gm, inputs):\n"
        "    seen.extend(n.meta.get('custom') for n in gm.graph.nodes if n.name == 'sin')\n"
        "    return gm\n"
        "torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2))\n"
        "assert seen == [{'tensorwire.worker': 'worker 1'}], seen"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(240))


# Modules


def test_a_path_covers_what_is_below_and_the_longest_wins() -> None:
    recorder = Recorder()
    model = Model()
    workers = {"": A, "layers": B, "layers.1.rest": C}
    torch.compile(model, backend=recorder, options={"workers": workers})(batch()).backward()
    forward, backward = recorder.graphs
    assert forward.of("addmm") == [B, B, B, C]
    assert (forward.of("sin"), forward.of("relu"), forward.of("cos"), forward.of("sum")) == ([B, B], [B, C], [A], [A])
    assert backward.of("threshold_backward") == [C, B]
    assert backward.of("mm") == [C, C, B, B, B, B, B]  # the first layer's input needs no gradient
    assert backward.of("sin") == [A]


def test_without_a_default_what_is_outside_has_no_worker() -> None:
    forward, backward = recorded(placed(Model(), {"layers.1": B})).graphs
    assert forward.of("addmm") == [None, None, B, B]
    assert (forward.of("cos"), forward.of("relu")) == ([None], [None, B])
    assert set(backward.of("mm")) == {None, B}


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"layer.1": B}, r"'layer.1' is not a module of the model.*close to it: 'layers.1'"),
        ({"layers.1.linear.weight": B}, r"is not a module.*'layers.1.linear'"),
        ({"x": B}, r"'x' is not a module of the model, as its named_modules\(\) names them"),
        ({3: B}, r"3 is not a module"),
        ([("layers.1", B)], "workers must be a dict of module paths to ranks, not list"),
    ],
)
def test_workers_that_fit_nothing_are_refused_and_change_nothing(workers: Any, message: str) -> None:
    model = Model()
    with pytest.raises(ArgumentError, match=message):
        tw.torch.place(model, workers, worker=A)
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(model, backend=Recorder(), options={"workers": workers})(batch())
    tw.torch.place(model, {"layers.1": A}, worker=A)


def test_a_model_is_placed_once() -> None:
    model = placed(Model(), {"layers.1": B})
    with pytest.raises(ArgumentError, match=r"this model already has its workers, from place\(\)"):
        tw.torch.place(model, {"layers.1": B}, worker=B)
    with pytest.raises(ArgumentError, match=r"was placed before, as 'layers.0'"):
        tw.torch.place(model.layers[0], {"": B}, worker=B)  # type: ignore[index]
    with pytest.raises(ArgumentError, match=r"module '0' was placed before"):
        tw.torch.place(nn.Sequential(model.layers[0], nn.ReLU()), {"": B}, worker=B)  # type: ignore[index]
    with pytest.raises(ArgumentError, match="was not placed"):
        tw.torch.unplace(Model())


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cpu"])
def test_an_old_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(Unsupported, match=r"need torch 2\.11 or newer, and this is 2"):
        torch.compile(lambda x: x + 1, backend="tensorwire")(torch.ones(2))


def test_options_must_agree_with_place() -> None:
    model = placed(Model(), {"layers.1": B})
    recorded(model, options={"workers": {"layers.1": B}})
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"but the model was placed with \{'layers.1': 'worker 1'\}"):
        recorded(model, options={"workers": {"layers.0": B}})


def test_a_function_has_no_paths() -> None:
    model = Model()
    with pytest.raises(BackendCompilerFailed, match=r"place the model in it by tensorwire.torch.place"):
        recorded(lambda x: model(x), options={"workers": {"layers.1": B}})


def test_a_model_that_compiles_itself_and_one_in_a_function() -> None:
    model, recorder = Model(), Recorder()
    model.compile(backend=recorder, options={"workers": {"": A, "layers.1": B}})
    model(batch()).backward()
    assert [g.of("addmm") for g in recorder.graphs[:1]] == [[A, A, B, B]]
    other = placed(Model(), {"layers.1": B})
    forward, _ = recorded(lambda x: other(x).exp()).graphs
    assert (forward.of("addmm"), forward.of("exp")) == ([None, None, B, B], [None])


def test_a_part_that_is_compiled_alone_is_still_a_part() -> None:
    model = placed(Model(), {"layers.1": B})
    forward, backward = recorded(model.layers[1]).graphs  # type: ignore[index]
    assert forward.all == backward.all == {B}  # the sine, too, whose stack is empty
    torch._dynamo.reset()
    forward, backward = recorded(model.layers[0]).graphs  # type: ignore[index]
    assert forward.all == backward.all == {None}


class Breaks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(self.linear(x))
        torch._dynamo.graph_break()
        return self.rest(x).exp()


def test_behind_a_graph_break_a_node_still_knows_its_module() -> None:
    recorder = recorded(placed(Model(Breaks), {"": A, "layers.1": A}), options={"workers": {"": A, "layers.1": A}})
    assert recorder.kinds() == ["forward"] * 4 + ["backward"] * 4
    assert {h for g in recorder.graphs for _, h in g.workers if _ != "add"} == {A}
    torch._dynamo.reset()
    recorder = recorded(placed(Model(Breaks), {"layers.1": B}))
    before, first, second, after = recorder.graphs[:4]
    assert (before.all, first.all, second.all, after.all) == ({None}, {B}, {B}, {None})
    assert [g.all for g in recorder.graphs[4:]] == [{None}, {B}, {B}, {None}]


class Shares(nn.Module):
    """One layer, in two blocks and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.beside = self.blocks[1].linear = self.blocks[0].linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.beside(self.blocks[1](self.blocks[0](x)))


def test_a_shared_module_runs_where_its_caller_does_unless_it_was_named() -> None:
    workers = {"": A, "blocks.0": B, "blocks.1": C}
    with pytest.warns(UserWarning, match=r"^blocks.0.linear.(weight|bias) of worker 1 is tied to blocks.1.linear"):
        forward = recorded(Shares(), options={"workers": workers}).graphs[0]
    assert forward.of("addmm")[:4] == [B, B, C, C]
    torch._dynamo.reset()
    forward = recorded(Shares(), options={"workers": {**workers, "beside": A}}).graphs[0]
    assert forward.of("addmm") == [A, B, A, C, A]  # one module has one worker, by whichever name
    with pytest.raises(ArgumentError, match="are one module, on worker 0 and worker 1"):
        tw.torch.place(Shares(), {"beside": A, "blocks.0.linear": B}, worker=A)


class Checkpointed(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x.sum()


def test_recomputation_runs_where_the_computation_did() -> None:
    forward, backward = recorded(placed(Checkpointed(), {"layers.0": B, "layers.1": B})).graphs
    assert forward.of("addmm") == [B] * 4
    assert backward.of("addmm")  # something was recomputed
    assert set(backward.of("addmm") + backward.of("mm") + backward.of("sin") + backward.of("threshold_backward")) == {B}


def test_one_compiled_graph_is_not_run_for_a_module_of_another_worker() -> None:
    model = nn.Sequential(Breaks(), Breaks())
    workers = {"0": B, "1": C}
    with pytest.raises(Unsupported, match=r"for '1' on worker 2 what .* for '0' on worker 1.*capture_dynamic_output"):
        recorded(model, options={"workers": workers})
    torch._dynamo.reset()
    assert recorded(nn.Sequential(Breaks(), Breaks()), options={"workers": {"0": A, "1": A}}).graphs


# What dynamo leaves out


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.linear, self.cells = nn.Linear(4, 4), kind(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(self.linear(x))[0]


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="dynamo leaves out all of the frame, and its first module is named"
)
@pytest.mark.parametrize(("kind", "rank"), [(nn.LSTM, A), (nn.GRU, A), (nn.LSTM, B)])
def test_a_placed_module_that_dynamo_leaves_out_names_itself_and_its_caller(kind: type[nn.RNNBase], rank: int) -> None:
    """On its worker, and on others, where its parameters cannot be read."""
    model = tw.torch.place(Recurrent(kind), {"": A, "cells": rank}, worker=A)
    line = inspect.getsourcelines(Recurrent.forward)[1] + 1
    said = rf"test_scope.py:{line}: cells \({kind.__name__}, placed on worker {rank}\) ran outside.* written as cells"
    with pytest.raises(Unsupported, match=said):
        recorded(model, batch(3, 2, 4))


def test_a_placed_model_that_is_not_compiled_names_the_line_that_called_it() -> None:
    model = placed(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"1": A})
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(Unsupported, match=rf"test_scope.py:{line}: 1 \(ReLU, placed on worker 0\) ran outside"):
        model(batch())


def test_a_module_that_hands_on_its_input_computes_nothing_anywhere() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Identity(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:  # a frame that breaks in a loop is left out: its parts are compiled by themselves
                x = part(x)
                torch._dynamo.graph_break()
            return x

    recorder = recorded(placed(Loops(), {"parts": A}))
    assert recorder.kinds() == ["forward", "backward"]
    assert recorder.graphs[0].all == {A}


def test_unplaced_models_and_copies_run_uncompiled() -> None:
    model = placed(Model(), {"": A})
    x = batch()
    expected = torch.compile(model, backend=Recorder())(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(tw.torch.unplace(model)(x), expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    forward, _ = recorded(model).graphs
    assert forward.all == {None}


def test_hooks_leave_nothing_in_graphs_and_cause_no_recompilation() -> None:
    bare = recorded(Model())
    torch._dynamo.reset()
    model, hooked = placed(Model(), {"": A}), Recorder()
    compiled = torch.compile(model, backend=hooked)
    for _ in range(3):
        compiled(batch()).backward()
    assert [g.operators for g in hooked.graphs] == [g.operators for g in bare.graphs]
    options = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(Model(), backend=options, options={"workers": {"": A}})
    for _ in range(3):
        compiled(batch()).backward()
    assert [g.operators for g in options.graphs] == [g.operators for g in bare.graphs]
    assert options.graphs[0].all == {A}


# A real model


def workers_of(graphs: list[Graph], operator: str) -> list[str | None]:
    return [worker for graph in graphs for worker in graph.of(operator)]


@pytest.mark.long
def test_every_node_of_gpt2_has_the_worker_of_its_block() -> None:
    recorder = Recorder()
    compiled = torch.compile(zoo.build("gpt2"), backend=recorder, options={"workers": {"transformer.h.2": B}})
    compiled(**zoo.inputs("gpt2", 0)).loss.backward()
    forward = [g for g in recorder.graphs if g.kind == "forward"]
    backward = [g for g in recorder.graphs if g.kind == "backward"]
    assert workers_of(forward, "addmm") == [None] * 8 + [B] * 4
    assert workers_of(forward, "native_layer_norm") == [None] * 4 + [B] * 2 + [None]
    assert workers_of(backward, "native_layer_norm_backward") == [None] + [B] * 2 + [None] * 4
    assert workers_of(backward, "tanh_backward") == [B] + [None] * 2
