"""Every pair gets exactly the findings it must get, and every code has a pair and a near miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.app import preflight
from specserve.config.schema import Settings
from specserve.findings import PAIR_CODES
from tests.pairs import PAIRS, Pair

ELSEWHERE = {
    "hub-access", "hub-revision", "hub-unreachable", "hub-modelscope", "revision-unpinned", "remote-code-unpinned",  # test_hub.py
    "lock-mismatch", "lock-unhashed",  # test_integrity.py
    "tokenizer-unreadable",  # test_vocabulary.py
    "head-reach", "head-sample",  # test_heads.py
    "own-draft",  # test_model_configs.py
}  # fmt: skip
TYPES = {"llama", "qwen3", "gemma2", "glm4_moe", "eagle", "medusa", "mlp_speculator"}
"""What an installed vLLM knows, as far as the pairs need it."""
INFO = {"draft-dtype", "draft-quantization"}


def findings(pair: Pair, folder: Path) -> list[preflight.Finding]:
    """What the checkpoints alone say."""
    settings = Settings.model_validate(pair.write(folder))
    target, found = preflight.read(settings, "target_model")
    draft, more = (
        preflight.read(settings, "draft_model") if settings.uses_draft_model else (None, [])
    )
    return [
        *found,
        *more,
        *preflight.pair_findings(settings, target, draft, known_types=lambda: TYPES).findings,
    ]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_pair(pair: Pair, tmp_path: Path) -> None:
    """The codes of errors and warnings are exactly those that the pair was built for."""
    found = findings(pair, tmp_path)
    assert {f.code for f in found if f.severity != "info"} == pair.expect
    assert pair.near not in pair.expect
    for f in found:
        assert f.code in PAIR_CODES
        assert f.severity == "info" or f.fix
        assert "\n" not in f.message


def test_every_code_has_a_pair_and_a_near_miss() -> None:
    """No code is untested, in either direction."""
    triggered = {code for pair in PAIRS for code in pair.expect}
    near = {pair.near for pair in PAIRS}
    assert PAIR_CODES.keys() - triggered - ELSEWHERE - INFO == set()
    assert PAIR_CODES.keys() - near - ELSEWHERE - INFO == set()
    assert len(PAIRS) >= 60
