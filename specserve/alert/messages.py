"""Alerts as the JSON bodies that receivers understand. Pure: no clock, no network."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TypedDict

from specserve.alert.evaluate import Alert
from specserve.alert.rules import AlertState

SIGNATURE_HEADER = "X-Specserve-Signature"
_NEVER = "0001-01-01T00:00:00Z"
"""How Alertmanager's webhook writes "still firing"."""
_EMOJI = {"critical": ":rotating_light:", "warning": ":warning:", "info": ":information_source:"}


class AlertBody(TypedDict):
    """An alert as Alertmanager and its webhooks write it."""

    labels: dict[str, str]
    annotations: dict[str, str]
    startsAt: str
    endsAt: str


def labels(alert: Alert, identity: Mapping[str, str]) -> dict[str, str]:
    """The labels that identify an alert outside: who reports, the rule, and the instance."""
    return {**identity, **dict(alert.labels), "alertname": alert.name, "severity": alert.severity}


def timestamp(at: float) -> str:
    """Unix seconds as RFC 3339 in UTC.

    >>> timestamp(1796000000.25)
    '2026-11-30T00:53:20.250Z'
    """
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _annotations(alert: Alert) -> dict[str, str]:
    pairs = {
        "summary": alert.summary,
        "description": _description(alert),
        "runbook_url": alert.runbook_url,
    }
    return {name: text for name, text in pairs.items() if text}


def _description(alert: Alert) -> str:
    """The number, and while it lasts what it usually is."""
    if alert.state is AlertState.RESOLVED or not alert.causes:
        return alert.description
    return f"{alert.description}. Likely: {'; '.join(alert.causes)}"


def _common(alert: Alert, identity: Mapping[str, str], *, until: str) -> AlertBody:
    """``until`` is the end of an alert that has not ended."""
    ends_at = until
    if alert.ended_at is not None:
        ends_at = timestamp(alert.ended_at)
    return {
        "labels": labels(alert, identity),
        "annotations": _annotations(alert),
        "startsAt": timestamp(alert.started_at or 0.0),
        "endsAt": ends_at,
    }


def alertmanager(
    alerts: Sequence[Alert], identity: Mapping[str, str], *, until: float
) -> list[AlertBody]:
    """The body of ``POST /api/v2/alerts``.

    A firing alert ends at ``until`` unless it is sent again before, so it goes away when the
    sidecar does.
    """
    return [_common(alert, identity, until=timestamp(until)) for alert in alerts]


def webhook(alerts: Sequence[Alert], identity: Mapping[str, str]) -> dict[str, object]:
    """The body of Alertmanager's own webhook, version 4, so that its receivers work unchanged."""
    entries = []
    for alert in alerts:
        status = "firing"
        if alert.state is AlertState.RESOLVED:
            status = "resolved"
        entries.append(
            {
                "status": status,
                **_common(alert, identity, until=_NEVER),
                "generatorURL": "",
                "fingerprint": fingerprint(labels(alert, identity)),
            }
        )
    status = "resolved"
    if any(entry["status"] == "firing" for entry in entries):
        status = "firing"
    return {
        "version": "4",
        "groupKey": "specserve",
        "truncatedAlerts": 0,
        "status": status,
        "receiver": "specserve",
        "groupLabels": {},
        "commonLabels": dict(identity),
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": entries,
    }


def slack(alerts: Sequence[Alert], identity: Mapping[str, str]) -> dict[str, str]:
    """A text for a Slack-compatible incoming webhook, its three control characters escaped."""
    who = " ".join(f"{name}={value}" for name, value in sorted(identity.items()))
    lines = []
    for alert in alerts:
        mark, word = _EMOJI[alert.severity], alert.severity
        if alert.state is AlertState.RESOLVED:
            mark, word = ":white_check_mark:", "resolved"
        where = " ".join(f"{name}={value}" for name, value in alert.labels)
        lines.append(f"{mark} *{alert.name}* {word}: {_escape(alert.summary)}")
        lines += [_escape(_description(alert)), _escape(f"{where} {who}".strip())]
        if alert.runbook_url and alert.state is not AlertState.RESOLVED:
            lines.append(_escape(f"Runbook: {alert.runbook_url}"))
    return {"text": "\n".join(lines)}


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def fingerprint(pairs: Mapping[str, str]) -> str:
    """A short stable name of a set of labels."""
    text = "\x00".join(f"{name}\x01{value}" for name, value in sorted(pairs.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def signature(secret: str, body: bytes, *, at: int) -> str:
    """The signature header: ``t=<unix seconds>,v1=<HMAC-SHA256 of "<t>.<body>" in hex>``.

    The receiver computes the same over the raw body, compares in constant time, and refuses an old
    ``t``.

    >>> signature("key", b"{}", at=1)[:12]
    't=1,v1=1ba6b'
    """
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"
