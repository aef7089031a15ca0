"""VGG-16 whose layers sleep, as if an accelerator computed. For ``python -m benchmarks train``."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from tensorwire import models
from tensorwire.models import Model, vgg16

SLEEPING = "vgg16-sleeping"


class _Away(torch.autograd.Function):
    """Sleeps as long as the layer would take; the gradients lie ready in memory, where an accelerator puts them."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: Layer) -> Tensor:
        context.layer = layer
        time.sleep(layer.seconds / 3)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer = context.layer
        time.sleep(layer.seconds * 2 / 3)
        # Fresh views: autograd takes them over as they are, and copies nothing.
        return gradient, *(ready.view(ready.shape) for ready in layer.ready), None


class Layer(nn.Module):
    """The parameters of a layer that sleeps; ``share`` of the whole model's time."""

    def __init__(self, like: nn.Module, share: float) -> None:
        super().__init__()
        assert isinstance(like, (nn.Conv2d, nn.Linear))
        assert like.bias is not None
        self.weight, self.bias = like.weight, like.bias
        self.share, self.seconds = share, 0.0
        self.ready = [torch.full_like(p, 1e-4, requires_grad=False) for p in (self.weight, self.bias)]

    def forward(self, x: Tensor) -> Tensor:
        """Nothing but time."""
        out: Tensor = _Away.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return out


class SleepingLayers(nn.Module):
    """VGG-16's shapes: layers sleep in proportion to their operations, a third of it forward.

    ``seconds``, in all, is set before a step. A processor core that computed would take time from those that transfer;
    an accelerator does not.
    """

    def __init__(self, shrink: int = 1) -> None:
        super().__init__()
        layers, operations = _operations(shrink)
        self.layers = nn.ModuleList(
            Layer(layer, n / sum(operations)) for layer, n in zip(layers, operations, strict=True)
        )

    def take(self, seconds: float) -> None:
        """From now on forward and backward take so long together."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.seconds = seconds * layer.share

    def forward(self, x: Tensor) -> Tensor:
        """``x``: one number, which comes back."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _operations(shrink: int) -> tuple[list[nn.Module], list[int]]:
    """VGG-16's layers with parameters, and the multiplications of each for an image of 224 x 224."""
    net = vgg16(shrink).net
    assert isinstance(net, nn.Sequential)
    layers: list[nn.Module] = []
    operations = []
    side = 224
    for layer in net:
        if isinstance(layer, nn.MaxPool2d):
            side //= 2
        elif isinstance(layer, (nn.Conv2d, nn.Linear)):
            layers.append(layer)
            operations.append(layer.weight.numel() * (side**2 if isinstance(layer, nn.Conv2d) else 1))
    return layers, operations


def one(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A number that gradients flow to."""
    return (torch.ones(size, requires_grad=True),)


MODELS = {**models.MODELS, SLEEPING: Model(SLEEPING, "VGG-16, layers that sleep", 1, SleepingLayers, one)}
