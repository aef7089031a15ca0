"""For every test."""

from __future__ import annotations

import signal

# A shell gives its background jobs an ignored SIGINT, and children inherit it; the tests of Ctrl-C need the usual one.
signal.signal(signal.SIGINT, signal.default_int_handler)
