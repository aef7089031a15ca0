"""For every test."""

from __future__ import annotations

import functools
import os
import signal
import sys

# A shell gives its background jobs an ignored SIGINT and SIGQUIT, nohup an ignored SIGHUP, and children inherit that;
# the tests of Ctrl-C, Ctrl-\ and closed terminals need the usual ones.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Nobody measures copies while tests count threads; those of the choice unset it.
os.environ.setdefault("TENSORWIRE_COPY", "streaming:16MiB")

# Under coverage, a forked child could wait for a lock of the tracer that another thread held at the fork. What a child
# runs is not counted anyhow.
os.register_at_fork(after_in_child=functools.partial(sys.settrace, None))
