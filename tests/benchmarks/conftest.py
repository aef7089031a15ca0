"""Fixtures of the tests of comparisons."""

from tests.bench.conftest import only_link as only_link
from tests.bench.conftest import sandbox as sandbox
