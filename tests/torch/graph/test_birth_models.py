"""Every fresh output in the graphs of models, forward and backward, can be born; bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload

from tensorwire.torch.graph.memory.birthplace import Birthplace, is_new
from tensorwire.torch.graph.memory.target import same_storage
from tests.levels import long, mostly_long
from tests.torch.graph import zoo
from tests.torch.graph.rooms import listed, nbytes, place


class Interpreter(torch.fx.Interpreter):
    """Runs a graph, and each operator with new tensors again: twice, with its outputs in places."""

    born = 0

    def call_function(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(op, OpOverload) or "empty" in op.name():
            return op(*args, **kwargs)
        state = torch.get_rng_state()
        arguments = [(args, kwargs)] * 2
        if op._schema.is_mutable:  # it may write into some
            arguments = [torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, pair) for pair in arguments]
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


@pytest.mark.filterwarnings("ignore")  # of torch.compile and transformers
@pytest.mark.parametrize("dtype", [torch.float32, long(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", mostly_long(zoo.ALL, ("gru",)))
def test_every_fresh_output_is_born(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model = zoo.build(name).to(dtype)
    inputs = {k: value.to(dtype) if value.is_floating_point() else value for k, value in zoo.inputs(name, 0).items()}
    ran: list[Interpreter] = []

    def compiler(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        ran.append(Interpreter(gm))
        return make_boxed_func(ran[-1].run)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, keep_inference_input_mutations=True)
    zoo.loss_of(torch.compile(model, backend=backend)(**inputs)).backward()
    assert len(ran) >= 2  # forward and backward
    assert sum(graph.born for graph in ran) > 30
    assert all(parameter.grad is not None for parameter in model.parameters())
