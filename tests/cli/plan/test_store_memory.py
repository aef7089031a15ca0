"""``tensorwire plan --store``: its bytes are those that torch and a server allocate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorwire.cli.plan.store_memory import parse_optimizer
from tensorwire.store.pushes import Push
from tensorwire.store.rule_names import ELEMENTWISE, WHOLE
from tensorwire.store.rules import OptimizerRule, is_whole
from tensorwire.store.sharding import ParameterSpec, StorePlan, make_plan
from tensorwire.store.store_layout import StoreSpec
from tests.levels import mostly_long

SHAPES = {"a": (1500, 1000), "b": (64, 3), "c": (7, 1)}  # of float32, the first one is cut at two servers
VECTOR = {"d": (1000,)}  # which Muon does not take
FROZEN = "e"
INPUTS = "def inputs(): return ()\n"
ALL = (*ELEMENTWISE, *WHOLE, "SGD,momentum=0.9", "AdamW,amsgrad=True", "RMSprop,momentum=0.9,centered=True")

OPTIMIZERS = mostly_long(ALL, ("AdamW", "Adafactor", "Muon", "SGD,momentum=0.9"))


class Net(nn.Module):
    """The same model as that of `script`, with memory."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=name != FROZEN))


def shapes_for(optimizer: str, frozen: bool) -> dict[str, tuple[int, ...]]:
    vector = {} if optimizer == "Muon" else VECTOR
    return {**SHAPES, **vector, **({FROZEN: (5, 5)} if frozen else {})}


def script(folder: Path, shapes: dict[str, tuple[int, ...]]) -> str:
    path = folder / "net.py"
    lines = ("from tests.cli.plan.test_store_memory import Net", f"def model(): return Net({shapes})", INPUTS)
    path.write_text("\n".join(lines))
    return str(path)


def planned(plan: Any, folder: Path, shapes: dict[str, tuple[int, ...]], optimizer: str, *more: str) -> Any:
    file = folder / "plan.json"
    arguments = ("--store", "--device", "--optimizer", optimizer, "--json", str(file), *more)
    status, _, err = plan(script(folder, shapes), *arguments)
    assert (status, err) == (0, "")
    return json.loads(file.read_text())


