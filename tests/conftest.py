"""For all tests."""

from __future__ import annotations

import signal

# A shell's background job ignores Ctrl-C and a run under nohup the hangup, and so would every program that a test
# starts and signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
