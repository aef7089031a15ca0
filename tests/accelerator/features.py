"""What users do with a `StoreOptimizer`, for a model on any device. Each returns what has to be the same on all."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tensorwire as tw
from tests.accelerator import models
from tests.accelerator.programs import BUCKET, Found

STEPS = 3


def made(model: nn.Module, optimizer: Any = torch.optim.AdamW, **options: Any) -> tw.torch.StoreOptimizer:
    return tw.torch.StoreOptimizer(
        model.named_parameters(), optimizer, **{"lr": 0.01, "bucket_bytes": BUCKET, **options}
    )


def values(model: nn.Module) -> Found:
    return [p.detach().cpu().clone() for p in model.parameters()]


def ended(optimizer: tw.torch.StoreOptimizer, model: nn.Module) -> Found:
    optimizer.wait()
    found = values(model)
    optimizer.close()
    return found


def accumulated(job: tw.Job, on: str, overlap: bool) -> Found:
    model = models.built().to(on)
    optimizer = made(model, overlap=overlap)
    for n in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            models.loss(model, 10 * n, job.rank, on).backward()
        models.loss(model, 10 * n + 1, job.rank, on).backward()
        optimizer.step()
    return ended(optimizer, model)


def accumulated_over_steps(job: tw.Job, on: str) -> Found:
    """Nobody sets gradients to zero: each step's are added to the last one's, in place."""
    model = models.built().to(on)
    optimizer = made(model)
    for n in range(STEPS):
        models.loss(model, 2 * n, 0, on).backward()
        optimizer.step()
    return ended(optimizer, model)


def clipped(job: tw.Job, on: str, overlap: bool) -> Found:
    model = models.built().to(on)
    optimizer = made(model, overlap=overlap, max_grad_norm=0.1)
    norms = []
    for n in range(STEPS):
        optimizer.zero_grad()
        models.loss(model, n, job.rank, on).backward()
        optimizer.step()
        norms.append(torch.tensor(optimizer.grad_norm))
    return [*norms, *ended(optimizer, model)]


def clipped_by_users(job: tw.Job, on: str) -> Found:
    model = models.built().to(on)
    optimizer = made(model, overlap=False)
    for n in range(STEPS):
        optimizer.zero_grad()
        models.loss(model, n, job.rank, on).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
    return ended(optimizer, model)


def scaled(job: tw.Job, on: str) -> Found:
    """One worker finds an inf in the second step."""
    model = models.built().to(on)
    optimizer = made(model, overlap=False)
    scaler = torch.amp.GradScaler(torch.device(on).type, init_scale=1024.0, growth_interval=2)
    scales = []
    for n in range(STEPS):
        optimizer.zero_grad()
        loss = models.loss(model, n, job.rank, on)
        if n == 1 and job.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor(scaler.get_scale()))
    return [*scales, *ended(optimizer, model)]


class Recomputed(nn.Module):
    """Blocks with dropout that run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def recomputed(job: tw.Job, on: str) -> Found:
    torch.manual_seed(1)
    model = Recomputed().to(on)
    optimizer = made(model)
    torch.manual_seed(2 + job.rank)
    for n in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * n + job.rank))
        model(x.to(on)).square().sum().backward()
        optimizer.step()
    return ended(optimizer, model)


def compiled(job: tw.Job, on: str, whole: bool, backend: str = "aot_eager") -> Found:
    """Blocks, or all of the model, by ``torch.compile``; gradients of a device are not born in slots."""
    model = models.built().to(on)
    called: nn.Module = model
    if whole:
        called = torch.compile(model, backend=backend)  # type: ignore[assignment]
    else:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    optimizer = made(model)
    for n in range(2 * STEPS):
        optimizer.zero_grad()
        models.loss(called, 2 * n, job.rank % 2 * 2, on).backward()
        optimizer.step()
    found = ended(optimizer, model)
    torch.compiler.reset()
    return found


