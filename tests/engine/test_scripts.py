"""The prepared models and the quickstart, as a newcomer meets them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import requests

ROOT = Path(__file__).parents[2]


def accepted_and_drafted(base_url: str) -> tuple[float, float]:
    """The engine's own counters."""
    text = requests.get(f"{base_url}/metrics", timeout=10).text
    names = ("num_accepted_tokens_total", "num_draft_tokens_total")
    found = [
        re.search(rf"^vllm:spec_decode_{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names
    ]
    return tuple(float(match.group(1)) if match else 0.0 for match in found)  # type: ignore[return-value]


def acceptance_of(base_url: str, prompts: list[str]) -> float:
    """Acceptance rate of greedy completions of these prompts."""
    accepted, drafted = accepted_and_drafted(base_url)
    for prompt in prompts:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 64, "temperature": 0}
        requests.post(f"{base_url}/v1/completions", json=body, timeout=60).raise_for_status()
    now_accepted, now_drafted = accepted_and_drafted(base_url)
    return (now_accepted - accepted) / (now_drafted - drafted)


def held_out(count: int) -> list[str]:
    """Prompts from scripts/models/text.py."""
    code = f"import json; from models import text; print(json.dumps([s.prompt for s in text.held_out({count})]))"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts", check=True, capture_output=True
    ).stdout
    prompts: list[str] = __import__("json").loads(out)
    return prompts


def test_tiny_pair_accepts_at_least_35_percent(engine_server) -> None:
    """Greedy, three tokens per draft, on text that neither model was trained on."""
    assert acceptance_of(engine_server.base_url, held_out(12)) >= 0.35


def test_tiny_target_answers_a_chat(engine_server) -> None:
    """The chat template works: an answer in the shape it was trained on, ended by the model itself."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "List the steps: How to clean the target:"}],
    }
    answer = requests.post(
        f"{engine_server.base_url}/v1/chat/completions", json=body | {"temperature": 0}, timeout=60
    )
    assert "Step 1:" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "engine_server",
    ["tiny-pair.yaml models.draft_model.path=.cache/models/tiny-draft-bad"],
    indirect=True,
)
def test_bad_draft_is_hardly_ever_accepted(engine_server) -> None:
    """The draft that was never trained loads like any other and proposes noise."""
    assert acceptance_of(engine_server.base_url, held_out(6)) < 0.05
