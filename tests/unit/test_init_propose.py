"""``specserve init`` without a command: what it proposes for checkpoints and GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue

from specserve.app.init.run import Wishes, Written, proposed
from specserve.errors import ConfigError

DENSE: dict[str, JsonValue] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
SMALL = {
    **DENSE,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
}


def folder(at: Path, config: dict[str, JsonValue]) -> str:
    at.mkdir()
    (at / "config.json").write_text(json.dumps(config))
    return str(at)


def propose(
    target: str, draft: str | None = None, gpu: str | None = None
) -> tuple[Written, dict[str, JsonValue]]:
    written = proposed(Wishes(target, draft, gpu), {})
    return written, yaml.safe_load(written.text)


def test_a_pair_gets_the_fewest_gpus_that_hold_it(tmp_path: Path) -> None:
    """A 32B target in bfloat16 needs two boards of 80 GB; the reason stands beside the number."""
    target, draft = folder(tmp_path / "t", DENSE), folder(tmp_path / "d", SMALL)
    written, said = propose(target, draft, "H100")
    assert said["models"]["target_model"] == {"path": target, "tensor_parallel_size": 2}
    assert said["speculative_decoding"]["method"] == "draft_model"
    assert said["hardware"] == {"gpu_name": "H100", "gpu_count": 2}
    assert "the fewest GPUs that hold it: fits;" in " ".join(written.text.split())


def test_modules_inside_the_target_are_used(tmp_path: Path) -> None:
    """A target that names MTP modules drafts with them, as many tokens as there are modules."""
    target = folder(tmp_path / "t", {**DENSE, "model_type": "mimo", "num_nextn_predict_layers": 1})
    _, said = propose(target, None, "8x H200")
    assert said["speculative_decoding"] == {"method": "mtp", "num_speculative_tokens": 1}


def test_a_context_that_does_not_fit_is_shortened(tmp_path: Path) -> None:
    """Where the GPUs that are named do not hold one whole request, the longest that fits is
    proposed."""
    target = folder(tmp_path / "t", {**DENSE, "max_position_embeddings": 131072})
    _, said = propose(target, None, "1x H100")
    assert 2048 <= said["engine"]["max_model_len"] < 131072
    assert said["models"]["target_model"]["tensor_parallel_size"] == 1


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A checkpoint that is not there leaves a note and a config to begin with."""
    written, said = propose(str(tmp_path / "nothing"), None, "H100")
    assert said["speculative_decoding"]["method"] == "ngram"
    assert "could not be read" in written.said[0]


def test_a_gpu_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    """A name that stands for two boards is refused with both."""
    with pytest.raises(ConfigError, match="80 or 40 GB"):
        propose(folder(tmp_path / "t", DENSE), None, "A100")


def test_nothing_to_start_from_is_an_error() -> None:
    """Without --from and --target there is nothing to look at."""
    with pytest.raises(ConfigError, match="neither --from nor --target"):
        proposed(Wishes(), {})
