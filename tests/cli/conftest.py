"""Fixtures of the command line's tests."""

from tests.fixtures import sandbox as sandbox
