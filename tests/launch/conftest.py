"""Fixtures of the launcher's tests."""

from tests.fixtures import sandbox as sandbox
