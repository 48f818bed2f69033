"""Draft heads: what they are, and that published kinds pass. The refusals are in test_pairs.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.read import read
from specserve.config.schema import Settings
from specserve.pair import d2t, head_shapes, heads, mtp, reach
from tests import checkpoints as make
from tests.checkpoints import Checkpoint


def facts(path: Path, checkpoint: Checkpoint) -> ModelFacts:
    """Written and read back."""
    return read(str(make.write(path, checkpoint)))


@pytest.mark.parametrize(
    ("checkpoint", "kind"),
    [
        (make.llama, "draft_model"),
        (make.eagle, "eagle"),
        (make.eagle3, "eagle3"),
        (lambda: make.speculators(make.eagle3(), verifier="x"), "eagle3"),
        (lambda: make.speculators(make.eagle3(), verifier="x", kind="peagle"), "eagle3"),
        (make.medusa, "medusa"),
        (
            lambda: Checkpoint({"medusa_num_heads": 3}, {"0.0.linear.weight": ("F16", (8, 8))}),
            "medusa",
        ),
        (make.mlp_speculator, "mlp_speculator"),
        (make.dflash, "dflash"),
        (make.with_mtp, "draft_model"),
        (lambda: Checkpoint({"model_type": "gemma4_assistant"}), "mtp"),
        (lambda: Checkpoint({"architectures": ["Qwen3DSparkModel"]}), "dspark"),
        (
            lambda: Checkpoint(
                {"architectures": ["GPT2LMHeadModel"]}, {"h.0.mlp.weight": ("F16", (1,))}
            ),
            "draft_model",
        ),
        (lambda: Checkpoint({}), None),
    ],
)
def test_kind(tmp_path: Path, checkpoint: Callable[[], Checkpoint], kind: str | None) -> None:
    """A checkpoint's own files tell which method it was made for, whatever it is called."""
    assert heads.kind_of(facts(tmp_path / "m", checkpoint())) == kind


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("eagle", make.eagle()),
        (
            "eagle",
            Checkpoint({"model_type": "eagle", "model": make.eagle().config}, make.eagle().tensors),
        ),
        ("eagle3", make.eagle3()),
        ("eagle3", make.eagle3(draft_vocab_size=320)),
        ("eagle3", make.eagle3(embed=True, hidden_size=32)),
        ("eagle3", make.speculators(make.eagle3(), verifier="org/target")),
        ("medusa", make.medusa()),
        ("mlp_speculator", make.mlp_speculator()),
        ("dflash", make.dflash()),
    ],
)
def test_published_kinds_pass(tmp_path: Path, method: str, head: Checkpoint) -> None:
    """Legal heads get no finding, pruned vocabularies and shared matrices included."""
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "target"}, "draft_model": {"path": "head"}},
            "speculative_decoding": {"method": method, "num_speculative_tokens": 3},
        }
    )
    target = facts(tmp_path / "target", make.llama())
    assert list(heads.check(settings, target, facts(tmp_path / "head", head))) == []


def test_verifier_by_config_name(tmp_path: Path) -> None:
    """A target in a folder of another name is known by ``_name_or_path`` of its config."""
    head = facts(tmp_path / "head", make.speculators(make.eagle3(), verifier="meta/Llama-3"))
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "x"}, "draft_model": {"path": "y"}},
            "speculative_decoding": {"method": "eagle3"},
        }
    )
    target = facts(tmp_path / "weights", make.llama(_name_or_path="mirror/llama-3"))
    assert list(heads.check(settings, target, head)) == []
    named = facts(tmp_path / "other", make.llama(_name_or_path="mirror/other"))
    [finding] = heads.check(settings, named, head)
    assert (finding.code, finding.severity) == ("head-verifier", "warning")
    assert "meta/Llama-3" in finding.message


def test_d2t_values(tmp_path: Path) -> None:
    """The table's numbers are read from the file, not only its shape."""
    head = facts(tmp_path / "m", make.eagle3(d2t=[5, -1, 7, *range(125)]))
    assert head.tensors is not None
    assert d2t.read_whole_numbers(head, head.tensors["d2t"]) == [5, -1, 7, *range(125)]


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, [1, 2]),
        ({"dflash_config": {"target_layer_ids": [0, 4]}}, [1, 5]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3]}}, [3]),
        ({"dflash_config": {"target_layer_ids": None}}, None),
        ({"eagle_aux_hidden_state_layer_ids": "x"}, None),
        ({}, None),
    ],
)
def test_aux_layers(config: dict[str, object], layers: list[int] | None) -> None:
    """DFlash counts layers from zero, EAGLE3 from the embedding."""
    assert head_shapes.aux_layers(head_shapes.head_of(ModelFacts("m", config))) == layers


