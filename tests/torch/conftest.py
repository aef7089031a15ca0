"""Fixtures of the tests with PyTorch."""

from tests.fixtures import sandbox as sandbox
