"""Real tokenizers, as they come with vLLM, and the real models of this repository's scripts."""

from __future__ import annotations

import json
import os
import shutil
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from specserve.app import preflight
from specserve.checkpoint import tokenizer as tokenizer_files
from specserve.checkpoint.read import read
from specserve.config.load import load
from specserve.pair import vocabulary
from tests import checkpoints as make
from tests import needed

pytestmark = pytest.mark.engine
MODELS = Path(__file__).parents[2] / ".cache" / "models"
SENTENCEPIECE = ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3")


def mistral(name: str, as_name: str, folder: Path) -> tokenizer_files.Tokenizer:
    """A tokenizer of mistral_common in a checkpoint of its own."""
    if find_spec("mistral_common") is None:
        needed.missing("mistral_common is not installed; vLLM brings it")
    checkpoint = make.llama()
    checkpoint.tokenizer = None
    make.write(folder, checkpoint)
    shutil.copy(str(files("mistral_common").joinpath("data", name)), folder / as_name)
    tokenizer = tokenizer_files.load(read(str(folder)))
    assert tokenizer is not None
    return tokenizer


def test_sentencepiece_generations_differ(tmp_path: Path) -> None:
    """v3 puts control tokens before the ordinary ones: every id moves, so v1 is no draft for v3 by id."""
    one, three = (mistral(name, "tokenizer.model", tmp_path / name) for name in SENTENCEPIECE)
    assert (one.size, three.size) == (32000, 32768)
    assert vocabulary.compare(one, three).relation == "different"
    ratio = vocabulary.overlap_ratio(three, one)
    assert ratio is not None
    assert ratio > 0.99


def test_tekken_generations_share_their_words(tmp_path: Path) -> None:
    """Two tekken files of one size: the ordinary tokens are the same."""
    old, new = (
        mistral(f"tekken_{date}.json", "tekken.json", tmp_path / date)
        for date in ("240718", "240911")
    )
    assert len(old.base) == len(new.base) == 130072
    assert vocabulary.compare(old, new).ordinary_difference_count == 0
    assert old.base["Ġthe"] == new.base["Ġthe"]


@pytest.mark.parametrize(
    ("target", "draft"),
    [("tiny-target", "tiny-draft"), ("tiny-target", "tiny-draft-bad"), ("smollm2-135m", None)],
)
def test_real_models_pass_without_noise(target: str, draft: str | None, tmp_path: Path) -> None:
    """The models of scripts/prepare_models.py get no error and no warning."""
    if not (MODELS / target).is_dir():
        needed.missing(f"{MODELS / target} is missing: run scripts/prepare_models.py")
    models = {"target_model": {"path": str(MODELS / target)}}
    spec: dict[str, object] = {"num_speculative_tokens": 3}
    if draft is None:
        spec |= {"method": "ngram", "prompt_lookup_max": 4}
    else:
        models["draft_model"] = {"path": str(MODELS / draft)}
    config = tmp_path / "pair.yaml"
    config.write_text(json.dumps({"models": models, "speculative_decoding": spec}))
    report = preflight.run(load(config, environ={}), environ=os.environ)
    assert [f for f in report.findings if f.severity != "info"] == []
