#!/usr/bin/env python3
"""Write docs/metrics.md from the table of families. A test fails when it is stale."""

from __future__ import annotations

from pathlib import Path

from specserve.metric_families import CONDITIONS, FAMILIES, STATES, WINDOWS, window_label

PATH = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

Written by `scripts/update_metrics.py` from `specserve/metric_families.py`.

The sidecar serves them on `/metrics` (port 9400) as `text/plain; version=0.0.4`, whatever a scraper asks for. Every
sample carries one more label, `model_name`, the name that clients send. A family of which nothing is known has no
sample: zero means measured zero. Counters outlive restarts of the engine.

Ratios over a fleet are ratios of sums, never averages: `sum by (model_name) (rate(specserve_accepted_tokens_total[5m]))
/ sum by (model_name) (rate(specserve_draft_tokens_total[5m]))`.

- `window`: {windows}, and the window of the acceptance alert. Weighted by tokens.
- `stat`: p50, p90, p99, mean, from differences of the engine's histograms.
- `condition`: {conditions}. `state`: {states}.
- The acceptance rate counts every draft token, also those behind a rejected one. It is not comparable across
  disaggregated prefill, asynchronous scheduling and lookup methods, where engines count drafts differently; the mean
  acceptance length is. It cannot be split by temperature or endpoint: the engine has no such labels.
- The sidecar's own canaries (one token each) are left out of request and token counts of the windows; in
  latencies they cannot be told apart, so latencies are absent while there is no other traffic. What a comparison while
  serving asks for (`sidecar.comparison_interval_seconds`) counts as traffic.

| name | kind | unit | labels | meaning |
|---|---|---|---|---|
"""


def document() -> str:
    """The whole file."""
    head = HEAD.format(
        windows=", ".join(map(window_label, WINDOWS)),
        conditions=", ".join(CONDITIONS),
        states=", ".join(STATES),
    )
    rows = [
        f"| `{f.name}` | {f.kind} | {f.unit} | {', '.join(f'`{label}`' for label in f.labels)} | {f.help} |\n"
        for f in FAMILIES.values()
    ]
    return head + "".join(rows)


if __name__ == "__main__":
    PATH.write_text(document())
