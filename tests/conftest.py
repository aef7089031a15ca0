"""For every test."""

from __future__ import annotations

import signal

# A shell gives its background jobs an ignored SIGINT, nohup an ignored SIGHUP, and children inherit that; the tests of
# Ctrl-C and of closed terminals need the usual ones.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
