"""How fast weights come in, and when storage is the limit."""

from __future__ import annotations

import pytest

from specserve.engine.output.loading import WeightsLoaded, seconds


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(Worker pid=18526) INFO 11-29 23:01:17 [default_loader.py:501] Loading weights took 0.00 seconds", 0.0),
        ("INFO 10-08 16:50:25 [default_loader.py:484] Loading weights took 0.77 seconds", 0.77),
        ("(EngineCore) INFO [default_loader.py:397] Loading weights took 125 seconds", 125.0),
        ("INFO [base_loader.py:82] Initializing model took 0.054025 seconds", None),
        ("INFO Model loading took 5.38 GiB memory and 2.637574 seconds", None),
    ],
)  # fmt: skip
def test_the_line_that_says_how_long(line: str, expected: float | None) -> None:
    """Lines of 0.23 to 0.32; other times in the log are not it."""
    assert seconds(line) == expected


@pytest.mark.parametrize(
    ("took", "from_storage", "warns"),
    [
        (100.0, 16_000_000_000, True),
        (100.0, 9_000_000_000, True),
        (100.0, 1_000_000_000, False),  # from the page cache: something else was slow
        (100.0, None, False),
        (8.0, 16_000_000_000, False),
    ],
)
def test_storage_is_named_where_it_is_the_limit(
    took: float, from_storage: int | None, warns: bool
) -> None:
    """Slow, and most of it read from storage; where that is not known nothing is claimed."""
    loaded = WeightsLoaded(16_000_000_000, took, from_storage)
    assert (loaded.warning is not None) is warns
    assert f"{16 / took:.2f} GB/s" in loaded.words
