"""Several runs of pytest as one closing line:  python scripts/sum_results.py FOLDER (of JUnit XML files)."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def closing_line(folder: Path) -> str:
    """The line that pytest would have printed for all of them."""
    counts = {"failed": 0, "passed": 0, "skipped": 0, "errors": 0}
    seconds = 0.0
    for path in sorted(folder.glob("*.xml")):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            number = {
                key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
            }
            counts["failed"] += number["failures"]
            counts["errors"] += number["errors"]
            counts["skipped"] += number["skipped"]
            counts["passed"] += (
                number["tests"] - number["failures"] - number["errors"] - number["skipped"]
            )
            seconds += float(suite.get("time", 0))
    found = (
        ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no tests ran"
    )
    return f" {found} in {seconds:.2f}s ".center(80, "=")


if __name__ == "__main__":
    print(closing_line(Path(sys.argv[1])))