def saved_and_loaded(job: tw.Job, on: str, to: str, dtype: torch.dtype) -> Found:
    """A checkpoint of two steps, in a file, from which another model goes on elsewhere."""
    model = models.built(dtype).to(on)
    optimizer = made(model)
    for n in range(2):
        optimizer.zero_grad()
        models.loss(model, n, job.rank, on).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    optimizer.close()
    file.seek(0)
    found = torch.load(file, map_location=to, weights_only=True)
    model = models.built(dtype).to(to)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = made(model)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    for n in range(2, 4):
        optimizer.zero_grad()
        models.loss(model, n, job.rank, to).backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    kept = [state[i][key].cpu() for i in sorted(state) for key in sorted(state[i])]
    return [*kept, *ended(optimizer, model)]


def not_finite(job: tw.Job, on: str) -> Found:
    """A step whose gradients have a NaN on one worker is left out by all."""
    model = models.built().to(on)
    optimizer = made(model, error_if_nonfinite=True)
    said = []
    for n in range(STEPS):
        optimizer.zero_grad()
        loss = models.loss(model, n, job.rank, on)
        if n == 1 and job.rank == 1:
            loss = loss * float("nan")
        loss.backward()
        try:
            optimizer.step()
        except tw.errors.NonFiniteGradient as error:
            said.append("worker 1: 'embedding.weight' has NaN" in str(error) and "worker 0" not in str(error))
    assert said == [True]
    return ended(optimizer, model)


def in_turn(job: tw.Job) -> Iterator[bool]:
    """Whether it is this worker's turn, for each worker: what does not wait for others has one order then."""
    for rank in range(job.num_workers):
        yield rank == job.rank
        job.barrier()


def in_mode(job: tw.Job, on: str, mode: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Found:
    model = models.built(dtype).to(on)
    optimizer = made(model, mode=mode, **options)
    lockstep = isinstance(mode, (tw.store.LocalSGD, tw.store.DiLoCo, tw.store.Sync))
    for n in range(2 * STEPS):
        for turn in [True] if lockstep else in_turn(job):
            if turn:
                optimizer.zero_grad()
                models.loss(model, n, job.rank, on).backward()
                if isinstance(mode, tw.store.DiLoCo) and mode.weight == "tokens":
                    optimizer.count(1 + job.rank)
                optimizer.step()
    job.barrier()
    saved = optimizer.state_dict()
    kept = list(saved.get("store", {}).get("parameters", {}).values())
    return [*kept, *ended(optimizer, model)]


class Split(nn.Module):
    """Parts of it are on several devices."""

    def __init__(self, devices: tuple[str, str, str]) -> None:
        super().__init__()
        self.devices = devices
        self.parts = nn.ModuleList(nn.Linear(16, 16).to(d) for d in devices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, device in zip(self.parts, self.devices, strict=True):
            x = part(x.to(device)).tanh()
        return x


def on_several_devices(job: tw.Job, on: str, overlap: bool) -> Found:
    """All in one bucket."""
    torch.manual_seed(0)
    model = Split(("cpu", "sim:0", "sim:1") if on != "cpu" else ("cpu", "cpu", "cpu"))
    optimizer = made(model, overlap=overlap, bucket_bytes=1 << 20)
    for n in range(2 * STEPS):
        optimizer.zero_grad(set_to_none=n % 2 == 0)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * n + job.rank))
        model(x).square().sum().backward()
        optimizer.step()
    return ended(optimizer, model)


