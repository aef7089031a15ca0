"""No test of the test tools leaves anything behind either."""

from tensorwire.testing.fixtures import in_thread as in_thread
from tensorwire.testing.fixtures import nothing_left as nothing_left
from tensorwire.testing.fixtures import warm as warm
