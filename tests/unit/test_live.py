"""`specserve status` of sidecars: the live view, several at once, and numbers that are no longer of now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rich.console import Console

from specserve import cli
from specserve.commands.live import Watched, ask_all, render
from tests.metrics_server import PlayedServer, played


def said(**changes: Any) -> dict[str, Any]:
    """What /status of a calm server says."""
    found: dict[str, Any] = {
        "model_name": "qwen",
        "engine_url": "http://engine:8000",
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "versions": {"specserve": "0.1.0", "vLLM": "0.32.0"},
        "state": None,
        "condition": "progressing",
        "started": {"ok": True, "reason": "yes"},
        "live": {"ok": True, "reason": "yes"},
        "ready": {"ok": True, "reason": "serving: 3 requests running"},
        "age_seconds": 1.0,
        "windows": {
            "1m": {
                "acceptance_rate": 0.02,
                "time_per_output_token_seconds": {"p50": 0.08, "p90": 0.089},
            },
            "30m": {
                "acceptance_rate": 0.61,
                "time_per_output_token_seconds": {"p50": 0.03, "p90": 0.036},
            },
        },
        "now": {"requests_running": 3.0, "requests_waiting": 58.0},
        "plan_against_actual": None,
        "baseline": {"acceptance_rate": 0.63},
        "alerts": [],
    }
    return {**found, **changes}


ALERT = {
    "name": "AcceptanceCollapsed",
    "severity": "critical",
    "state": "firing",
    "started_at": 0.0,
    "labels": {},
    "inhibited_by": None,
    "summary": "Almost nothing is accepted",
    "description": "2 % at position 0",
    "causes": [],
    "runbook_url": "docs/runbooks/AcceptanceCollapsed.md",
}
NOT_READY = {"ok": False, "reason": "stalled: no progress for 30 s"}


def shown(*watched: Watched, now: float = 100.0) -> str:
    """The view as text."""
    console = Console(width=110, height=50, color_system=None)
    with console.capture() as caught:
        console.print(render(watched, now=now, stamp="20:57:29"))
    return caught.get()


def seen(url: str = "http://a", **changes: Any) -> Watched:
    """A server that has just answered."""
    one = Watched(url)
    one.take(said(**changes), 100.0)  # type: ignore[arg-type]
    return one


def test_verdict_and_alerts_stand_above_the_numbers() -> None:
    """Time stamp, verdict, alerts; then numbers beside their usual value."""
    text = shown(seen(alerts=[ALERT]))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0].startswith("20:57:29")
    assert lines[2] == "DEGRADED  qwen  serving: 3 requests running"
    assert lines[3].strip().startswith("AcceptanceCollapsed  critical, firing")
    (row,) = [line.split() for line in lines if line.strip().startswith("acceptance rate")]
    assert row[2:8] == ["2.0", "%", "63.0", "%", "61.0", "%"]


def test_a_sparkline_grows_with_each_look() -> None:
    """The last looks, from the smallest value to the largest."""
    one = Watched("http://a")
    for rate in (0.1, 0.2, 0.8):
        windows = {"1m": {"acceptance_rate": rate}}
        one.take(said(windows=windows), 100.0)  # type: ignore[arg-type]
    assert "▁▂█" in shown(one)


def test_a_silent_sidecar_is_waited_for_with_its_last_numbers() -> None:
    """Since when, why, and that it is tried again; it is back with the next answer."""
    one = seen()
    one.take("Connection refused", 105.0)
    text = shown(one, now=112.0)
    assert "NO ANSWER  qwen  no answer for 12 s (Connection refused), trying again" in text
    assert "the last numbers that are known:" in text
    assert "2.0 %" in text
    one.take(said(), 113.0)  # type: ignore[arg-type]
    assert "OK  qwen" in shown(one)


def test_of_several_the_worst_comes_first() -> None:
    """No answer and not ready before alerts, alerts before calm; more alerts before fewer."""
    calm, loud = seen("http://calm"), seen("http://loud", alerts=[ALERT])
    louder = seen("http://louder", alerts=[ALERT, {**ALERT, "name": "QueueBacklog"}])
    stuck = seen("http://stuck", ready=NOT_READY, live=NOT_READY, condition="stalled")
    gone = Watched("http://gone")
    gone.take("Connection refused", 90.0)
    lines = shown(calm, loud, louder, stuck, gone).splitlines()
    order = [line.split("http://")[1].split()[0] for line in lines[2:] if "http://" in line]
    assert order == ["stuck", "gone", "louder", "loud", "calm"]


def test_several_engines_are_listed_the_odd_one_first() -> None:
    """A table of engines where there is more than one."""
    rates = {"0": 0.63, "5": 0.22, "6": 0.64}
    lines = shown(seen(windows={"1m": {"engine_acceptance_rate": rates}})).splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("engine "))
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["5", "0", "6"]


@pytest.fixture
def servers() -> Iterator[list[PlayedServer]]:
    """Two sidecars."""
    with ExitStack() as stack:
        yield [stack.enter_context(played()) for _ in range(2)]


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_several_urls_are_asked_at_once(
    servers: list[PlayedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """The worst first, also in JSON; not ready is 1, nobody there is 5."""
    first, other = servers
    first.says("/status", json.dumps(said(model_name="calm")))
    other.says("/status", json.dumps(said(model_name="stuck", ready=NOT_READY)))
    code, out, _ = typed(f"status --url {first.url} --url {other.url}", capsys)
    assert code == 1
    assert out.index("stuck") < out.index("calm")
    assert out.splitlines()[-1] == f"Next: specserve status --url {other.url}"
    line = f"status --format json --url {first.url} --url http://127.0.0.1:9"
    code, out, _ = typed(line, capsys)
    verdicts = [(one["verdict"], one["url"]) for one in json.loads(out)["servers"]]
    assert code == 5
    assert verdicts == [("NO ANSWER", "http://127.0.0.1:9"), ("OK", first.url)]


def test_what_answers_as_no_sidecar_does_is_said_to_be_none(
    servers: list[PlayedServer],
) -> None:
    """JSON of something else; a web page."""
    first, other = servers
    first.says("/status", '{"status": "ok"}')
    other.says("/status", "<html>")
    from specserve.commands.status import _fetch

    watched = [Watched(one.url) for one in servers]
    ask_all(watched, lambda url: _fetch(url, None))
    assert {one.why for one in watched} == {"what listens there is not a sidecar of specserve"}


def test_numbers_of_a_dead_engine_are_shown_with_their_time(
    servers: list[PlayedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not "no numbers yet": since when there are none, and the last ones."""
    last = {
        "at": 1_800_000_000.0,
        "age_seconds": 100.4,
        "now": {"requests_running": 3.0},
        "windows": {"1m": {"acceptance_rate": 0.61}},
    }
    body = said(
        now={}, windows={}, ready=NOT_READY, condition="down", last_numbers=last, baseline={}
    )
    servers[0].says("/status", json.dumps(body))
    code, out, _ = typed(f"status --url {servers[0].url}", capsys)
    assert code == 1
    assert "(1 min 40 s); the last ones:" in out
    assert "no numbers since " in out
    assert "61.0 %" in out
    assert "no numbers yet" not in out
