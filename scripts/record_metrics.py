#!/usr/bin/env python3
"""Record an engine's /metrics as it changes, for replay in tests.

    scripts/record_metrics.py http://127.0.0.1:8000 tests/data/metrics/0.32.jsonl.gz --seconds 60 --interval 5

One JSON object a line: {"at": seconds, "text": exposition}. Paths in model names become /models/NAME.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from pathlib import Path

import requests


def neutral(text: str) -> str:
    """No path of the recording machine stays in the text."""
    return re.sub(r'(model_name|engine_dir|path)="[^"]*/([^"/]+)"', r'\1="/models/\2"', text)


def record(url: str, path: Path, *, seconds: float, interval: float) -> int:
    """Read every ``interval`` until ``seconds`` are over; the number of reads."""
    begun, count = time.monotonic(), 0
    with gzip.open(path, "wt", encoding="utf-8") as file:
        while (at := time.monotonic() - begun) <= seconds:
            answer = requests.get(f"{url}/metrics", timeout=30)
            answer.raise_for_status()
            file.write(json.dumps({"at": round(at, 3), "text": neutral(answer.text)}) + "\n")
            count += 1
            time.sleep(max(0.0, begun + count * interval - time.monotonic()))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=5.0)
    given = parser.parse_args()
    count = record(
        given.url.rstrip("/"), given.path, seconds=given.seconds, interval=given.interval
    )
    print(f"{count} reads in {given.path}")


if __name__ == "__main__":
    main()
