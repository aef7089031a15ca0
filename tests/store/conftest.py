"""Fixtures of the tests of the store."""

from tests.fixtures import one_thread as one_thread
from tests.fixtures import sandbox as sandbox
