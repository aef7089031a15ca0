"""What stands for parameters and outputs of other workers: shapes without memory, and errors for readers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tensorwire as tw
from tensorwire.errors import ArgumentError, NotOnThisWorker, Unsupported
from tensorwire.torch.graph.placement import remote_tensor as module
from tensorwire.torch.graph.placement.placed_models import owner_of
from tensorwire.torch.graph.placement.remote_tensor import RemoteTensor, location_of, make_remote, release, reserve
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.torch.graph import zoo
from tests.torch.graph.recording import Recorder

A, B = 0, 1
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:TypedStorage is deprecated"
    ),
]


def away(*shape: int) -> nn.Parameter:
    p = nn.Parameter(torch.randn(*(shape or (8, 8))))
    release(p, "layers.3.weight", "worker 1", advice="ask there")
    return p


READERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p[0, 0]),
    "bool": lambda p: bool((p > 0).any()),
    "arithmetic": lambda p: p + 1,
    "inplace": lambda p: p.detach().mul_(2),
    "multiply": lambda p: torch.ones(8, 8) @ p,
    "linear": lambda p: nn.functional.linear(torch.ones(2, 8), p),
    "convolution": lambda p: nn.functional.conv2d(torch.ones(1, 8, 4, 4), p.view(8, 8, 1, 1)),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "layer_norm": lambda p: nn.functional.layer_norm(torch.ones(2, 8), (8,), p[0]),
    "attention": lambda p: nn.functional.scaled_dot_product_attention(*[p.view(1, 1, 8, 8)] * 3),
    "clone": lambda p: p.clone(),
    "half": lambda p: p.half(),
    "tolist": lambda p: p.tolist(),
    "list": lambda p: [float(x) for x in p[0]],
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "dlpack": lambda p: np.from_dlpack(p.detach()),  # type: ignore[arg-type]
    "save": lambda p: torch.save(p, io.BytesIO()),
    "save of a state": lambda p: torch.save({"p": p.detach()}, io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "copy from": lambda p: torch.empty(8, 8).copy_(p),
    "copy to": lambda p: p.detach().copy_(torch.ones(8, 8)),
    "assign": lambda p: p.detach().__setitem__(0, 1.0),
    "init": lambda p: nn.init.normal_(p),
    "data": lambda p: setattr(p, "data", torch.ones(8, 8)),
    "equal": lambda p: torch.equal(p, torch.ones(8, 8)),
    "foreach": lambda p: torch._foreach_mul([torch.ones(8, 8), p.detach()], 2.0),
    "cat": lambda p: torch.cat([torch.ones(8, 8), p]),
    "index": lambda p: p[torch.tensor([0])],
    "out": lambda p: torch.add(torch.ones(8, 8), 1, out=p.detach()),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: bytes(p.untyped_storage()),
    "old storage": lambda p: p.storage()[0],
    "share": lambda p: p.share_memory_(),
    "svd": lambda p: torch.linalg.svd(p.detach()),
    "norm": lambda p: nn.utils.get_total_norm([p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "view of a view": lambda p: p.t()[2:4].unsqueeze(0).sum(),
    "iteration": lambda p: next(iter(p)).exp(),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_a_parameter_of_another_worker_learns_where_it_is(name: str) -> None:
    with pytest.raises(NotOnThisWorker, match=r"^layers.3.weight is on worker 1: .*; ask there$"):
        READERS[name](away())


def test_all_but_the_elements_is_there() -> None:
    p = away(8, 4)
    assert isinstance(p, nn.Parameter)
    assert (p.shape, p.dtype, p.device, p.stride()) == (torch.Size([8, 4]), torch.float32, torch.device("cpu"), (4, 1))
    assert (p.numel(), p.element_size(), p.dim(), len(p), p.nbytes) == (32, 4, 2, 8, 128)
    assert p.requires_grad
    assert p.is_leaf
    assert p.grad is None
    assert p.is_contiguous()
    assert (p.t().shape, p[1:3].shape, p.view(-1).shape, p.detach().shape) == ((4, 8), (2, 4), (32,), (8, 4))
    assert torch.zeros_like(p).sum() == 0
    assert p.new_ones(2).sum() == 2
    assert p.to("cpu") is p
    assert not p.requires_grad_(False).requires_grad
    assert repr(p) == f"{p}" == "<layers.3.weight on worker 1: (8, 4), torch.float32>"
    assert repr(p.t()) == "<layers.3.weight on worker 1: (4, 8), torch.float32>"


def test_it_takes_no_memory() -> None:
    p = nn.Parameter(torch.ones(1 << 20))
    old = StorageWeakRef(p.untyped_storage())
    p.grad = torch.ones(1 << 20)
    release(p, "p", "worker 1")
    assert old.expired()
    assert p.grad is None
    total = int(next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemTotal")).split()[1])
    huge = reserve((total, 1024), (1024, 1), torch.float32)  # four times this machine's memory
    assert huge.nbytes == total * 4096


@pytest.mark.parametrize(
    ("shape", "strides", "dtype"),
    [
        ((), (), torch.float32),
        ((0, 3), (3, 1), torch.float32),
        ((3, 5), (1, 3), torch.bfloat16),
        ((2, 3), (7, 2), torch.int64),
        ((4, 1), (1, 1), torch.bool),
        ((3, 4), (4, 1), torch.complex64),
        ((3,), (0,), torch.float8_e4m3fn),
    ],
)
def test_hollow_tensors_have_the_strides_of_the_real_ones(shape: Any, strides: Any, dtype: torch.dtype) -> None:
    tensor = reserve(shape, strides, dtype)
    real = torch.empty_strided(shape, strides, dtype=dtype)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (real.shape, real.stride(), real.dtype)
    assert tensor.untyped_storage().nbytes() == real.untyped_storage().nbytes()


# A placed model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.second = nn.Sequential(nn.Linear(144, 16), nn.LayerNorm(16), nn.GELU())
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x))).sum()


WORKERS = {"first": A, "second": B}


def test_place_keeps_what_is_of_this_worker() -> None:
    for mine, gone in ((A, "second."), (B, "first.")):
        model = Net()
        before = dict(model.named_parameters())
        values = {n: p.detach().clone() for n, p in before.items()}
        assert tw.torch.place(model, WORKERS, worker=mine) is model
        for name, p in model.named_parameters():
            assert p is before[name]
            assert (location_of(p) is not None) == name.startswith(gone)
            if location_of(p) is None:
                assert torch.equal(p, values[name])
        for name, b in model.named_buffers():
            assert (location_of(b) is not None) == name.startswith(gone)
        assert [str(owner_of(p).worker) for p in model.last.parameters()] == ["None"] * 2  # type: ignore[union-attr]


def test_what_users_do_with_models_works_on_a_placed_one() -> None:
    model = tw.torch.place(Net(), WORKERS, worker=A)
    assert list(model.state_dict()) == list(Net().state_dict())
    assert repr(model) == repr(Net())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Net().parameters())
    model.eval().train().requires_grad_(True).to("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for p in model.first.parameters():
        p.grad = torch.ones_like(p)
    before = model.first[0].weight.detach().clone()  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not torch.equal(model.first[0].weight, before)  # type: ignore[arg-type]
    assert len(optimizer.state) == 4
    torch.save(optimizer.state_dict(), io.BytesIO())
    optimizer.zero_grad()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"second.0.weight is on worker 1"):
        model.load_state_dict(Net().state_dict())
    with pytest.raises(NotOnThisWorker, match=r"second.0.weight is on worker 1.*this process is worker 0"):
        copy.deepcopy(model)
    with pytest.raises(NotOnThisWorker, match=r"second.0.weight is on worker 1"):
        model.double()


def test_the_worker_of_a_process_is_its_place_in_the_job() -> None:
    with pytest.raises(ArgumentError, match=r"tensorwire.init\(\)"):
        tw.torch.place(Net(), WORKERS)
    with pytest.raises(ArgumentError, match="'server:0' is not a worker"):
        tw.torch.place(Net(), WORKERS, worker="server:0")
    assert run_job(gone_from).results == [[n for n, _ in Net().second.named_parameters(prefix="second")],
                                          [n for n, _ in Net().first.named_parameters(prefix="first")]]  # fmt: skip


def gone_from(job: tw.Job) -> list[str]:
    with pytest.raises(ArgumentError, match=r"no worker 2: this job has 2 workers; give ranks below 2"):
        tw.torch.place(Net(), {"first": 2})
    model = tw.torch.place(Net(), WORKERS)
    return [n for n, p in model.named_parameters() if location_of(p) is not None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.to("meta"), "first.0.weight is on meta"),
        (lambda m: setattr(m, "last", nn.LazyLinear(10)), "last.weight is a UninitializedParameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_is_no_plain_tensor_is_refused_and_nothing_changes(change: Callable[[Net], Any], message: str) -> None:
    model = Net()
    change(model)
    with pytest.raises(Unsupported, match=message):
        tw.torch.place(model, WORKERS, worker=A)
    assert not any(location_of(p) for p in model.parameters())
    with pytest.raises(ArgumentError, match="was not placed"):
        tw.torch.unplace(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).sum()


def test_tied_weights_live_with_the_first_module_and_warn_once() -> None:
    said = r"^embed.weight of worker 0 is tied to head.weight of worker 1: its 160 bytes go to 1 other worker"
    for mine in (A, B):
        model = Tied()
        with pytest.warns(UserWarning, match=said) as caught:
            tw.torch.place(model, {"embed": A, "head": B}, worker=mine)
        assert len(caught) == 1
        assert model.head.weight is model.embed.weight
        assert (location_of(model.head.weight) is None) == (mine == A)
        recorder = Recorder(dummies=True)
        torch._dynamo.reset()
        torch.compile(model, backend=recorder)(torch.tensor([1, 2])).backward()
        assert recorder.graphs[0].of("embedding") == [A]
        assert recorder.graphs[0].of("mm") == [B]


def test_unplace_brings_back_what_it_is_given() -> None:
    model = tw.torch.place(Net(), WORKERS, worker=A)
    kept = model.first[0].weight  # type: ignore[union-attr]
    full = Net().state_dict()
    for state, message in (
        (None, r"second.0.weight is on worker 1: unplace\(model, state\) needs its value"),
        ({n: v for n, v in full.items() if n != "second.1.bias"}, r"second.1.bias is on worker 1"),
        ({**full, "second.0.bias": torch.ones(3)}, r"second.0.bias is \[16\] of torch.float32; in state it is \[3\]"),
        (model.state_dict(), r"second.0.weight is .* in state it is on worker 1 too"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tw.torch.unplace(model, state)
        assert location_of(model.second[0].weight) is not None  # type: ignore[arg-type, union-attr]
    tw.torch.unplace(model, full)
    assert model.first[0].weight is kept  # type: ignore[union-attr]
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())
    for name, p in model.second.named_parameters(prefix="second"):
        assert torch.equal(p, full[name])
    x = torch.randn(2, 3, 8, 8)
    model(x).backward()
    other = Net()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


# Dynamo


class Encoder(nn.TransformerEncoderLayer):
    """In eval it goes another way for tensors that override torch's functions."""

    def __init__(self) -> None:
        super().__init__(16, 2, 32, batch_first=True, dropout=0.0)
        self.eval()


