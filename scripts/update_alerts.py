#!/usr/bin/env python3
"""Write docs/alerts.md from the table of alerts and the defaults of the settings. A test fails when it is stale."""

from __future__ import annotations

from pathlib import Path

from specserve.alert import messages
from specserve.alert.builtin import Definition, Thresholds, definitions, fill, thresholds
from specserve.alert.prometheus import inhibit_rules, short_duration
from specserve.config.alerting import Alerts
from specserve.metric_families import FAMILIES

PATH = Path(__file__).parents[1] / "docs" / "alerts.md"
HEAD = """\
# Alerts

Written by `scripts/update_alerts.py` from `specserve/alert/builtin.yaml` and the defaults of the settings.

The sidecar evaluates these rules after every read of the engine's metrics; `specserve alerts rules` writes the same
rules for Prometheus. An alert is *inactive*, *pending* (its condition holds, not yet for its time), *firing*, or
*resolved*. It fires at one threshold and resolves at another. Values with too small a sample, and absent values,
neither fire nor resolve: a pending alert starts over, a firing one stays for `keep_firing_for_seconds` and then
resolves with the reason "no data". An alert that is explained by another (inhibited by) is shown, not sent.

| alert | severity | what it looks at | fires | resolves | for | minimum sample |
|---|---|---|---|---|---|---|
"""

SETTINGS = f"""
Off until a threshold is set: the rows without one under "fires".

## Change, switch off, add

```yaml
alerts:
  acceptance_rate: {{fire_below: 0.4, resolve_above: 0.45}}   # AcceptanceRateLow
  rules:
    LatencySLOTTFT: {{fire_above: 0.5, resolve_below: 0.4}}   # seconds
    GPUTemperatureHigh: {{enabled: false}}
  custom:
    - {{name: ManyRunning, metric: specserve_requests_running, fire_above: 64, for_seconds: 300, severity: info}}
```

`specserve alerts metrics` prints the families that a custom rule may use; docs/metrics.md says what they mean.
Rate and mean length are both published. The rate is not comparable between methods or between servers that split
prefill from decoding (padding inflates what counts as drafted); go by `AcceptanceLengthLow` there.
The engine counts no temperature and no adapter, so acceptance cannot be split by either; the start-up canary publishes
the acceptance of one text greedy and at the server's default sampling.

## Receivers

```yaml
alerts:
  labels: {{cluster: a}}
  notify:
    - {{type: alertmanager, url: "http://alertmanager:9093"}}
    - {{type: webhook, url: "https://example.org/hook", secret_file: /run/secrets/hook}}
    - {{type: slack, url_file: /run/secrets/slack}}
```

Each receiver has its own thread and a bounded queue that keeps the latest word on each alert, so a dead receiver
delays no other and nothing else. Failures are tried again with growing pauses up to a minute; a refusal (4xx) is not.
`bearer_token_file` logs in to an Alertmanager or webhook. A webhook gets the JSON of Alertmanager's own webhook,
version 4. With a secret it carries `{messages.SIGNATURE_HEADER}: t=<unix seconds>,v1=<hex>`; to verify it:

```python
stamp, digest = (part.partition("=")[2] for part in header.split(","))
expected = hmac.new(secret, stamp.encode() + b"." + body, hashlib.sha256).hexdigest()
genuine = hmac.compare_digest(digest, expected) and abs(time.time() - int(stamp)) < 300
```

## Prometheus

`specserve alerts rules [CONFIG]` writes the rule file (the chart ships the one of the defaults). Ratios are ratios of
summed rates over a model's replicas. Collapse, stalls, queues and devices are judged per replica, because a fleet
hides one broken member. `specserve alerts lint FILE --url URL` finds rules, also of your own, that ask for a series
which nobody exports and so can never fire. There is no `absent()` for each family: what is not known has no sample, by
design; `SidecarAbsent` says when nobody reports at all. These rules tell Alertmanager what explains what:

```yaml
"""


def document() -> str:
    """The whole file."""
    rows = (row(d, thresholds(Alerts(), d.name)) for d in definitions())
    return HEAD + "\n".join(rows) + "\n" + SETTINGS + inhibit_rules() + "```\n"


def row(definition: Definition, limits: Thresholds) -> str:
    """One line of the table."""
    name = f"[{definition.name}](runbooks/{definition.name}.md)"
    sign, back = ("<", "≥") if limits.direction == "below" else (">", "≤")
    fires = "" if limits.fire is None else f"{sign} {limits.fire:g}"
    resolves = "" if limits.fire is None else f"{back} {limits.resolve:g}"
    wait = short_duration(limits.timing.for_seconds) if limits.timing.for_seconds else "at once"
    subject = f"`{definition.metric}`" if definition.metric else "Prometheus only"
    if definition.labels:
        labels = ", ".join(f"{k} {' or '.join(v)}" for k, v in definition.labels.items())
        subject += f" ({fill(labels, {'acceptance_window': '5m', 'last_position': 'the last'})})"
    unit = FAMILIES[definition.sample.partition("{")[0]].unit if definition.sample else ""
    sample = f"{limits.min_samples:g} {unit}" if limits.min_samples else ""
    return (
        f"| {name} | {definition.severity} | {subject} | {fires} | {resolves} | {wait} | {sample} |"
    )


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
