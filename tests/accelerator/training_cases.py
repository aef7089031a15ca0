"""Models that train on the simulated accelerator: the bits of the CPU, in whatever order the device's work runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.accelerator import simulated

STEPS = 3
SCHEDULES = (0, 1, 5, 6)  # what is needed; all else first; two at random, which also run work early
VOCABULARY, WIDTH, LENGTH = 40, 16, 6

Batch = tuple[Tensor, Tensor]
Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Block(nn.Module):
    """A layer as in GPT-2."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop, self.heads = drop, 2
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(drop),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), self.drop)
        return x + self.wide(x)


class GPT(nn.Module):
    """Two layers, and an embedding that is the last layer's weight, too."""

    def __init__(self, drop: float = 0.1, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(drop), Block(drop)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpoints else block(h)
        return self.head(self.norm(h))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(8), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, VOCABULARY)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))


def tokens() -> Batch:
    return torch.randint(0, VOCABULARY, (2, LENGTH)), torch.randint(0, VOCABULARY, (2, LENGTH))


def images() -> Batch:
    return torch.randn(3, 3, 10, 10), torch.randint(0, VOCABULARY, (3,))


def rows() -> Batch:
    return torch.randn(4, 8), torch.randint(0, VOCABULARY, (4,))


def train(
    make: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    optimizers: Optimizers,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    clip: bool = False,
    scale: bool = False,
    compiled: bool = False,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Tensor]:
    """Losses, gradients and the model's state, after some steps."""
    torch.manual_seed(1)
    model, batches = make().to(dtype), [batch() for _ in range(STEPS)]
    model = model.to(device)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = optimizers(model.parameters())
    scaler = torch.amp.GradScaler(device.split(":")[0], init_scale=2.0**10, enabled=scale)
    torch.manual_seed(2)
    seen: list[Tensor] = []
    for x, wanted in batches:
        optimizer.zero_grad()
        x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
        with context():
            loss = F.cross_entropy(forward(x).flatten(0, -2).float(), wanted.to(device).flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        scaler.step(optimizer)
        scaler.update()
    return [value.cpu() for value in [*seen, *model.state_dict().values()]]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


def as_on_cpu(
    make: Callable[[], nn.Module], batch: Callable[[], Batch], optimizers: Optimizers, **options: object
) -> None:
    """Trains on the CPU and under each schedule, and compares bit by bit."""
    with sdpa_kernel(SDPBackend.MATH):  # which a device has that brings no kernels for attention
        wanted = train(make, batch, optimizers, "cpu", **options)
        for seed in SCHEDULES:
            simulated.schedule(seed)
            found = train(make, batch, optimizers, f"sim:{seed % 2}", **options)
            wrong = [
                n for n, (a, b) in enumerate(zip(wanted, found, strict=True)) if not same_bits(a.float(), b.float())
            ]
            assert not wrong, f"schedule {seed}: {len(wrong)} of {len(wanted)} differ, the first is {wrong[0]}"


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False)


def adamw(**options: object) -> Optimizers:
    return lambda parameters: torch.optim.AdamW(parameters, 0.01, **options)


def case_linear() -> None:
    as_on_cpu(mlp, rows, sgd)


def case_linear_foreach() -> None:
    as_on_cpu(mlp, rows, adamw(foreach=True), clip=True)


def case_linear_fused() -> None:
    as_on_cpu(mlp, rows, adamw(fused=True))


def case_cnn_with_batch_norm() -> None:
    as_on_cpu(cnn, images, sgd)


def case_gpt_with_dropout() -> None:
    as_on_cpu(GPT, tokens, adamw(foreach=True), clip=True)


def case_gpt_in_bfloat16() -> None:
    as_on_cpu(lambda: GPT(0.0), tokens, adamw(foreach=False), dtype=torch.bfloat16)


def case_padding_and_dropout_of_a_third() -> None:
    """A factor that has no exact inverse: the CPU's dropout multiplies otherwise than the one of devices."""
    as_on_cpu(
        lambda: nn.Sequential(
            nn.Embedding(VOCABULARY, 8, padding_idx=3), nn.Dropout(1 / 3), nn.LayerNorm(8), nn.Linear(8, VOCABULARY)
        ),
        tokens,
        adamw(foreach=True),
    )


def case_grad_scaler() -> None:
    as_on_cpu(mlp, rows, sgd, scale=True)


def case_checkpoints_with_dropout() -> None:
    as_on_cpu(lambda: GPT(0.2, checkpoints=True), tokens, adamw(foreach=True))


def case_compiled() -> None:
    as_on_cpu(mlp, rows, sgd, compiled=True)


def case_autocast() -> None:
    """Torch's list of operators for devices is not the CPU's: so the schedules are compared with each other."""
    with sdpa_kernel(SDPBackend.MATH):
        found = []
        for seed in SCHEDULES:
            simulated.schedule(seed)
            context = lambda: torch.autocast("sim", torch.bfloat16)  # noqa: E731
            found.append(train(lambda: GPT(0.0), tokens, sgd, "sim:0", context=context))
        assert all(same_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        full = train(lambda: GPT(0.0), tokens, sgd, "cpu")
    assert not same_bits(found[0][0], full[0])
    torch.testing.assert_close(found[0][0], full[0], rtol=0.02, atol=0.02)
    with torch.autocast("sim", torch.bfloat16):
        x = torch.ones(2, 4, device="sim")
        assert F.linear(x, x).dtype == torch.bfloat16
        assert F.layer_norm(F.linear(x, x), (2,)).dtype == torch.float32
