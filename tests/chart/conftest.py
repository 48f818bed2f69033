"""The real helm, fetched on first use."""

from __future__ import annotations

import subprocess

import pytest

from tests.chart.rendering import HELM, ROOT


@pytest.fixture(scope="session", autouse=True)
def helm() -> None:
    """The real binary; fetched on first use."""
    done = subprocess.run([str(ROOT / "scripts" / "chart-tools")], capture_output=True, text=True, check=False)
    if not HELM.exists():
        pytest.skip(f"helm cannot be had: {done.stderr[-300:]}")