def on_streams(job: tw.Job, on: str) -> Found:
    """Two layers run on streams of the user's own, one beside the other, and so do their backward passes."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16).to(on), nn.Linear(16, 16).to(on)
    model = nn.ModuleList([first, second])
    optimizer = made(model, bucket_bytes=1 << 20)
    sides = None if on == "cpu" else [torch.Stream(on) for _ in range(2)]
    for n in range(2 * STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * n + job.rank)).to(on)
        if sides is None:
            y = first(x).tanh() + second(x).sin()
        else:
            here = torch.accelerator.current_stream()
            parts = []
            for side, layer, function in zip(sides, model, (torch.tanh, torch.sin), strict=True):
                side.wait_stream(here)
                with side:
                    parts.append(function(layer(x)))
                x.record_stream(side)
            for side, part in zip(sides, parts, strict=True):
                here.wait_stream(side)
                part.record_stream(here)
            y = parts[0] + parts[1]
        y.square().sum().backward()
        optimizer.step()
    return ended(optimizer, model)


def changed_by_users(job: tw.Job, on: str) -> Found:
    """Values that users set, parameters that they add, and steps that one worker does not take."""
    model = models.built().to(on)
    optimizer = made(model)
    added = nn.Linear(16, 16).to(on)
    torch.manual_seed(3)
    with torch.no_grad():
        added.weight.copy_(torch.randn(16, 16))
        added.bias.zero_()

    def step(n: int, more: bool = False) -> None:
        optimizer.zero_grad()
        loss = models.loss(model, n, job.rank, on)
        if more:
            loss = loss + added(torch.ones(2, 16, device=on)).square().sum()
        loss.backward()
        optimizer.step()

    step(0)
    optimizer.wait()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    optimizer.write_parameters()
    step(1)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    step(2)
    optimizer.add_param_group({"params": [("added." + n, p) for n, p in added.named_parameters()], "lr": 0.1})
    step(3, more=True)
    with job.uneven():
        for n in range(2 + 2 * job.rank):
            step(4 + n, more=True)
    step(9)
    optimizer.wait()
    return [*values(added), *ended(optimizer, model)]


def embedded(job: tw.Job, on: str) -> Found:
    """A `StoreEmbedding` whose lookups are on a device."""
    torch.manual_seed(0)
    table = tw.torch.StoreEmbedding(40, 8, torch.optim.Adagrad, lr=0.1, seed=3)
    head = nn.Linear(8, 4)
    model = nn.ModuleDict({"table": table, "head": head}).to(on)
    optimizer = tw.torch.StoreOptimizer(head.named_parameters(), torch.optim.SGD, lr=0.1)
    losses = []
    for n in range(STEPS):
        optimizer.zero_grad()
        x = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(10 * n + job.rank)).to(on)
        y = model["head"](model["table"](x) + model["table"](x.flip(1)))
        assert y.device == torch.device(on)
        loss = F.cross_entropy(y.reshape(-1, 4), torch.arange(10, device=on) % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    rows = table(torch.arange(40)).detach()
    job.barrier()
    return [*losses, rows, *ended(optimizer, head)]


def with_rule(job: tw.Job, on: str, rule: Any, **options: Any) -> Found:
    model = models.built().to(on)
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), rule, bucket_bytes=BUCKET, **options)
    for n in range(STEPS):
        optimizer.zero_grad()
        models.loss(model, n, job.rank, on).backward()
        optimizer.step()
    return ended(optimizer, model)


Feature = tuple[str, Callable[..., Found], dict[str, Any]]
_MODES = tw.store
FEATURES: list[Feature] = [
    *((f"accumulated, overlap={o}", accumulated, {"overlap": o}) for o in (False, True)),
    ("accumulated over steps", accumulated_over_steps, {}),
    *((f"clipped, overlap={o}", clipped, {"overlap": o}) for o in (False, True)),
    ("clipped by users", clipped_by_users, {}),
    ("scaled", scaled, {}),
    ("recomputed", recomputed, {}),
    ("not finite", not_finite, {}),
    *((f"compiled, whole={w}", compiled, {"whole": w}) for w in (False, True)),
    ("compiled by us", compiled, {"whole": True, "backend": "tensorwire"}),
    ("in Async", in_mode, {"mode": _MODES.Async()}),
    ("in SSP, bf16", in_mode, {"mode": _MODES.SSP(2), "dtype": torch.bfloat16}),
    ("in EASGD", in_mode, {"mode": _MODES.EASGD(every=2)}),
    ("in LocalSGD", in_mode, {"mode": _MODES.LocalSGD(every=2)}),
    ("in DiLoCo", in_mode, {"mode": _MODES.DiLoCo(every=2, weight="tokens")}),
    *((f"by {c}", in_mode, {"mode": _MODES.Sync(), "compression": c}) for c in ("bf16", "topk(0.25)", "int8(64)")),
    *((f"on several devices, overlap={o}", on_several_devices, {"overlap": o}) for o in (False, True)),
    ("on streams", on_streams, {}),
    ("changed by users", changed_by_users, {}),
    ("embedded", embedded, {}),
    ("by sums", with_rule, {"rule": "sum"}),
    ("by Adafactor", with_rule, {"rule": torch.optim.Adafactor, "lr": 0.01}),
]


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """An error says in which feature."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in: {name}") if hasattr(error, "add_note") else None
        raise
