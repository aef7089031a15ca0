"""Fixtures of the tests of the store."""

from tests.fixtures import sandbox as sandbox
