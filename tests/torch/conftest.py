"""Fixtures of the tests with PyTorch."""

from tests.fixtures import one_thread as one_thread
from tests.fixtures import sandbox as sandbox
