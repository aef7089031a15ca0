"""Models whose ``forward`` reads, in Python, a parameter or buffer that another worker has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensorwire as tw
from tensorwire.errors import NotOnThisWorker, Unsupported
from tensorwire.torch.graph.placement.remote_tensor import release
from tests.harness.jobs import run_job
from tests.torch.graph.recording import Recorder

A, B = 0, 1
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Reads(nn.Module):
    """``read(scale)`` lies between two linear layers."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(8, 8), nn.Linear(8, 8), read
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.read(self)
        return self.b(h)


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda m: m.scale.item(),
    "float": lambda m: float(m.scale),
    "int of a buffer": lambda m: int(m.count),
    "bool": lambda m: bool(m.scale),
    "tolist": lambda m: m.scale.tolist(),
    "numpy, left out": lambda m: torch._dynamo.disable(lambda t: t.detach().numpy())(m.scale),
    "index": lambda m: [0, 1, 2, 3][m.count],
    "format": lambda m: f"{m.scale.item():.1f}",
    "nonzero": lambda m: torch._dynamo.disable(torch.nonzero)(m.scale),
    "left out": lambda m: torch._dynamo.disable(lambda t: t + 1)(m.scale),
    "a function of torch in Python": lambda m: torch._dynamo.disable(nn.functional.normalize)(m.scale),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore:.*Graph break")
def test_reading_in_a_compiled_forward_says_where_the_tensor_lives(name: str) -> None:
    model = tw.torch.place(Reads(READS[name]), {"": A, "b": B}, worker=B)
    compiled = torch.compile(model, backend=Recorder(dummies=True))
    for _ in range(2):
        with pytest.raises(NotOnThisWorker, match=r"^(scale|count) is on worker 0: .* this process is worker 1"):
            compiled(torch.ones(2, 8))


def test_a_tensor_of_another_worker_is_shown_without_its_values() -> None:
    said: list[str] = []
    model = tw.torch.place(Reads(lambda m: said.append(repr(m.scale))), {"": A, "b": B}, worker=B)
    torch.compile(model, backend=Recorder(dummies=True))(torch.ones(2, 8))
    assert said == ["<scale on worker 0: (1,), torch.float32>"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_graph_of_another_backend_reads_nothing(backend: str) -> None:
    p = nn.Parameter(torch.randn(4, 4))
    release(p, "weight", "worker 1")
    with pytest.raises(RuntimeError, match="weight is on worker 1: it cannot be read here"):
        torch.compile(lambda w: w * 2, backend=backend)(p)


def test_native_code_reads_nothing() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    release(p, "weight", "worker 1")
    with torch._C.DisableTorchFunctionSubclass():
        for read in (torch.sum, torch.Tensor.tolist, torch.Tensor.data_ptr, lambda t: bytes(t.untyped_storage())):
            with pytest.raises(RuntimeError, match="weight is on worker 1: it cannot be read here"):
                read(p)


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="dynamo leaves out all of the frame, and its first module is named"
)
@pytest.mark.parametrize("mine", [A, B])
def test_batch_norm_that_averages_over_all_steps_is_refused_in_training_by_name(mine: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))
    tw.torch.place(model, {"": A, "1": B}, worker=mine)
    compiled = torch.compile(model, backend=Recorder(dummies=True))
    compiled.eval()
    compiled(torch.ones(3, 4))
    compiled.train()
    with pytest.raises(Unsupported, match=r"^1 \(BatchNorm1d\) has momentum=None.*give it a momentum"):
        compiled(torch.ones(3, 4))


def item(job: tw.Job) -> float:
    model = tw.torch.place(Reads(READS["item"]), {"": A, "b": B})
    return float(torch.compile(model, backend="tensorwire")(torch.ones(2, 8)).sum().item())


def test_reading_ends_the_job_with_the_reason() -> None:
    ended = run_job(item, workers=2, servers=0)
    assert ended.codes == [1, 1]
    assert "NotOnThisWorker: scale is on worker 0: it cannot be read here (by item() or similar)" in ended.errors[1]


class Branches(nn.Module):
    """Which way it goes depends on a parameter, compared in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h = torch.relu(h) if self.scale > 0 else torch.tanh(h)
        return (self.b(h) * self.scale).square().mean()


def branches(job: tw.Job) -> list[bool]:
    torch.manual_seed(0)
    model = Branches()
    alone = copy.deepcopy(model)
    tw.torch.place(model, {"": A, "b": B})
    compiled = torch.compile(model, backend="tensorwire")
    same = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        losses = [compiled(x), alone(x)]
        same.append(torch.equal(*losses))
        for loss, one in zip(losses, (model, alone), strict=True):
            loss.backward()
            with torch.no_grad():
                for p in one.parameters():
                    if p.grad is not None:
                        p -= p.grad
                if job.rank == 0 or one is alone:
                    one.scale -= 0.2  # the other branch from the third step on
            one.zero_grad()
    return same


def test_a_branch_on_a_comparison_goes_the_same_way_everywhere() -> None:
    assert run_job(branches, workers=2, servers=0).ok() == [[True] * 4] * 2
