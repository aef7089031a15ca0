"""Tests on a simulated accelerator: a device of PyTorch whose work runs late, and in another order."""
