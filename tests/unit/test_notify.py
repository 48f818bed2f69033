"""Notifications against real HTTP servers that answer, refuse, redirect, hang or are not there."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import TypeAdapter

from specserve.alert import messages
from specserve.alert.evaluate import Alert
from specserve.alert.notify import Notifier, NotifyTimes, Outbox
from specserve.alert.rules import AlertState, Reason
from specserve.config.alerting import Receiver
from specserve.metric_families import key

FIRING = Alert(
    name="AcceptanceRateLow",
    severity="warning",
    state=AlertState.FIRING,
    reason=Reason.HOLDS,
    labels=(),
    value=0.31,
    summary="The target rejects <much>",
    description="specserve_acceptance_rate is 0.31",
    runbook_url="https://example.org/AcceptanceRateLow.md",
    started_at=1_800_000_000.0,
    causes=("the traffic", "the draft"),
)
RESOLVED = replace(FIRING, state=AlertState.RESOLVED, reason=Reason.CLEAR, ended_at=1_800_000_060.0)
WHO = {"model_name": "tiny", "instance": "a"}


@dataclass
class Server:
    """A receiver: what it got, and what it answers next (the last answer stays)."""

    url: str
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=lambda: [200])
    release: threading.Event = field(default_factory=threading.Event)
    hang: bool = False

    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, _, body in self.got]


@pytest.fixture
def server() -> Iterator[Server]:
    with Serving() as started:
        yield started


class Serving:
    """A server in a thread, as a context."""

    def __enter__(self) -> Server:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                state = outer.state
                if state.hang:
                    state.release.wait(30)
                    return
                body = self.rfile.read(int(self.headers["Content-Length"]))
                state.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                status = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", state.url + "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                outer.state.got.append((self.path, {}, b"{}"))
                self.send_error(405)

            def log_message(self, *_: object) -> None:
                pass

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.httpd.block_on_close = False
        self.state = Server(f"http://127.0.0.1:{self.httpd.server_port}")
        self.thread = threading.Thread(
            target=self.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()
        return self.state

    def __exit__(self, *_: object) -> None:
        self.state.release.set()
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join()


FAST = NotifyTimes(first_retry=0.02, longest_retry=0.05)


def notifier(*receivers: dict[str, Any], times: NotifyTimes = FAST) -> Notifier:
    parsed = TypeAdapter(list[Receiver]).validate_python(list(receivers))
    made = Notifier(parsed, identity=WHO, times=times, wall=lambda: 1_800_000_100.0)
    made.start()
    return made


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_alertmanager(server: Server) -> None:
    """A firing alert goes to the v2 API with an end in the near future; it is resolved with its real end."""
    sender = notifier({"type": "alertmanager", "url": server.url + "/"})
    sender.publish([FIRING], now=0)
    until(lambda: len(server.got) == 1)
    sender.publish([RESOLVED], now=5)
    until(lambda: len(server.got) == 2)
    sender.stop()
    assert {path for path, _, _ in server.got} == {"/api/v2/alerts"}
    (first,), (last,) = server.bodies()
    assert first == {
        "labels": {**WHO, "alertname": "AcceptanceRateLow", "severity": "warning"},
        "annotations": {
            "summary": "The target rejects <much>",
            "description": "specserve_acceptance_rate is 0.31. Likely: the traffic; the draft",
            "runbook_url": "https://example.org/AcceptanceRateLow.md",
        },
        "startsAt": "2027-01-15T08:00:00.000Z",
        "endsAt": "2027-01-15T08:05:40.000Z",
    }
    assert (last["labels"], last["endsAt"]) == (first["labels"], "2027-01-15T08:01:00.000Z")


def test_webhook_is_signed(server: Server) -> None:
    """The signature verifies with the documented recipe over the raw body, and not over another body."""
    sender = notifier({"type": "webhook", "url": server.url + "/hook", "secret": "s3cret-key"})
    sender.publish([FIRING], now=0)
    until(lambda: server.got)
    sender.stop()
    path, headers, body = server.got[0]
    stamp, digest = (part.partition("=")[2] for part in headers["x-specserve-signature"].split(","))
    assert hmac.compare_digest(
        digest, hmac.new(b"s3cret-key", stamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    )
    assert (path, stamp, b"s3cret-key" in body) == ("/hook", "1800000100", False)
    message = json.loads(body)
    assert (message["version"], message["status"], message["commonLabels"]) == ("4", "firing", WHO)
    assert message["alerts"][0]["endsAt"] == "0001-01-01T00:00:00Z"


@pytest.mark.parametrize("kind", ["alertmanager", "webhook"])
def test_bearer_token(server: Server, kind: str) -> None:
    """A receiver behind a login gets its token in the Authorization header."""
    sender = notifier({"type": kind, "url": server.url, "bearer_token": "t0ken"})
    sender.publish([FIRING], now=0)
    until(lambda: server.got)
    sender.stop()
    assert server.got[0][1]["authorization"] == "Bearer t0ken"


def test_unsigned_without_a_secret(server: Server) -> None:
    """No secret, no signature header, no token."""
    sender = notifier({"type": "webhook", "url": server.url})
    sender.publish([FIRING], now=0)
    until(lambda: server.got)
    sender.stop()
    assert not {"x-specserve-signature", "authorization"} & server.got[0][1].keys()


def test_slack_text(server: Server) -> None:
    """Slack gets one text with the alert, who reports it and the runbook, control characters escaped."""
    sender = notifier({"type": "slack", "url": server.url + "/services/T0/B0/s3cret"})
    sender.publish([FIRING], now=0)
    until(lambda: server.got)
    sender.stop()
    assert server.bodies() == [
        {
            "text": ":warning: *AcceptanceRateLow* warning: The target rejects &lt;much&gt;\n"
            "specserve_acceptance_rate is 0.31. Likely: the traffic; the draft\n"
            "instance=a model_name=tiny\n"
            "Runbook: https://example.org/AcceptanceRateLow.md"
        }
    ]


def test_said_once_and_repeated(server: Server) -> None:
    """The same state is sent once, again after the repeat interval, and the end once."""
    sender = notifier({"type": "webhook", "url": server.url}, times=replace(FAST, repeat=100))
    # One message too many would stand in the list at the end.
    steps = (
        (0, [FIRING], 1),
        (5, [FIRING], 1),
        (99, [FIRING], 1),
        (100, [FIRING], 2),
        (105, [RESOLVED], 3),
        (110, [], 3),
    )
    for now, alerts, told in (*steps, (115, [FIRING], 4)):
        sender.publish(alerts, now=now)
        until(lambda told=told: len(server.got) >= told)
    sender.stop()
    assert [body["status"] for body in server.bodies()] == [
        "firing",
        "firing",
        "resolved",
        "firing",
    ]


def test_alertmanager_is_reminded(server: Server) -> None:
    """Alertmanager hears of a firing alert every resend interval, or it would take it for resolved."""
    sender = notifier({"type": "alertmanager", "url": server.url}, times=replace(FAST, resend=60))
    for now, told in ((0, 1), (30, 1), (60, 2), (119, 2), (120, 3)):
        sender.publish([FIRING], now=now)
        until(lambda told=told: len(server.got) >= told)
    sender.stop()
    assert len(server.got) == 3


def test_an_alert_lasts_longer_than_a_long_interval(server: Server) -> None:
    """With five minutes between two rounds, four of them until Alertmanager takes silence for the end."""
    sender = notifier(
        {"type": "alertmanager", "url": server.url}, times=replace(FAST, interval=300)
    )
    sender.publish([FIRING], now=0)
    until(lambda: server.got)
    sender.stop()
    assert server.bodies()[0][0]["endsAt"] == "2027-01-15T08:21:40.000Z"


def test_retries_with_pauses(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A receiver that answers 503 and 429 gets the message again until it takes it; the log speaks once for each."""
    server.answers = [503, 503, 503, 429, 200]
    with caplog.at_level(logging.INFO, logger="specserve"):
        sender = notifier({"type": "webhook", "url": server.url})
        sender.publish([FIRING], now=0)
        until(lambda: sender.workers[0].outcomes["sent"])
        sender.stop()
    assert len(server.got) == 5
    assert [record.message for record in caplog.records] == [
        "alert receiver failed: HTTP 503 from 127.0.0.1; will try again",
        "alert receiver failed: HTTP 429 from 127.0.0.1; will try again",
        "alert receiver works again",
    ]


