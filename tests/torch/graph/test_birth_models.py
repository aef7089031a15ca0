"""Every fresh output in the graphs of models, forward and backward, can be born; bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload

from tensorwire.torch.graph.memory.birthplace import Birthplace, is_new
from tensorwire.torch.graph.memory.target import same_storage
from tests.levels import long, mostly_long
from tests.torch.graph import zoo
from tests.torch.graph.rooms import listed, nbytes, place


class Interpreter:
    """Runs graphs node by node, and each operator with new tensors again: twice, with its outputs in places."""

    def __init__(self) -> None:
        self.born = 0
        self.graphs = 0

    def compile(self, gm: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """A backend of `aot_autograd`."""

        def run(args: list[torch.Tensor]) -> Any:
            self.graphs += 1
            return self.run(gm, list(args))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def run(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        env: dict[torch.fx.Node, Any] = {}
        for node in gm.graph.nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "placeholder":
                env[node] = inputs.pop(0)
            elif node.op == "get_attr":
                env[node] = getattr(gm, node.target)
            elif node.op == "output":
                return args[0]
            else:
                env[node] = self.call(node.target, args, kwargs)
        raise AssertionError("a graph has an output")

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``op`` alone, after a look at what it is in places."""
        if not isinstance(op, OpOverload) or "empty" in op.name():
            return op(*args, **kwargs)
        state = torch.get_rng_state()
        arguments = [copy_of(args, kwargs, op._schema.is_mutable) for _ in range(2)]
        result = op(*args, **kwargs)
        after = torch.get_rng_state()
        expected = listed(result) if isinstance(result, (torch.Tensor, list, tuple)) else [result]
        tensors = [i for i, each in enumerate(expected) if isinstance(each, torch.Tensor)]
        if outputs := [i for i in tensors if is_new(op, i)]:
            birth = Birthplace(op, outputs)
            for args, kwargs in arguments:
                torch.set_rng_state(state)
                places = [place(nbytes(expected[i])) for i in outputs]
                again, astray = birth(places, args, kwargs)
                results = listed(again)
                assert astray == (), op
                assert all(where.holds(results[i]) for where, i in zip(places, outputs, strict=True)), op
                assert all(same_storage(results[i], expected[i]) for i in outputs), op
                del again, results
            assert birth.missed == len(outputs), op
            self.born += len(outputs)
            torch.set_rng_state(after)
        return result


def copy_of(args: Any, kwargs: Any, mutable: bool) -> tuple[Any, Any]:
    """Arguments to be called with again, where the operator writes into some."""
    if not mutable:
        return args, kwargs
    copied: tuple[Any, Any] = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    return copied


@pytest.mark.filterwarnings("ignore")  # of torch.compile and transformers
@pytest.mark.parametrize("dtype", [torch.float32, long(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", mostly_long(zoo.ALL, ("gru",)))
def test_every_fresh_output_is_born(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model = zoo.build(name).to(dtype)
    inputs = {k: value.to(dtype) if value.is_floating_point() else value for k, value in zoo.inputs(name, 0).items()}
    interpreter = Interpreter()
    backend = aot_autograd(
        fw_compiler=interpreter.compile, bw_compiler=interpreter.compile, keep_inference_input_mutations=True
    )
    zoo.loss_of(torch.compile(model, backend=backend)(**inputs)).backward()
    assert interpreter.graphs >= 2  # forward and backward
    assert interpreter.born > 30
    assert all(parameter.grad is not None for parameter in model.parameters())
