"""Receivers: Alertmanager, webhook, Slack. A dead one delays nothing, loses little, and leaks
nothing.

`Notifier.publish` is called after every evaluation with what receivers should know *now*; it only
fills one bounded outbox for each receiver and returns. One thread for each receiver empties its
outbox. An outbox holds the latest word on an alert, not a history: after an outage the receiver
hears how things stand.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError

from specserve.alert import messages
from specserve.alert.evaluate import Alert
from specserve.alert.rules import AlertState
from specserve.config.alerting import AlertmanagerReceiver, Receiver, SlackReceiver
from specserve.metric_families import MetricKey, key

_LOG = logging.getLogger(__name__)
_TIMEOUT = (3.0, 5.0)
"""Seconds to connect and to wait for the answer."""
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_BATCH = 64
"""Alerts in one message."""


@dataclass(frozen=True)
class NotifyTimes:
    """Times in seconds, and the size of an outbox."""

    repeat: float = 14400.0
    """Webhook and Slack hear again of an alert that still fires."""
    resend: float = 60.0
    """Alertmanager must hear again, or it takes the alert for resolved after four times this."""
    interval: float = 0.0
    """From one `publish` to the next: where it is longer, nothing can be resent sooner."""
    first_retry: float = 1.0
    longest_retry: float = 60.0
    capacity: int = 256


class Outbox:
    """The latest word on each alert that one receiver has not heard yet. Full: the oldest goes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: OrderedDict[str, Alert] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, fingerprint: str, alert: Alert) -> int:
        """Add or replace; the number of alerts that had to go. Closed, it takes none."""
        with self._changed:
            if self._closed:
                return 1
            self._waiting[fingerprint] = alert
            dropped = max(0, len(self._waiting) - self._capacity)
            for _ in range(dropped):
                self._waiting.popitem(last=False)
            self._changed.notify()
        return dropped

    def put_back(self, batch: Mapping[str, Alert]) -> int:
        """Return what could not be sent, unless something newer has come; the number that found no
        room."""
        with self._changed:
            still_news = [fingerprint for fingerprint in batch if fingerprint not in self._waiting]
            room = max(0, self._capacity - len(self._waiting))
            for fingerprint in reversed(still_news[max(0, len(still_news) - room) :]):
                self._waiting[fingerprint] = batch[fingerprint]
                self._waiting.move_to_end(fingerprint, last=False)
        return max(0, len(still_news) - room)

    def take(self, timeout: float) -> dict[str, Alert]:
        """Up to one message's worth, oldest first; empty after ``timeout`` seconds without any."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout)
            return dict(
                self._waiting.popitem(last=False) for _ in range(min(_BATCH, len(self._waiting)))
            )

    def close(self) -> None:
        """From now on `take` does not wait, and `put` takes nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._waiting)


@dataclass(frozen=True)
class Delivery:
    """The outcome of one attempt."""

    ok: bool
    again: bool = False
    """Whether another attempt could succeed."""
    what: str = ""
    """What happened, without URL, headers or body."""