@pytest.mark.parametrize(
    ("config", "n"),
    [
        ({"num_nextn_predict_layers": 1}, 1),
        ({"text_config": {"mtp_num_hidden_layers": 2}}, 2),
        ({"mtp_config": {"num_nextn_predict_layers": 8}, "text_config": {}}, 8),
        ({"model_type": "mimo_v2_flash", "num_nextn_predict_layers": 3}, 1),
        ({"model_type": "longcat_flash"}, 1),
        ({"model_type": "llama"}, None),
    ],
)
def test_mtp_modules(config: dict[str, object], n: int | None) -> None:
    """Every name that vLLM reads the number of modules from."""
    assert mtp.modules(ModelFacts("m", config)) == n


@pytest.mark.parametrize(
    ("n", "k", "codes"),
    [
        (1, 1, []),
        (1, 4, ["mtp-module-reuse"]),
        (3, 2, []),
        (3, 3, []),
        (3, 4, ["mtp-multiple"]),
        (3, 6, ["mtp-module-reuse"]),
        (0, 1, ["mtp-modules-missing"]),
    ],
)
def test_rule_of_multiples(n: int, k: int, codes: list[str]) -> None:
    """Below the number of modules anything goes, above it only multiples, with a warning."""
    carrier = ModelFacts("m", {"num_nextn_predict_layers": n})
    assert [f.code for f in mtp.check(carrier, k, "models.target_model.path")] == codes


def test_mtp_layer_behind_the_models_own(tmp_path: Path) -> None:
    """DeepSeek's layout: the module is layer number num_hidden_layers."""
    model = make.llama(num_nextn_predict_layers=1)
    model.tensors |= make.layer("model.layers.8.", 64, 64, 32, 128, "BF16")
    assert list(mtp.check(facts(tmp_path / "m", model), 1, "x")) == []


def test_findings_are_json(tmp_path: Path) -> None:
    """Messages hold plain text only."""
    head = facts(tmp_path / "m", make.eagle3(aux=2))
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "x"}, "draft_model": {"path": "y"}},
            "speculative_decoding": {"method": "eagle3"},
        }
    )
    [finding] = heads.check(settings, facts(tmp_path / "t", make.llama()), head)
    assert json.loads(json.dumps(finding.as_dict()))["message"] == (
        "fc.weight reads 128 values; 3 layers of the target give 192"
    )


def test_a_pruned_vocabulary_is_always_said(tmp_path: Path) -> None:
    """How much of the target's vocabulary a head can draft, whatever its format; nothing where it has all of it."""
    target = facts(tmp_path / "t", make.llama())
    pruned = make.eagle3()
    wrapped = facts(tmp_path / "w", make.speculators(pruned, verifier="x"))
    for head in (facts(tmp_path / "h", pruned), wrapped):
        (found,) = reach.check(target, head)
        assert (found.code, found.severity) == ("head-reach", "info")
        assert "128 of the target's 320 tokens (40.0 %)" in found.message
    whole = facts(tmp_path / "whole", make.eagle3(draft_vocab_size=320))
    assert not list(reach.check(target, whole))


@pytest.mark.parametrize(
    ("offsets", "severity", "share"),
    [
        ([0] * 128, "warning", None),
        (list(range(128)), "warning", None),
        ([0] * 320, "info", "100.0 %"),
    ],
)
def test_a_sample_of_text_is_counted_against_the_head(
    tmp_path: Path, offsets: list[int], severity: str, share: str | None
) -> None:
    """The tokens of a text that a head can draft: a share, and a warning where many are out of its reach."""
    target = facts(tmp_path / "t", make.llama(vocab_size=321))
    head = make.eagle3(vocab_size=321, draft_vocab_size=len(offsets), d2t=offsets)
    sample = tmp_path / "sample.txt"
    sample.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    (found,) = reach.of_sample(target, facts(tmp_path / "h", head), sample)
    assert found.severity == severity
    assert "tokens are within the head's reach" in found.message
    assert share is None or share in found.message


def test_a_sample_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Bytes that are no text are no reason to stop: the sample was not counted."""
    target = facts(tmp_path / "t", make.llama())
    sample = tmp_path / "sample.bin"
    sample.write_bytes(b"\xff\xfe\x00")
    (found,) = reach.of_sample(target, facts(tmp_path / "h", make.eagle3()), sample)
    assert "was not counted" in found.message
