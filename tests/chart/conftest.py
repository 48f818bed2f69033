"""The real helm, fetched on first use."""

from __future__ import annotations

import pytest

from tests.chart.rendering import fetch_tools


@pytest.fixture(scope="session", autouse=True)
def helm() -> None:
    """The real binary."""
    fetch_tools()
