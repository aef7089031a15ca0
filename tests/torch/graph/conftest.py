"""Fixtures of the tests of births."""

from tests.fixtures import sandbox as sandbox
