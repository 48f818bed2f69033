"""The files in configs/: each loads, and says what its name promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.config.load import load

FOLDER = Path(__file__).parents[2] / "configs"
METHODS = {
    "deepseek-mtp": "mtp",
    "field-guide": "draft_model",
    "llama-3.1-8b-eagle3": "eagle3",
    "ngram-documents": "ngram",
    "quickstart": "ngram",
    "qwen3-32b-draft": "draft_model",
    "suffix-agents": "suffix",
    "tiny-pair": "draft_model",
}


def test_every_config_is_in_the_table() -> None:
    """A new config file gets a line in METHODS."""
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(METHODS)


@pytest.mark.parametrize(("name", "method"), METHODS.items())
def test_config_loads_with_its_method(name: str, method: str) -> None:
    """Each file is valid by itself, without environment variables, and names its method."""
    assert load(FOLDER / f"{name}.yaml", environ={}).settings.method == method


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"field-guide"}))
def test_config_loads_without_a_warning(name: str) -> None:
    """Only the guide's own file has something to warn about."""
    assert load(FOLDER / f"{name}.yaml", environ={}).warnings == ()


def test_field_guide_warns_once_about_the_draft_tp() -> None:
    """The guide asks for a draft at TP 1 under a target at TP 2: accepted, with one warning at its line."""
    warnings = load(FOLDER / "field-guide.yaml", environ={}).warnings
    assert [str(w.where).rsplit(":", 1)[-1] for w in warnings] == ["12"]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_schedule_covers_every_batch_size(name: str) -> None:
    """A schedule ends where the engine's largest step ends, so no batch size is left to chance."""
    settings = load(FOLDER / f"{name}.yaml", environ={}).settings
    rows = settings.speculative_decoding.schedule
    assert rows is None or rows[-1][1] == settings.engine.max_num_seqs
