"""Tensorwire for PyTorch."""

from tensorwire.torch.optimizer import StoreOptimizer

__all__ = ["StoreOptimizer"]
