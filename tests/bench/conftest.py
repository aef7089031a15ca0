"""Fixtures of the benchmark's tests."""

from tests.fixtures import sandbox as sandbox
