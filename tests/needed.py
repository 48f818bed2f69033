"""What some tests need beside Python: without it they are skipped, but fail where scripts/test asks for everything."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

EVERYTHING = "TESTS_REQUIRE"
"""Set to `all` by scripts/test: a run that left tests out must not look green."""
PACKAGES = {"promtool": "prometheus", "node": "nodejs"}
"""Debian's packages of programs that are called differently."""


def programs(*names: str) -> None:
    """Skip or fail unless all these programs are there."""
    lacking = [name for name in names if shutil.which(name) is None]
    if lacking:
        packages = dict.fromkeys(PACKAGES.get(name, name) for name in lacking)
        missing(f"not installed: {' '.join(lacking)} (apt-get install {' '.join(packages)})")


def missing(what: str) -> NoReturn:
    """Skip, or fail where nothing may be left out."""
    if os.environ.get(EVERYTHING) == "all":
        pytest.fail(f"{what}; with {EVERYTHING}=all no test is skipped for that", pytrace=False)
    pytest.skip(what)
