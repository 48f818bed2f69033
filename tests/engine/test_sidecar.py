"""The sidecar beside the real vLLM: its numbers are the engine's, a stopped core is found, a full one is left alone."""

from __future__ import annotations

import contextlib
import time

import psutil
import requests

from scripts.record_metrics import record
from specserve.engine.http.metrics import parse
from specserve.metric_families import key
from tests.replay import replay
from tests.traffic import traffic

INTERVAL, CANARY = 1.0, 5.0
"""Of the shared engine's sidecar, see conftest."""
SATURATION_SECONDS = 60
PROMPT = "def add(first, second):\n    return first"
CLIENT = {"prompt": PROMPT, "timeout": 20.0}


def wait_until(condition, seconds: float) -> None:
    """Poll until true; fail after the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.05)


def complete(url: str, *, tokens: int) -> int:
    """The status of one greedy completion."""
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return requests.post(f"{url}/v1/completions", json=body, timeout=60).status_code


def probes(url: str) -> tuple[int, ...]:
    """Status codes of /startupz, /livez and /readyz."""
    return tuple(
        requests.get(url + path, timeout=5).status_code
        for path in ("/startupz", "/livez", "/readyz")
    )


def status(url: str) -> dict:
    """What /status answers."""
    return requests.get(f"{url}/status", timeout=5).json()


def test_every_number_of_the_real_engine_is_read(engine_server):
    """Nothing that we know a name for is missing from vLLM's text."""
    assert complete(engine_server.base_url, tokens=40) == 200
    seen = parse(requests.get(f"{engine_server.base_url}/metrics", timeout=10).text, at_seconds=0.0)
    (sample,) = seen.engines
    assert set(sample.values) == {
        "running", "waiting", "kv_cache_usage_ratio", "drafts", "draft_tokens", "accepted_tokens", "generation_tokens",
        "prompt_tokens", "preemptions", "prefix_cache_queries", "prefix_cache_hits", "steps", "awake",
    }  # fmt: skip
    assert set(sample.histograms) == {
        "time_to_first_token", "time_per_output_token", "inter_token_latency", "request_latency", "queue_time",
        "request_prompt_tokens", "request_generation_tokens",
    }  # fmt: skip
    assert len(sample.accepted_per_position or ()) == 3
    assert seen.process_start_seconds
    assert seen.http
    assert seen.cache_tokens
    assert sample.model_name == "tiny"


def test_the_sidecars_totals_are_the_engines(engine_server):
    """After traffic has ended, drafts, accepted and generated tokens agree to the token."""
    # A window begins with the second read of a ready engine; what came before is in no window.
    wait_until(lambda: "1m" in status(engine_server.sidecar_url)["windows"], 20)
    for _ in range(3):
        assert complete(engine_server.base_url, tokens=60) == 200
    names = {
        "drafts": "drafts",
        "accepted_tokens": "accepted_tokens",
        "generation_tokens": "generation_tokens",
    }

    def same() -> bool:
        engine = parse(
            requests.get(f"{engine_server.base_url}/metrics", timeout=10).text, at_seconds=0.0
        )
        text = requests.get(f"{engine_server.sidecar_url}/metrics", timeout=5).text
        ours = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("specserve_") and 'model_name="tiny"} ' in line
        }
        return all(
            ours.get(f"specserve_{name}_total") == engine.total(theirs)
            for name, theirs in names.items()
        )

    wait_until(same, 10)
    wait_until(
        lambda: "acceptance_rate" in status(engine_server.sidecar_url)["windows"].get("1m", {}), 20
    )
    found = status(engine_server.sidecar_url)
    assert 0 < found["windows"]["1m"]["acceptance_rate"] < 1
    assert found["canary"]["verdict"] in ("ok", "unproven")
    assert found["actual"]["kv_cache_tokens"] > 1000


def test_a_recording_of_the_real_engine_replays(engine_server, tmp_path):
    """What the recorder writes gives verdicts and rates without the engine."""
    path = tmp_path / "recording.jsonl.gz"
    with traffic(engine_server.base_url, "tiny", tokens=60, **CLIENT):
        assert record(engine_server.base_url, path, seconds=15, interval=3) >= 4
    seen = replay(path)
    assert seen[-1].assessment.condition in ("progressing", "idle")
    assert 0 < seen[-1].readings[key("specserve_acceptance_rate", window="1m")] < 1


def test_a_saturated_engine_is_never_called_stalled(engine_server):
    """A minute of more clients than slots: alive and ready at every look, never worse than suspect.

    The tiny pair finishes a whole batch at once: a read may fall between two batches and find nothing to do.
    """
    seen: set[tuple[int, ...]] = set()
    conditions: set[str] = set()
    with traffic(engine_server.base_url, "tiny", clients=96, tokens=120, **CLIENT):
        wait_until(
            lambda: status(engine_server.sidecar_url)["now"].get("requests_waiting", 0) > 0, 30
        )
        end = time.monotonic() + SATURATION_SECONDS
        while time.monotonic() < end:
            seen.add(probes(engine_server.sidecar_url))
            conditions.add(status(engine_server.sidecar_url)["condition"])
            time.sleep(0.5)
    assert seen == {(200, 200, 200)}
    assert "progressing" in conditions
    assert conditions <= {"progressing", "suspect", "idle"}


def test_a_stopped_engine_core_is_stalled_and_recovers(engine_server):
    """SIGSTOP of EngineCore: /health still says 200; not alive within three reads and a canary; then SIGCONT."""
    family = psutil.Process(engine_server.process.pid).children(recursive=True)
    core = next(p for p in family if "EngineCore" in " ".join([p.name(), *p.cmdline()]))
    with traffic(engine_server.base_url, "tiny", tokens=200, **CLIENT):
        wait_until(lambda: status(engine_server.sidecar_url)["condition"] == "progressing", 10)
        core.suspend()
        try:
            stopped = time.monotonic()
            assert requests.get(f"{engine_server.base_url}/health", timeout=5).status_code == 200
            wait_until(
                lambda: probes(engine_server.sidecar_url)[1] == 503, 3 * INTERVAL + CANARY + 5
            )
            print(f"found after {time.monotonic() - stopped:.1f} s")
            found = status(engine_server.sidecar_url)
            assert found["condition"] == "stalled"
            assert "EngineStalled" in [alert["name"] for alert in found["alerts"]]
        finally:
            _resume(core)
        wait_until(lambda: probes(engine_server.sidecar_url) == (200, 200, 200), 30)


def _resume(core: psutil.Process) -> None:
    """A stopped process cannot be asked to end: always let it go on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        core.resume()
