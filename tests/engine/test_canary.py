"""The canary against real servers: right ones, weak ones, and the CPU engine with its defect left in."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from specserve.config.load import load
from specserve.engine.canary import run as canary
from specserve.engine.http.client import EngineClient
from specserve.engine.http.transport import EngineUnreachable
from tests.engine.conftest import QUICKSTART

ROOT = Path(__file__).parents[2]
# Preflight would refuse engine.repairs=[] on this engine; without its plugin the repair is just not there.
UNREPAIRED = "tiny-pair.yaml engine.env.VLLM_PLUGINS=none"
BROKEN = f"{UNREPAIRED} engine.canary.policy=warn"
BAD_DRAFT = "tiny-pair.yaml models.draft_model.path=.cache/models/tiny-draft-bad"


def check(server) -> canary.CanaryResult:
    """One canary against a launched server."""
    config, *overrides = server.spec.split()
    settings = load(ROOT / "configs" / config, environ=os.environ, overrides=overrides).settings
    return canary.run(EngineClient(server.base_url, model=settings.served_model_name), settings)


def test_right_pair_passes_every_time(engine_server):
    """A weak but right model passes ten canaries in a row: flat distributions and near-ties are no corruption."""
    results = [check(engine_server) for _ in range(10)]
    assert [(r.verdict, r.reasons) for r in results] == [("ok", ())] * 10
    assert all(r.position0_acceptance > 0.5 for r in results)
    assert all(r.compared_tokens > 100 for r in results)


@pytest.mark.parametrize("engine_server", [BROKEN], indirect=True)
def test_corrupted_sampling_is_proven(engine_server):
    """Without the repair, the CPU engine answers 200 and is healthy, and the canary proves its sampled text wrong.

    Such an engine may also die of the ids it makes, at any request: what it said until then counts.
    """
    results: list[canary.CanaryResult] = []
    with suppress(EngineUnreachable):
        for _ in range(5):
            results.append(check(engine_server))
    assert {r.verdict for r in results} <= {"corrupt"}
    assert "not the target's" in engine_server.log()  # the canary of the start


@pytest.mark.parametrize("engine_server", [BAD_DRAFT], indirect=True)
def test_noise_of_a_draft_is_ineffective_not_corrupt(engine_server):
    """A draft that proposes noise costs speed only: the text is right, acceptance at position 0 is not."""
    result = check(engine_server)
    assert result.verdict == "ineffective"
    assert result.position0_acceptance < 0.2
    assert result.compared_tokens > 100


@pytest.mark.parametrize("engine_server", [QUICKSTART], indirect=True)
def test_real_model_with_lookup_passes(engine_server):
    """SmolLM2 with drafts from the prompt: a chat template, a large vocabulary, and steps without drafts."""
    result = check(engine_server)
    assert (result.verdict, result.reasons) == ("ok", ())
    assert result.drafts > 0


@pytest.mark.parametrize(
    "engine_server", ["tiny-pair.yaml speculative_decoding.enabled=false"], indirect=True
)
def test_target_alone_has_nothing_to_compare(engine_server):
    """Without speculation the canary is one text, and no drafts are missed."""
    result = check(engine_server)
    assert (result.verdict, result.drafts, result.compared_tokens) == ("ok", None, 0)


def test_corrupt_engine_never_gets_ready(launch):
    """By default proven corruption blocks: specserve ends with 4 and says what to do."""
    server = launch(UNREPAIRED, wait=False)
    assert server.process.wait(400) == 4
    assert "corrupt" in server.log()
    assert "\nReady\n" not in server.log()