@pytest.mark.parametrize("status", [302, 400, 403, 404])
def test_a_refusal_is_final(server: Server, status: int) -> None:
    """A 4xx, or a redirect (which is not followed), is not tried again."""
    server.answers = [status]
    sender = notifier({"type": "webhook", "url": server.url})
    sender.publish([FIRING], now=0)
    until(lambda: sender.workers[0].outcomes["failed"])
    sender.stop()
    assert len(server.got) == 1
    assert (
        sender.readings()[
            key("specserve_notifications_total", receiver="webhook", outcome="failed")
        ]
        == 1
    )


def test_the_latest_word_survives_an_outage(server: Server) -> None:
    """What fired and resolved while the receiver was away arrives as one message: resolved."""
    server.answers = [500]
    sender = notifier(
        {"type": "webhook", "url": server.url},
        times=replace(FAST, first_retry=0.2, longest_retry=0.2),
    )
    sender.publish([FIRING], now=0)
    until(lambda: len(server.got) == 1)
    sender.publish([RESOLVED], now=5)
    server.answers = [200]
    until(lambda: sender.workers[0].outcomes["sent"] == 1)
    sender.stop()
    assert [body["status"] for body in server.bodies()] == ["firing", "resolved"]


def test_a_dead_receiver_delays_nobody(server: Server) -> None:
    """With one receiver gone and one that never answers, publishing returns at once and the third hears everything."""
    with Serving() as hanging:
        hanging.hang = True
        sender = notifier(
            {"type": "slack", "url": closed_port()},
            {"type": "webhook", "url": hanging.url},
            {"type": "webhook", "url": server.url},
        )
        for now in range(1000):
            sender.publish([FIRING if now % 2 else RESOLVED], now=now)
        assert (
            hanging.got == []
        )  # all rounds are over and the receiver that hangs has not answered once
        until(
            lambda: (
                server.got
                and server.bodies()[-1]["status"] == "firing"
                and not len(sender.workers[2].outbox)
            )
        )
        assert [worker.name for worker in sender.workers] == ["slack", "webhook", "webhook-2"]
        sender.stop(drain_seconds=0.1)