class Worker:
    """One receiver: its outbox, its thread, and what it was told last."""

    def __init__(
        self,
        name: str,
        config: Receiver,
        identity: Mapping[str, str],
        times: NotifyTimes,
        wall: Callable[[], float],
    ) -> None:
        self.name = name
        self.outcomes: Counter[str] = Counter()
        self.outbox = Outbox(times.capacity)
        self._config, self._identity, self._times, self._wall = config, identity, times, wall
        self._told: dict[str, tuple[AlertState, float]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"notify-{name}", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def publish(self, alerts: Sequence[Alert], now: float) -> None:
        """Queue what this receiver does not know yet, or must hear again."""
        repeat, present = self._times.repeat, set()
        if isinstance(self._config, AlertmanagerReceiver):
            repeat = self._times.resend
        for alert in alerts:
            fingerprint = messages.fingerprint(messages.labels(alert, self._identity))
            present.add(fingerprint)
            state, at = self._told.get(fingerprint, (None, 0.0))
            if state is not alert.state or (
                alert.state is AlertState.FIRING and now - at >= repeat
            ):
                self._told[fingerprint] = (alert.state, now)
                self.outcomes["dropped"] += self.outbox.put(fingerprint, alert)
        self._told = {
            f: told
            for f, told in self._told.items()
            if f in present or told[0] is AlertState.FIRING
        }

    def stop(self) -> None:
        """Ask the thread to send what is left, once, and end."""
        self._stopping.set()
        self.outbox.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout)

    def _run(self) -> None:
        """Until `stop`. A bug ends it too: then what it held counts as failed, and what comes as
        dropped."""
        session = requests.Session()
        batch: dict[str, Alert] = {}
        pause, complaint = self._times.first_retry, ""
        try:
            while True:
                stopping = self._stopping.is_set()
                batch = self.outbox.take(3600.0)
                if not batch:
                    if stopping:
                        return
                    continue
                delivery = self._send(session, list(batch.values()))
                if delivery.what != complaint:
                    self._report(delivery)
                complaint = delivery.what
                if delivery.again and not stopping:
                    self.outcomes["failed"] += self.outbox.put_back(batch)
                    self._stopping.wait(pause)
                    pause = min(2 * pause, self._times.longest_retry)
                else:
                    outcome = "failed"
                    if delivery.ok:
                        outcome = "sent"
                    self.outcomes[outcome] += len(batch)
                    pause = self._times.first_retry
        finally:
            self.outcomes["failed"] += len(batch)
            self.outbox.close()
            session.close()

    def _report(self, delivery: Delivery) -> None:
        """Log a failure once, when it differs from the last one, and the recovery."""
        extra = {"receiver": self.name}
        if delivery.ok:
            _LOG.info("alert receiver works again", extra=extra)
            return
        then = "gave up on this message"
        if delivery.again:
            then = "will try again"
        _LOG.warning("alert receiver failed: %s; %s", delivery.what, then, extra=extra)

    def _send(self, session: requests.Session, alerts: Sequence[Alert]) -> Delivery:
        host: str | None = None
        try:
            url, body, headers = self._request(alerts)
            host = urlsplit(url).hostname
            # Neither redirected (a secret would travel on) nor read: only the status counts.
            with session.post(
                url,
                data=body,
                headers=headers,
                timeout=_TIMEOUT,
                allow_redirects=False,
                stream=True,
            ) as response:
                status = response.status_code
        # The text of these errors holds the URL, which for Slack is the secret.
        except ValueError as error:
            # Before OSError: requests' errors about a URL or a header are both.
            return Delivery(False, what=f"its URL or token cannot be used ({type(error).__name__})")
        except (requests.RequestException, HTTPError) as error:
            return Delivery(False, again=True, what=f"{type(error).__name__} at {host}")
        except OSError as error:  # a CA bundle that is not there
            return Delivery(False, again=True, what=str(error))
        if 200 <= status < 300:
            return Delivery(True)
        return Delivery(False, again=status in _RETRY_STATUS, what=f"HTTP {status} from {host}")

    def _request(self, alerts: Sequence[Alert]) -> tuple[str, bytes, dict[str, str]]:
        headers = {"Content-Type": "application/json", "User-Agent": "specserve"}
        config, now = self._config, self._wall()
        if isinstance(config, SlackReceiver):
            url = ""
            if config.url is not None:
                url = config.url.get_secret_value()
            return url, _json(messages.slack(alerts, self._identity)), headers
        if config.bearer_token is not None:
            headers["Authorization"] = f"Bearer {config.bearer_token.get_secret_value()}"
        if isinstance(config, AlertmanagerReceiver):
            until = now + 4 * max(self._times.resend, self._times.interval)
            body = _json(messages.alertmanager(alerts, self._identity, until=until))
            return config.url.rstrip("/") + "/api/v2/alerts", body, headers
        body = _json(messages.webhook(alerts, self._identity))
        if config.secret is not None:
            signed = messages.signature(config.secret.get_secret_value(), body, at=int(now))
            headers[messages.SIGNATURE_HEADER] = signed
        return config.url, body, headers


def _json(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


class Notifier:
    """All receivers of the config."""

    def __init__(
        self,
        receivers: Sequence[Receiver],
        *,
        identity: Mapping[str, str],
        times: NotifyTimes | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        times = times or NotifyTimes()
        counts: Counter[str] = Counter()
        self.workers: list[Worker] = []
        for receiver in receivers:
            counts[receiver.type] += 1
            name: str = receiver.type
            if counts[name] > 1:
                name += f"-{counts[name]}"
            self.workers.append(Worker(name, receiver, identity, times, wall))

    def start(self) -> None:
        """Start one thread for each receiver."""
        for worker in self.workers:
            worker.start()

    def publish(self, alerts: Sequence[Alert], *, now: float) -> None:
        """Tell the receivers how things stand (`Evaluation.to_send`). Never blocks. ``now``:
        monotonic seconds."""
        for worker in self.workers:
            worker.publish(alerts, now)

    def stop(self, *, drain_seconds: float = 2.0) -> None:
        """Send what is queued, one attempt each, for at most ``drain_seconds`` in all."""
        for worker in self.workers:
            worker.stop()
        deadline = time.monotonic() + drain_seconds
        for worker in self.workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def readings(self) -> dict[MetricKey, float]:
        """The ``specserve_notification*`` samples."""
        if not self.workers:
            return {}
        waiting = sum(len(worker.outbox) for worker in self.workers)
        result = {key("specserve_notification_queue_length"): float(waiting)}
        for worker in self.workers:
            for outcome in ("sent", "failed", "dropped"):
                name = key("specserve_notifications_total", receiver=worker.name, outcome=outcome)
                result[name] = float(worker.outcomes[outcome])
        return result