def steps(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], *, train: bool) -> Recorder:
    recorder = Recorder(dummies=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=recorder)
    for _ in range(2):
        with torch.set_grad_enabled(train):
            result = compiled(*inputs, **named)
        if train:
            getattr(result, "loss", result).backward()
    return recorder


def both(make: Callable[[], nn.Module], inputs: Any, named: Any, train: bool) -> tuple[Recorder, Recorder]:
    """What is captured of a model that is here, and of one of which nothing is."""
    return (
        steps(tw.torch.place(make(), {"": A}, worker=A), inputs, named, train=train),
        steps(tw.torch.place(make(), {"": A}, worker=B), inputs, named, train=train),
    )


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "net": lambda: (Net, (torch.randn(2, 3, 8, 8),), {}, True),
    "net, inference": lambda: (Net, (torch.randn(2, 3, 8, 8),), {}, False),
    "encoder": lambda: (Encoder, (torch.randn(2, 5, 16),), {}, False),
    "gpt2": lambda: (partial(zoo.build, "gpt2"), (), zoo.inputs("gpt2", 0), True),
    "llama": lambda: (partial(zoo.build, "llama"), (), zoo.inputs("llama", 0), True),
}


@pytest.mark.parametrize("name", mostly_long([*MODELS], MODELS.keys() - {"gpt2", "llama"}))
def test_dynamo_captures_the_same_graphs_and_does_not_compile_again(name: str) -> None:
    here, there = both(*MODELS[name]())
    assert there.dynamo == here.dynamo
    assert [g.code for g in there.graphs] == [g.code for g in here.graphs]
    assert len(here.graphs) == len({g.code for g in here.graphs}) > 0


