"""A consumer's own loading code as a list of reads: whatever it copies comes as the code itself copies it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import Job
from tensorwire.errors import ArgumentError, VersionExpired, WaitTimeout
from tensorwire.observe import counters
from tensorwire.store import Loader
from tensorwire.store.versions.recording import RecordedTensor
from tensorwire.store.versions.sources import LeasedVersion
from tensorwire.store.versions.version_layout import FileTensor, Version
from tests.harness.jobs import run_job
from tests.store.test_versions import reading

Tensors = dict[str, torch.Tensor]
Load = Callable[[Tensors, list[torch.Tensor]], Any]
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def weights() -> Tensors:
    torch.manual_seed(5)
    return {
        "q": torch.randn(64, 100),
        "k": torch.randn(64, 100),
        "v": torch.randn(64, 100),
        "o": torch.randn(70, 200),
        "experts": torch.randn(4, 30, 80),
        "bias": torch.randn(5),
        "scale": torch.tensor(3.5),
        "half": torch.randn(40, 100).to(BF16),
        "whole": torch.arange(90).reshape(9, 10),
        "none": torch.zeros(0, 4),
    }


def put(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return target.data.copy_(value)


def made(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.full(shape, 7).to(dtype) for shape in shapes]


def fused(w: Tensors, to: list[torch.Tensor]) -> None:
    to[0][:64].copy_(w["q"])
    to[0][64:128].copy_(w["k"])
    to[0][128:] = w["v"]


def through_a_tensor_of_its_own(w: Tensors, to: list[torch.Tensor]) -> None:
    mine = torch.zeros(64, 100)
    mine[:32].add_(w["q"][:32])
    mine[32:].copy_(w["k"][32:])
    to[0].copy_(mine)


def changes_a_constant(w: Tensors, to: list[torch.Tensor]) -> None:
    to[0].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).add_(w["bias"]))


def changes_the_version(w: Tensors, to: list[torch.Tensor]) -> None:
    to[0].copy_(w["q"])
    w["q"][3:9].mul_(2.0)
    to[1].copy_(w["q"])
    to[2].copy_(w["k"].mul_(2.0))


def strided() -> list[torch.Tensor]:
    return [torch.full((64, 200), 7.0)[:, 50:150], torch.full((100, 64), 7.0).t()]


def two_parts(w: Tensors, to: list[torch.Tensor]) -> None:
    put(to[0][:, :100], w["q"])
    put(to[0][:, 100:], w["k"] * 3.0)


QKV = ("q", "k", "v")
# By name: the destinations; the code; how many bytes go straight there, and how many are read.
CASES: dict[str, tuple[Callable[[], list[torch.Tensor]], Load, int, int]] = {
    "fused QKV": (made((192, 100)), fused, 76800, 76800),
    "cat": (made((192, 100)), lambda w, to: put(to[0], torch.cat([w[n] for n in QKV])), 76800, 76800),
    "cat of columns": (made((64, 300)), lambda w, to: put(to[0], torch.cat([w[n] for n in QKV], -1)), 76800, 76800),
    "cat in cat": (
        made((192, 100)),
        lambda w, to: put(to[0], torch.cat([w["q"], torch.cat([w["k"], w["v"]])]).clone().detach()),
        76800,
        76800,
    ),
    "cat with arithmetic": (
        made((192, 100)),
        lambda w, to: put(to[0], torch.cat([w["q"], w["k"] * 2, w["v"]])),
        0,
        76800,
    ),
    "stack": (made((3, 64, 100)), lambda w, to: put(to[0], torch.stack([w[n] for n in QKV])), 76800, 76800),
    "stack inside": (made((64, 3, 100)), lambda w, to: put(to[0], torch.stack([w[n] for n in QKV], -2)), 76800, 76800),
    "experts": (
        made((4, 60, 80)),
        lambda w, to: [put(to[0][i, 30 * k :][:30], w["experts"][i]) for i in range(4) for k in range(2)],
        76800,
        76800,
    ),
    "experts transposed": (
        made((4, 80, 30)),
        lambda w, to: [put(to[0][i], w["experts"][i].t()) for i in range(4)],
        0,
        38400,
    ),
    "row-parallel": (made((70, 100)), lambda w, to: put(to[0], w["o"].chunk(2, dim=1)[1]), 28000, 28000),
    "row-parallel, converted": (
        made((70, 100), dtype=BF16),
        lambda w, to: put(to[0], w["o"].chunk(2, dim=1)[1].to(BF16)),
        0,
        28000,
    ),
    "column-parallel": (made((35, 200)), lambda w, to: put(to[0], w["o"].chunk(2)[1]), 28000, 28000),
    "transposed": (made((100, 64)), lambda w, to: put(to[0], w["q"].t()), 0, 25600),
    "transposed on both sides": (
        lambda: [torch.zeros(64, 100).t()],
        lambda w, to: put(to[0], w["q"].t()),
        25600,
        25600,
    ),
    "contiguous": (made((70, 100)), lambda w, to: put(to[0], w["o"][:, 100:].contiguous()), 28000, 28000),
    "nested views": (
        made((50, 30)),
        lambda w, to: put(to[0], w["o"][10:70].view(2, 30, 200)[1].t()[100:].chunk(2)[0]),
        0,
        30 * 200 * 4 - 600,  # rows of 200 bytes, with what lies between them
    ),
    "another dtype": (made((64, 100), dtype=F64), lambda w, to: put(to[0], w["q"]), 0, 25600),
    "to": (made((64, 100), dtype=BF16), lambda w, to: put(to[0], w["q"].to(BF16)), 0, 25600),
    "bits": (made((40, 100), dtype=torch.int16), lambda w, to: put(to[0], w["half"].view(torch.int16)), 8000, 8000),
    "integers": (made((9, 10), dtype=torch.int64), lambda w, to: put(to[0], w["whole"]), 720, 720),
    "16 bits": (made((40, 100), dtype=BF16), lambda w, to: put(to[0], w["half"]), 8000, 8000),
    "a few columns": (made((64, 3)), lambda w, to: put(to[0], w["q"][:, 5:8]), 0, 768),
    "a column": (made((64,)), lambda w, to: put(to[0], w["whole"][:, 3].repeat(8)[:64]), 0, 8 * 81),
    "expand": (made((7, 5)), lambda w, to: put(to[0], w["bias"].expand(7, 5)), 0, 20),
    "expand a row": (made((7, 200)), lambda w, to: put(to[0], w["o"][0].expand(7, 200)), 0, 800),
    "expand columns": (made((3, 70, 2)), lambda w, to: put(to[0], w["o"][:, 5:7].expand(3, 70, 2)), 0, 560),
    "the same twice": (
        made((32, 100), (32, 100)),
        lambda w, to: (put(to[0], w["q"][:32] * 2.0), put(to[1], w["q"][:32] + 1.0)),
        0,
        12800,
    ),
    "broadcast": (made((7, 5)), lambda w, to: put(to[0], w["bias"]), 0, 20),
    "no dimension": (made(()), lambda w, to: put(to[0], w["scale"]), 4, 4),
    "filled": (made((5,)), lambda w, to: to[0].fill_(w["scale"]), 0, 4),
    "nothing of one": (
        made((0, 4), (0, 100), (5,)),
        lambda w, to: (put(to[0], w["none"]), put(to[1], w["q"][3:3]), put(to[2], w["bias"])),
        20,
        20,
    ),
    "nothing converted": (
        made((0, 4), (5,), (0,), dtype=F64),
        lambda w, to: (put(to[0], w["none"]), put(to[1], w["bias"]), put(to[2], w["o"][3:3, 5])),
        0,
        20,
    ),
    "strided destinations": (strided, lambda w, to: (put(to[0], w["q"]), put(to[1], w["k"])), 25600, 51200),
    "parts of rows": (made((64, 200)), two_parts, 25600, 51200),
    "arithmetic": (made((64, 100)), lambda w, to: put(to[0], w["q"] * w["scale"]), 0, 25604),
    "average": (made((64, 100)), lambda w, to: to[0].mul_(0.9).add_(w["q"], alpha=0.1), 0, 25600),
    "changed after": (made((64, 100)), lambda w, to: put(to[0], w["q"]).mul_(2.0), 0, 25600),
    "read after": (made((64, 100), (64, 100)), lambda w, to: put(to[1], put(to[0], w["q"]) * 2.0), 0, 25600),
    "zeros before": (made((65, 100)), lambda w, to: put(to[0].zero_()[1:], w["q"]), 0, 25600),
    "overlapping": (
        made((100, 100)),
        lambda w, to: (put(to[0][:64], w["q"]), put(to[0][30:94], w["k"]), put(to[0][94:], w["v"][:6])),
        2400,
        53600,
    ),
    "overlapping in reverse": (
        made((100, 100)),
        lambda w, to: (put(to[0][30:94], w["k"]), put(to[0][:64], w["q"])),
        0,
        51200,
    ),
    "back again": (made((64, 100)), lambda w, to: [put(to[0], w[n]) for n in ("q", "k", "q")], 0, 51200),
    "tied": (made((64, 100)), lambda w, to: [put(tied, w["q"]) for tied in (to[0], to[0].view(64, 100))], 25600, 25600),
    "a tensor of its own": (made((64, 100)), through_a_tensor_of_its_own, 0, 25600),
    "a constant": (made((5,)), changes_a_constant, 0, 20),
    "changes the version": (made(*[(64, 100)] * 3), changes_the_version, 0, 51200),
    "rows by number": (made((2, 100)), lambda w, to: put(to[0], w["q"][[5, 2]]), 0, 25600),
    "rows to numbers": (made((9, 100)), lambda w, to: to[0].__setitem__([2, 3], w["q"][:2]), 0, 800),
    "several results": (made((64, 3)), lambda w, to: put(to[0], w["q"].topk(3)[0]), 0, 25600),
    "complex": (
        made((64, 50), dtype=torch.complex64),
        lambda w, to: put(to[0], torch.view_as_complex(w["q"].view(64, 50, 2)).conj()),
        0,
        25600,
    ),
    "without gradients": (
        made((64, 100), dtype=BF16),
        torch.inference_mode()(lambda w, to: put(to[0], w["q"].to("cpu", BF16))),
        0,
        25600,
    ),
    "windows": (made((97, 4)), lambda w, to: put(to[0], w["q"][1].unfold(0, 4, 1)), 0, 400),
}


class FakeFile:
    """A file of tensors in memory, which changes, and what reads it."""

    def __init__(self, tensors: Tensors) -> None:
        self.held: dict[str, FileTensor] = {}
        end = 128
        for name, tensor in tensors.items():
            self.held[name] = FileTensor(str(tensor.dtype)[6:], tuple(tensor.shape), end)
            end += -(-tensor.nbytes // 64) * 64 + 64
        self.bytes, self.read = np.full(end, 0x55, np.uint8), 0
        self.write(tensors)

    def write(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            self.bytes[self.held[name].start :][: len(flat)] = flat

    def bring(self, wanted: Any, finish: Callable[[], None], _: Any, __: float) -> Version:
        self.read = 0
        with torch.no_grad():
            for selection, memory in wanted:
                for file, at, nbytes in selection.spans:
                    memory[at : at + nbytes] = self.bytes[file : file + nbytes]
                    self.read += nbytes
            finish()
        return Version(0, 1, "", 0)


def alike(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_code_copies_comes_as_the_code_itself_copies_it(name: str) -> None:
    make, load, direct, nbytes = CASES[name]
    tensors = weights()
    file = FakeFile(tensors)
    got, expected, before = make(), make(), make()
    loader = Loader(file.held, lambda w: load(w, got), file.bring)
    assert alike(got, before), "nothing changes before the first load"
    for _ in range(3):
        with torch.no_grad():
            load(copies(tensors), expected)
        loader.load()
        assert alike(got, expected)
        assert file.read == loader.nbytes
        tensors = {key: tensor.flip(0) if tensor.dim() else tensor + 1 for key, tensor in tensors.items()}
        file.write(tensors)
    assert (loader.direct, loader.nbytes) == (direct, nbytes)


def view_of(tensor: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """A random view."""
    for _ in range(int(random.integers(0, 5))):
        dim = int(random.integers(tensor.dim()))
        size = tensor.shape[dim]
        what = random.integers(7)
        if what == 0:
            tensor = tensor.transpose(dim, int(random.integers(tensor.dim())))
        elif what == 1:
            tensor = tensor.narrow(dim, size // 3, size - size // 3)
        elif what == 2:
            tensor = tensor.chunk(2, dim)[int(random.integers(2)) if size > 1 else 0]
        elif what == 3:
            tensor = tensor.unsqueeze(dim)
        elif what == 4 and size % 2 == 0 and size:
            tensor = tensor.unflatten(dim, (2, size // 2))
        elif what == 5 and tensor.dim() > 1 and size:
            tensor = tensor.select(dim, size - 1)
        elif size:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
    return tensor


@pytest.mark.parametrize("seed", range(12))
def test_random_views_of_random_shapes_come_right(seed: int) -> None:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    names = [f"w{i}" for i in range(20)]
    shapes = [(int(random.integers(1, 40)), int(random.integers(1, 7)), int(random.integers(1, 300))) for _ in names]
    tensors = {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=True)}
    seeds = [int(random.integers(1 << 30)) for _ in names]
    shared = torch.full((400_000,), 7.0)
    starts = [int(random.integers(200_000)) for _ in names]

    def load(w: Tensors, memory: torch.Tensor) -> None:
        for name, mine, start in zip(names, seeds, starts, strict=True):
            value = view_of(w[name], np.random.default_rng(mine))
            kinds = np.random.default_rng(mine + 1)
            order = [int(i) for i in kinds.permutation(value.dim())]
            wide = [value.shape[i] + int(kinds.integers(2)) for i in order]
            target = memory[start:][: int(np.prod(wide))].view(wide)
            for i, dim in enumerate(order):
                target = target.narrow(i, 0, value.shape[dim])
            target.permute(*np.argsort(order).tolist()).copy_(value)

    file, expected = FakeFile(tensors), shared.clone()
    loader = Loader(file.held, lambda w: load(w, shared), file.bring)
    load(tensors, expected)
    loader.load()
    assert torch.equal(shared, expected)


# ---- what is refused

REFUSED: dict[str, tuple[Load, str]] = {
    "item": (
        lambda w, to: to[0].fill_(w["scale"].item()),
        r"asks for values \(aten\..*choose by names and shapes",
    ),
    "bool": (lambda w, to: put(to[0], w["q"]) if w["scale"] > 0 else None, "asks for values"),
    "numpy": (lambda w, _: w["q"].numpy(), r"asks for values \(numpy\)"),
    "array": (lambda w, _: np.asarray(w["q"]), "asks for values"),
    "list": (lambda w, _: w["q"].tolist(), "asks for values"),
    "address": (lambda w, _: w["q"].data_ptr(), "asks for values"),
    "mask": (lambda w, to: put(to[0], w["q"][w["q"] > 0]), r"asks for values \(aten\.index\)"),
    "equal": (lambda w, _: torch.equal(w["q"], w["k"]), "asks for values"),
    "own values": (lambda w, to: (put(to[0], w["q"]), float(to[0][0, 0])), "asks for values"),
    "nothing": (lambda w, _: w["q"] * 2, "load copies nothing"),
    "nothing of its own": (lambda w, _: w["q"].mul_(2), "load copies nothing"),
    "data": (lambda w, _: setattr(torch.nn.Parameter(torch.zeros(2)), "data", w["q"]), r"load assigns \.data"),
    "in place": (lambda w, _: w["q"].t_(), r"changes a tensor's shape in place \(aten\.t_\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_values_is_refused_in_one_line(name: str) -> None:
    load, why = REFUSED[name]
    to, file = made((64, 100))(), FakeFile(weights())
    with pytest.raises(ArgumentError, match=why) as raised:
        Loader(file.held, lambda w: load(w, to), file.bring)
    assert "\n" not in str(raised.value)
    assert alike(to, made((64, 100))())


def test_a_name_or_shape_that_is_wrong_is_an_error_at_once() -> None:
    to, file = made((64, 100))(), FakeFile(weights())
    with pytest.raises(KeyError, match="nobody"):
        Loader(file.held, lambda w: put(to[0], w["nobody"]), file.bring)
    with pytest.raises(RuntimeError, match=r"must match the size of tensor b \(200\)"):
        Loader(file.held, lambda w: put(to[0], w["o"]), file.bring)


def test_what_is_read_into_a_tensor_is_a_change_that_autograd_sees() -> None:
    file, weight = FakeFile(weights()), torch.nn.Parameter(torch.zeros(weights()["o"].shape))
    loader = Loader(file.held, lambda w: weight.copy_(w["o"]), file.bring)
    assert loader.direct == loader.nbytes > 0
    loss = (weight * weight).sum()
    loader.load()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_recorded_tensors_are_of_no_use_outside() -> None:
    to, file = made((64, 100))(), FakeFile(weights())
    kept: list[torch.Tensor] = []
    errors: list[str] = []

    def elsewhere() -> None:
        with pytest.raises(ArgumentError) as raised:
            kept[0] + 1
        errors.append(str(raised.value))

    def load(w: Tensors) -> None:
        put(to[0], w["q"])
        kept.append(w["q"])
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    Loader(file.held, load, file.bring)
    assert isinstance(kept[0], RecordedTensor)
    assert repr(kept[0]) == "RecordedTensor(shape=[64, 100], dtype=torch.float32)"
    assert "stands for one of a version" in errors[0]
    with pytest.raises(ArgumentError, match="copy it into a tensor of your own there"):
        to[0].copy_(kept[0])


def test_code_may_ask_for_values_of_what_it_does_not_change() -> None:
    to, file = made((64, 100))(), FakeFile(weights())
    which = torch.tensor([1, 0])
    loader = Loader(file.held, lambda w: put(to[0], w["qk"[int(which[0])]]), file.bring)
    loader.load()
    assert torch.equal(to[0], weights()["k"])


# ---- in a job


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.shared = self.q.weight


def modules() -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    module = Attention()
    return module, [*module.parameters()]


def loaded(job: Job, device: str) -> dict[str, tuple[bool, int, int]]:
    """By case: whether it is as the code does it; bytes read beyond what is kept; and registrations of a later load."""
    params = {name: torch.nn.Parameter(t, requires_grad=t.dtype.is_floating_point) for name, t in weights().items()}
    module, _ = modules()
    params.update({f"m.{name}": p for name, p in module.named_parameters()})
    optimizer = tw.torch.StoreOptimizer([*params.items()], torch.optim.SGD, lr=1.0, publish=True)
    found = {}
    with reading(job, device) as reader:
        into, mine = modules()
        expected, theirs = modules()

        def load_module(w: Tensors, to: list[torch.Tensor]) -> None:
            target = into if to is mine else expected
            state = {name[2:]: tensor for name, tensor in w.items() if name.startswith("m.")}
            target.load_state_dict({**state, "q.weight": state["shared"]})

        cases: dict[str, tuple[Any, Any, Any, Any]] = {
            name: (make(), make(), load, nbytes) for name, (make, load, _, nbytes) in CASES.items()
        }
        cases["load_state_dict"] = mine, theirs, load_module, 2 * 4 * (64 * 64 + 64)
        loaders = {name: reader.loader(lambda w, c=c: c[2](w, c[0])) for name, c in cases.items()}  # type: ignore[misc]
        for counter in (1, 2):
            _, tensors = reader.pull(counter)
            for name, (got, want, load, nbytes) in cases.items():
                before = counters.snapshot()
                version = loaders[name].load(counter)
                after = counters.snapshot()
                assert version == reader.version
                with torch.no_grad():
                    load(copies(tensors), want)
                read = (after.bytes - before.bytes) if device == "tcp" else (after.copied_bytes - before.copied_bytes)
                same = alike(got, want) and found.get(name, (True,))[0]
                found[name] = same, read - nbytes, after.registrations - before.registrations
            for p in params.values():
                p.grad = torch.full_like(p, -1.0) if p.requires_grad else None
            job.barrier()
            optimizer.step()
            optimizer.publish()
        header = reader._layout.data if device == "tcp" else 0
    job.barrier()
    optimizer.close()
    return {name: (same, more - header, registered) for name, (same, more, registered) in found.items()}


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_versions_come_as_the_code_itself_copies_them_and_no_more_is_read(device: str) -> None:
    looks = 6 * 8 * 3 + 2 * 8 * 2 if device == "tcp" else 0  # at the board; the lease of 2 buffers, twice
    for found in run_job(loaded, device).ok():
        assert found == dict.fromkeys([*CASES, "load_state_dict"], (True, looks, 0))


def reported(job: Job) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """What reader and training see of loads, and of one that fails."""
    p = torch.nn.Parameter(torch.ones(300))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, publish=True)
    seen: list[str] = []
    readers: list[tuple[int, list[str]]] = []
    if job.rank == 0:
        to = torch.zeros(300)
        with reading(job, "tcp") as reader:
            loader = reader.loader(lambda w: to.copy_(w["p"]))
            assert reader.version is None
            assert loader.load() == reader.version
            with pytest.raises(WaitTimeout):
                loader.load(timeout=0.01)
            assert reader.version is not None, "nothing was read"
            while not any(each.counter for each in optimizer.readers()):
                pass  # the word is on its way
            readers = [(each.counter, sorted(each.seconds)) for each in optimizer.readers()]
            with pytest.MonkeyPatch.context() as patch:

                def expire(*_: Any, **__: Any) -> None:
                    held = threading.Thread(target=lambda: seen.append(str(reader.lock.acquire(blocking=False))))
                    held.start()
                    held.join()
                    raise VersionExpired("it is gone")

                patch.setattr(LeasedVersion, "read", expire)
                with pytest.raises(VersionExpired):
                    loader.load(1)
            seen.append(str(reader.version))
            assert loader.load() == reader.version, "the newest is as good as another one, now"
        with pytest.raises(ArgumentError, match="this reader was closed"):
            reader.loader(lambda w: to.copy_(w["p"]))
    job.barrier()
    optimizer.close()
    return seen, readers


def test_reader_and_training_see_what_was_loaded() -> None:
    (seen, readers), _ = run_job(reported).ok()
    assert seen == ["False", "None"], "the lock is held, and nobody should use what may be parts"
    assert readers == [(1, ["convert", "pause", "read"])]