def allocated(shapes: dict[str, tuple[int, ...]], optimizer: str, dtype: str) -> dict[str, int]:
    """What torch itself takes for one step, of 16-bit parameters with float32 masters."""
    params = list(Net(shapes).to(getattr(torch, dtype)).parameters())
    masters = params
    if dtype != "float32":
        masters = [nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in params]
    for p in (*params, *masters):
        p.grad = torch.ones_like(p) if p.requires_grad else None
    name, options = parse_optimizer(optimizer)
    stock = getattr(torch.optim, name)(masters, **options)
    stock.step()
    return {
        "parameters": sum(p.nbytes for p in params),
        "gradients": sum(p.grad.nbytes for p in params if p.grad is not None),
        "masters": 0 if masters is params else sum(p.nbytes for p in masters if p.requires_grad),
        "state": sum(v.nbytes for kept in stock.state.values() for v in kept.values() if isinstance(v, torch.Tensor)),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_device_has_what_torch_allocates(plan: Any, tmp_path: Path, optimizer: str, dtype: str) -> None:
    for frozen in (False, True):
        shapes = shapes_for(optimizer, frozen)
        expected = allocated(shapes, optimizer, dtype)
        assert planned(plan, tmp_path, shapes, optimizer, "--dtype", dtype)["device"] == expected


def on_server(plan: StorePlan, number: int, optimizer: str) -> dict[str, int]:
    """What a server's rule has after a round of one worker."""
    name, options = parse_optimizer(optimizer)
    spec = StoreSpec("", list(plan.tensors), name, [{"lr": 0.1, **options}], [], 4 << 20, is_whole(name))
    rule = OptimizerRule(spec, plan, number, memoryview(bytearray(plan.shard_bytes[number])))
    found = {"masters": 0, "state": 0}
    for index, bucket in enumerate(plan.buckets[number]):
        present = bytes(plan.tensors[piece.tensor].name != FROZEN for piece in bucket.pieces)
        rule.reduce(index, [Push(0, memoryview(bytearray(bucket.nbytes)), present)], 1.0, keep=False)
        rule.apply(index, 1)
        for part in rule._values[index]:
            found["masters"] += part.master.nbytes if part.half else 0
            found["state"] += sum(v.nbytes for v in part.kept.values() if isinstance(v, torch.Tensor))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_servers_have_what_their_rule_allocates(plan: Any, tmp_path: Path, optimizer: str, dtype: str) -> None:
    shapes = shapes_for(optimizer, frozen=True)
    specs = [ParameterSpec(name, shape, dtype) for name, shape in shapes.items()]
    layout = make_plan(specs, 2, bucket_bytes=4 << 20, whole=is_whole(optimizer))
    expected = [
        {"registered": layout.shard_bytes[number] * (1 + 3), **on_server(layout, number, optimizer)}
        for number in range(2)
    ]
    more = ("--dtype", dtype, "--servers", "2", "--workers", "3")
    assert planned(plan, tmp_path, shapes, optimizer, *more)["servers"] == expected


def test_the_models_own_type_counts_where_none_is_given(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text(Path(script(tmp_path, VECTOR)).read_text().replace(")\ndef inputs", ").half()\ndef inputs"))
    status, out, _ = plan(str(path), "--store", "--workers", "1")
    assert status == 0
    assert "bytes on each device" not in out
    assert out.splitlines()[-1] == "registered: the parameters, and the gradients of 1 worker"
    assert out.splitlines()[-2].split()[2:] == [f"{2 * 4096:,}", "4,000", "8,004", f"{2 * 4096 + 12_004:,}"]


def test_a_model_whose_constructor_reads_tensors(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "reads.py"
    text = Path(script(tmp_path, VECTOR)).read_text()
    path.write_text("import torch\n" + text.replace("return Net", "torch.ones(3).sum().item(); return Net"))
    assert plan(str(path), "--store")[0] == 0


def test_weights_get_no_memory(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(f"from torch import nn\ndef model(): return nn.Linear(2**17, 2**17)\n{INPUTS}")
    status, out, err = plan(str(path), "--store", "--device")
    assert (status, err) == (0, "")
    assert f"saved on each device: {8 * (2**34 + 2**17) + 8:,} bytes, 50%" in out


def mistakes(folder: Path) -> dict[str, tuple[list[str], str]]:
    net = script(folder, {**SHAPES, **VECTOR})
    models = {"sparse": "nn.Embedding(9, 2, sparse=True)", "lazy": "nn.LazyLinear(3)", "none": "nn.ReLU()"}
    for name, made in models.items():
        text = f"from torch import nn\ndef model(): return {made}\n{INPUTS}"
        (folder / f"{name}.py").write_text(text)
    store = [net, "--store"]
    return {
        "no store": ([net, "--device"], "--device needs --store"),
        "no store for servers": ([net, "--servers", "2"], "--servers needs --store"),
        "no cut": ([*store, "--place", "a=1"], "--place does not go with --store"),
        "no batch": ([*store, "--batch", "2"], "--batch does not go with --store"),
        "optimizer": ([*store, "--optimizer", "Adamm"], "--optimizer Adamm: it is one of ASGD, "),
        "option": ([*store, "--optimizer", "SGD,moment=1"], "SGD has no option 'moment'"),
        "value": ([*store, "--optimizer", "SGD,momentum"], "NAME,KEY=VALUE, such as SGD,momentum=0.9, not 'SGD,"),
        "range": ([*store, "--optimizer", "SGD,momentum=-1"], "SGD: Invalid momentum value: -1"),
        "shape": ([*store, "--optimizer", "Muon"], "Muon only supports 2D parameters"),
        "graphs": ([*store, "--optimizer", "SGD,differentiable=True"], "SGD, on a server: "),
        "dtype": ([*store, "--dtype", "int8"], "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
        "servers": ([*store, "--servers", "0"], "'--servers': 0 is not in the range 1<=x<=512"),
        "sparse": ([str(folder / "sparse.py"), "--store"], "parameter 'weight' has sparse gradients"),
        "lazy": ([str(folder / "lazy.py"), "--store"], "parameter 'weight' has no shape before the model runs"),
        "no parameters": ([str(folder / "none.py"), "--store"], "none has no parameters to store"),
    }


def test_a_mistake_is_one_line(plan: Any, tmp_path: Path) -> None:
    for name, (arguments, why) in mistakes(tmp_path).items():
        status, out, err = plan(*arguments)
        assert (status, out, err.count("\n")) == (2, "", 1), (name, err)
        assert err.startswith("tensorwire: "), name
        assert why in err, (name, err)
