"""For all tests."""

from __future__ import annotations

import signal

import pytest

from tests import needed

# A shell's background job ignores Ctrl-C and a run under nohup the hangup, and so would every program that a test
# starts and signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: the programs that a test is marked with."""
    for marker in item.iter_markers("needs"):
        needed.programs(*marker.args)
