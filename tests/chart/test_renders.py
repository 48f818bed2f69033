"""What helm renders, and the words of every refusal, are what was recorded: the chart's part of scripts/goldens."""

from __future__ import annotations

import subprocess
import sys

from tests.chart.rendering import ROOT


def test_renders_are_the_recorded_ones() -> None:
    """Every values file, toggle, profile and config renders, or is refused, byte for byte as recorded."""
    argv = [sys.executable, ROOT / "scripts" / "goldens", "--only", "chart"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