def test_a_secret_url_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither a refused connection nor a URL that is none puts the URL of Slack into the log."""
    with caplog.at_level(logging.DEBUG, logger="specserve"):
        sender = notifier(
            {"type": "slack", "url": closed_port() + "/services/T0/B0/s3cret"},
            {"type": "slack", "url": "not-a-url/s3cret"},
        )
        sender.publish([FIRING], now=0)
        until(lambda: len(caplog.records) == 2)
        sender.stop(drain_seconds=0.5)
    assert "s3cret" not in caplog.text
    assert sorted(record.message for record in caplog.records) == [
        "alert receiver failed: ConnectionError at 127.0.0.1; will try again",
        "alert receiver failed: its URL or token cannot be used (MissingSchema); gave up on this message",
    ]


def test_no_receiver_ends_because_of_what_it_cannot_send(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with an empty part and a token that no header carries are failures; a missing CA bundle is tried again."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nonexistent/ca.pem")
    sender = notifier(
        {"type": "webhook", "url": "http://alertmanager..monitoring.svc:9093/"},
        {"type": "webhook", "url": server.url, "bearer_token": "пароль"},
        {"type": "webhook", "url": closed_port().replace("http", "https")},
    )
    sender.publish([FIRING], now=0)
    until(lambda: len(caplog.records) == 3)
    host, token, bundle = sender.workers
    until(lambda: host.outcomes["failed"] == token.outcomes["failed"] == len(bundle.outbox) == 1)
    sender.stop(drain_seconds=0.5)
    assert any("/nonexistent/ca.pem; will try again" in record.message for record in caplog.records)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiver_that_a_bug_ended_shows_in_the_counts(server: Server) -> None:
    """What it held is failed, what comes is dropped: not one alert goes without a trace."""
    sender = notifier({"type": "webhook", "url": server.url})
    sender.publish([replace(FIRING, started_at="a bug")], now=0)  # type: ignore[arg-type]
    outcomes = sender.workers[0].outcomes
    until(lambda: outcomes["failed"] == 1)
    sender.workers[0].join(10)
    sender.publish([RESOLVED], now=1)
    assert outcomes["dropped"] == 1


def test_stop_sends_what_is_queued(server: Server) -> None:
    """What was published just before the end still goes out."""
    sender = notifier({"type": "webhook", "url": server.url})
    sender.publish([FIRING, replace(FIRING, name="QueueBacklog")], now=0)
    sender.stop()
    assert sum(len(body["alerts"]) for body in server.bodies()) == 2


def test_outbox_drops_the_oldest() -> None:
    """A full outbox loses the oldest alert and says so; a newer word replaces the older one without loss."""
    box = Outbox(2)
    assert [
        box.put("a", FIRING),
        box.put("b", FIRING),
        box.put("a", RESOLVED),
        box.put("c", FIRING),
    ] == [0, 0, 0, 1]
    assert box.take(0) == {"b": FIRING, "c": FIRING}


def test_outbox_takes_back() -> None:
    """What could not be sent goes back to the front, unless there is newer word, and as far as there is room."""
    box = Outbox(2)
    box.put("a", RESOLVED)
    assert box.put_back({"a": FIRING, "b": FIRING, "c": FIRING}) == 1
    assert list(box.take(0).items()) == [("c", FIRING), ("a", RESOLVED)]


def test_queue_length_is_a_reading() -> None:
    """The readings name each receiver and count what waits."""
    sender = notifier(
        {"type": "webhook", "url": closed_port()}, times=replace(FAST, first_retry=60)
    )
    sender.publish([FIRING], now=0)
    until(lambda: sender.readings()[key("specserve_notification_queue_length")] == 1)
    assert (
        sender.readings()[key("specserve_notifications_total", receiver="webhook", outcome="sent")]
        == 0
    )
    sender.stop(drain_seconds=2)


def test_fingerprint_ignores_order() -> None:
    """The identity of an alert does not depend on the order of its labels, and keeps names and values apart."""
    assert messages.fingerprint({"a": "1", "b": "2"}) == messages.fingerprint({"b": "2", "a": "1"})
    assert messages.fingerprint({"a": "1"}) != messages.fingerprint({"a1": ""})
