"""The cases of reaping.py, in a pid namespace of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from programs import OWN_PIDS, require_own_pids


def test_only_what_is_ours_is_ended() -> None:
    """Each case of reaping.py; a process that it ends by mistake is none of this machine's."""
    require_own_pids()
    cases = Path(__file__).with_name("reaping.py")
    argv = [*OWN_PIDS, sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:xdist"]
    argv += ["-p", "no:cacheprovider", str(cases)]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert out.returncode == 0, out.stdout[-20_000:] + out.stderr[-2_000:]
    assert " passed" in out.stdout