@pytest.mark.parametrize("name", ["net", pytest.param("llama", marks=pytest.mark.long)])
def test_without_torchs_private_name_the_operators_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.variables import builder

    release(nn.Parameter(torch.ones(1)), "first", "worker 1")  # what is done once is done
    ours = builder.infer_subclass_type
    monkeypatch.setattr(builder, "infer_subclass_type", ours.__closure__[0].cell_contents)  # type: ignore[index]
    assert builder.infer_subclass_type(away()) is module.RemoteParameter
    here, there = both(*MODELS[name]())
    assert [g.operators for g in there.graphs] == [g.operators for g in here.graphs]


def test_checkpointed_blocks_are_captured_alike() -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=False)
            return self.last(x).sum()

    here, there = both(Checkpointed, (torch.randn(2, 3, 8, 8),), {}, True)
    assert [g.code for g in there.graphs] == [g.code for g in here.graphs]


# Outputs


class Two(nn.Module):
    """Two graphs, with a large tensor between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 4)
        self.between: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        self.between.append(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


def test_an_output_of_another_worker_goes_into_the_next_graph_and_back() -> None:
    def mark(tensor: torch.Tensor) -> torch.Tensor:
        return make_remote(tensor, "the output 'x'", "worker 1", advice="use outputs='all'")

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        run = recorder(gm, inputs)

        def around(*args: Any) -> Any:
            return [mark(t) if isinstance(t, torch.Tensor) and t.dim() else t for t in run(*args)]

        return around

    recorder = Recorder(dummies=True)
    model = Two()
    loss = torch.compile(model, backend=backend)(torch.randn(2, 4))
    (x,) = model.between
    assert isinstance(x, RemoteTensor)
    assert x.grad_fn is not None
    for read in (torch.sum, torch.clone, torch.Tensor.tolist, lambda t: t[0].exp()):
        with pytest.raises(NotOnThisWorker, match=r"the output 'x' is on worker 1.*use outputs='all'"):
            read(x)
    loss.backward()
    assert [g.kind for g in recorder.graphs] == ["forward", "forward", "backward", "backward"]
    assert all(p.grad is not None for p in model.parameters())
    plain = Recorder(dummies=True)
    torch._dynamo.reset()
    torch.compile(Two(), backend=plain)(torch.randn(2, 4)).backward()
    assert [g.code for g in recorder.graphs] == [g.code for g in plain.graphs]


def test_graphs_may_return_hollow_tensors() -> None:
    def empty(kind: str, value: torch.Tensor) -> torch.Tensor | None:
        if kind == "backward":
            return None  # gradients of other workers' parameters
        return reserve(value.shape, value.stride(), value.dtype) if value.dim() else value

    recorder = Recorder(dummies=True, stand_in=empty)
    model = Two()
    torch.compile(model, backend=recorder)(torch.randn(2, 4)).backward()
    assert [g.kind for g in recorder.graphs] == ["forward", "forward", "backward", "backward"]
    assert all(p.grad is None for p in model.parameters())
