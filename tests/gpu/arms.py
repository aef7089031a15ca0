"""Who trains, each in its own process: torch's AdamW on the device, three libraries that offload it, and the store.

Each has the same model and tokens, and keeps fp32 state and masters if it can; ``keeps`` says what it does keep.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import tensorwire as tw
from tests.gpu import devices
from tests.gpu.model import GPT, Shape, build, tokens
from tests.gpu.programs import NotHere, answer, one_line
from tests.gpu.turns import Arm, take_turns
from tests.harness.jobs import run_job

BATCHES = 4
LEARNING: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Load:
    """What all of them compute."""

    kind: str
    shape: Shape
    batch: int
    warm: int  # steps that nobody times


@dataclass(frozen=True)
class Ours:
    """How the store is set up: one worker, and servers on the same cores."""

    servers: int
    overlap: bool
    threads: int  # of a server


def peer(pipe: Connection, load: Load, make: Callable[[Load, torch.device], Arm]) -> None:
    """The program of everybody but the store."""
    device = devices.prepare(load.kind)
    take_turns(pipe, make(load, device), device, load.warm)


def baseline(pipe: Connection, load: Load, seconds: float) -> None:
    """The program of who is there all the time; first it answers what is computed, where a batch of 0 is to be chosen.

    A batch is chosen so that forward and backward take about ``seconds``.
    """
    device = devices.prepare(load.kind)
    if not load.batch:
        load = replace(load, batch=suitable_batch(load, device, seconds))
    answer(pipe, (devices.name(device), load.batch, parameters(load.shape)))
    take_turns(pipe, torch_adamw(load, device), device, load.warm)


def store(pipe: Connection, load: Load, setup: Ours) -> None:
    """The program of the store: a job."""
    devices.hide_from_servers()
    job = run_job(
        store_worker,
        *(pipe, load, setup),
        workers=1,
        servers=setup.servers,
        prepare=partial(_set_threads, setup.threads),
        fresh=True,
    )
    if job.errors != [""]:
        raise RuntimeError(job.errors[0] + (f"; the job ended: {job.cause}" if job.cause else ""))


def _set_threads(threads: int) -> None:
    os.environ["TENSORWIRE_SERVER_THREADS"] = str(threads)


def store_worker(job: tw.Job, pipe: Connection, load: Load, setup: Ours) -> None:
    """The worker."""
    device = devices.prepare(load.kind)
    model = build(load.shape, device, torch.bfloat16)
    optimizer = tw.torch.StoreOptimizer(model, torch.optim.AdamW, overlap=setup.overlap, **LEARNING)
    keeps = f"bf16 parameters here; fp32 masters and state in servers, threads of each: {setup.threads}"
    copies = optimizer._parts[0].copies
    note = "" if copies is None else copies.describe()
    take_turns(pipe, _arm(load, device, model, optimizer, keeps, note, optimizer.wait), device, load.warm)


def _arm(
    load: Load,
    device: torch.device,
    model: nn.Module,
    optimizer: Any,
    keeps: str,
    note: str = "",
    settle: Callable[[], object] = lambda: None,
) -> Arm:
    """A loop as people write it."""
    batches = [tokens(load.shape, load.batch, device, seed) for seed in range(BATCHES)]

    def compute(number: int) -> Tensor:
        loss: Tensor = model(*batches[number % BATCHES])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(number: int) -> Tensor:
        loss = compute(number)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Arm(compute, step, model.zero_grad, settle, keeps, note)


# ---- on the device


class WithMasters:
    """torch.optim.AdamW over fp32 masters of half-precision parameters, all on the device."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self._params = params
        self._masters = [nn.Parameter(p.detach().float()) for p in params]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **LEARNING)

    @torch.no_grad()
    def step(self) -> None:
        """One update, and the parameters are rounded masters."""
        for master, p in zip(self._masters, self._params, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_([*self._params], [*self._masters])

    def zero_grad(self) -> None:
        """``step`` has done so."""


def torch_adamw(load: Load, device: torch.device) -> Arm:
    """What the others are compared with."""
    model = build(load.shape, device, torch.bfloat16)
    optimizer = WithMasters(list(model.parameters()))
    return _arm(load, device, model, optimizer, "bf16 parameters, fp32 masters and state, all on the device")


# ---- libraries that offload


def torchao(load: Load, device: torch.device) -> Arm:
    """torchao's CPUOffloadOptimizer."""
    try:
        from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotHere(_missing("torchao", error)) from None
    model = build(load.shape, device, torch.bfloat16)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **LEARNING
    )
    keeps = "bf16 parameters here; bf16 copies and state on the CPU, no masters: it has none"
    return _arm(load, device, model, optimizer, keeps)


def fsdp(load: Load, device: torch.device) -> Arm:
    """FSDP2 with its offload, in a world of one."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    mesh = _world_of_one(device)
    model = build(load.shape, device, torch.float32)
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **LEARNING)
    return _arm(load, device, model, optimizer, "fp32 parameters and state on the CPU; bf16 layers here while they run")


def _world_of_one(device: torch.device) -> Any:
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    backends = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
    if device.type not in backends:
        raise NotHere(f"torch.distributed has no collectives for {device.type!r}")
    folder = tempfile.mkdtemp(prefix="tensorwire-gpu-")
    rendezvous = FileStore(f"{folder}/store", 1)
    torch.distributed.init_process_group(backends[device.type], store=rendezvous, rank=0, world_size=1)
    return init_device_mesh(device.type, (1,))


def deepspeed(load: Load, device: torch.device) -> Arm:
    """DeepSpeed's ZeRO-Offload, which builds its optimizer for the CPU when it is first used."""
    try:
        import deepspeed as library  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotHere(_missing("deepspeed", error)) from None
    _world_of_one(device)
    model = build(load.shape, device, torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": load.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": dict(LEARNING)},
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    arm = _arm(load, device, engine, engine, "bf16 parameters here; fp32 masters and state on the CPU")
    batches = [tokens(load.shape, load.batch, device, seed) for seed in range(BATCHES)]

    def step(number: int) -> Tensor:
        loss: Tensor = engine(*batches[number % BATCHES])
        engine.backward(loss)
        engine.step()
        return loss

    return Arm(step, step, arm.clear, arm.settle, arm.keeps)


def _missing(library: str, error: ImportError) -> str:
    return "not installed" if getattr(error, "name", None) == library else one_line(error)


# ---- the size of a batch


def suitable_batch(load: Load, device: torch.device, seconds: float) -> int:
    """How many samples make forward and backward take about ``seconds``, and leave half of the memory free."""
    few = 4
    model = build(load.shape, device, torch.bfloat16)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    ticks = devices.Ticks(device)
    for number in range(4):
        ticks.mark()
        model(*tokens(load.shape, few, device, number)).backward()
        model.zero_grad()
    ticks.mark()
    torch.accelerator.synchronize(device)
    each = min(ticks.seconds()) / few
    of_sample = (torch.accelerator.max_memory_allocated(device) - before) / few
    most = 0.4 * devices.memory(device) / max(1.0, of_sample)
    return max(1, int(min(seconds / each, most)))


def parameters(shape: Shape) -> int:
    """How many numbers are trained."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(shape).parameters())
