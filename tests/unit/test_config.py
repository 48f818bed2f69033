"""The config file: precedence, places, secrets, and every mistake with its exact sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specserve.config.load import Loaded, load
from specserve.config.rules import check as complaints
from specserve.config.schema import Settings
from specserve.config.show import rows
from specserve.errors import ConfigError, Problem
from specserve.log import Redactor

DATA = Path(__file__).parent.parent / "data" / "configs"
BAD = sorted((DATA / "bad").glob("*.yaml"))
GUIDE = DATA / "good" / "field-guide.yaml"

NGRAM = "models:\n  target_model:\n    path: /m/target\nspeculative_decoding:\n  method: ngram\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def load_text(folder: Path, text: str, *overrides: str, **environ: str) -> Loaded:
    return load(write(folder, text), environ=environ, overrides=overrides)


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_each_mistake_has_its_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with one mistake is refused with exactly the text beside it."""
    monkeypatch.chdir(path.parent)
    with pytest.raises(ConfigError) as caught:
        load(Path(path.name), environ={})
    assert str(caught.value) + "\n" == path.with_suffix(".err").read_text()
    assert caught.value.exit_code == 2


def test_there_are_many_mistakes() -> None:
    """The list of mistakes stays long enough to mean something."""
    assert len(BAD) >= 40


def test_the_guides_file_works_unchanged() -> None:
    """The file that people copy from the guide loads, with one warning about the draft's TP."""
    loaded = load(GUIDE, environ={})
    assert loaded.settings.method == "draft_model"
    assert loaded.settings.server.port == 8080
    assert [w.message for w in loaded.warnings] == [
        "vLLM runs a draft model at the target's TP only; the draft runs at TP 2, not 1"
    ]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Each level overrides the one below, and the source says which one won."""
    text = NGRAM + "server:\n  port: 1001\n  host: localhost\nsidecar:\n  port: 1004\n"
    loaded = load_text(
        tmp_path,
        text,
        "server.port=1003",
        SPECSERVE_SERVER__PORT="1002",
        SPECSERVE_SIDECAR__PORT="1005",
        SPECSERVE_ENGINE__EXTRA_ARGS="{max-logprobs: 5}",
    )
    assert (loaded.settings.server.port, loaded.settings.sidecar.port) == (1003, 1005)
    assert loaded.settings.engine.extra_args == {"max-logprobs": 5}
    assert loaded.sources["server.port"] == "--set server.port"
    assert loaded.sources["sidecar.port"] == "environment SPECSERVE_SIDECAR__PORT"
    assert loaded.sources["server.host"] == f"{tmp_path / 'config.yaml'}:8"
    assert "engine.max_num_seqs" not in loaded.sources


def test_text_stays_as_it_was_written(tmp_path: Path) -> None:
    """A revision or name that YAML reads as a number keeps its digits."""
    text = "models:\n  target_model:\n    path: 7\n    revision: 0123\nspeculative_decoding:\n  method: ngram\n"
    loaded = load_text(tmp_path, text, "server.served_model_name=1.10", "engine.env.FLAG=true")
    target = loaded.settings.models.target_model
    assert (target.path, target.revision) == ("7", "0123")
    assert loaded.settings.server.served_model_name == "1.10"
    assert loaded.settings.engine.env == {"FLAG": "true"}


def test_variables_come_from_the_environment(tmp_path: Path) -> None:
    """${VAR}, ${VAR:-default} and $$ are expanded in values, numbers included."""
    text = (
        "models:\n  target_model:\n    path: ${ROOT}/t\n    revision: ${REV:-main}\n"
        "server:\n  port: ${PORT}\n  served_model_name: a$$b\nspeculative_decoding:\n  method: ngram\n"
    )
    loaded = load_text(tmp_path, text, ROOT="/data", PORT="8123")
    assert loaded.settings.models.target_model.path == "/data/t"
    assert loaded.settings.models.target_model.revision == "main"
    assert (loaded.settings.server.port, loaded.settings.server.served_model_name) == (8123, "a$b")


def test_environment_of_a_kubernetes_service_is_no_config(tmp_path: Path) -> None:
    """The variables that Kubernetes sets for a Service named specserve neither fail nor warn."""
    loaded = load_text(
        tmp_path,
        NGRAM,
        SPECSERVE_PORT="tcp://10.0.0.1:8000",
        SPECSERVE_SERVICE_HOST="10.0.0.1",
        SPECSERVE_SERVICE_PORT_HTTP="8000",
        SPECSERVE_PORT_8000_TCP_ADDR="10.0.0.1",
    )
    assert loaded.warnings == ()


def test_a_variable_with_one_underscore_is_named(tmp_path: Path) -> None:
    """A name that was meant as a key but cannot be one is warned about, not silently ignored."""
    names = ["SPECSERVE_PORT", "SPECSERVE_SERVER_HOST", "SPECSERVE_SERVER_PORT"]
    loaded = load_text(tmp_path, NGRAM, **dict.fromkeys(names, "9000"))
    assert [w.where for w in loaded.warnings] == [f"environment {name}" for name in names]


def test_bad_environment_and_flags_name_themselves(tmp_path: Path) -> None:
    """An error from the environment or a flag points there, not into the file."""
    with pytest.raises(ConfigError) as caught:
        load_text(
            tmp_path, NGRAM, "server.port=x", "nonsense", "engine.env={", SPECSERVE_SERVER__PROT="1"
        )
    assert [(p.where, p.message.split(";")[0]) for p in caught.value.problems] == [
        ("--set nonsense", "is not KEY=VALUE"),
        ("--set engine.env", "has a value that is not valid YAML"),
        ("--set server.port", "'server.port' is 'x'"),
        ("environment SPECSERVE_SERVER__PROT", "unknown key 'server.prot'"),
    ]


def test_items_of_lists_are_set_by_number(tmp_path: Path) -> None:
    """As `config show` writes them, with dots, or in a variable's name; nested lists too; the source is told."""
    text = (
        NGRAM
        + "  schedule: [[1, 8, 4], [9, 64, 0]]\nalerts:\n  notify:\n    - {type: webhook, url: http://h}\n"
    )
    loaded = load_text(
        tmp_path,
        text,
        "speculative_decoding.schedule.0.2=3",
        "alerts.notify[0].url=http://flag",
        SPECSERVE_ALERTS__NOTIFY__0__SECRET="007",
    )
    (webhook,) = loaded.settings.alerts.notify
    assert webhook.url == "http://flag"
    assert webhook.secret.get_secret_value() == "007"
    assert loaded.settings.speculative_decoding.schedule == [(1, 8, 3), (9, 64, 0)]
    assert loaded.sources["alerts.notify[0].url"] == "--set alerts.notify[0].url"
    assert loaded.sources["alerts.notify[0].type"] == f"{tmp_path / 'config.yaml'}:9"


def test_an_item_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A number beyond the list, or a key in its place, never makes a mapping of the list."""
    with pytest.raises(ConfigError) as caught:
        load_text(
            tmp_path,
            NGRAM + "alerts:\n  notify:\n    - {type: webhook, url: http://h}\n",
            "alerts.notify[1].url=http://x",
            "alerts.notify.url=http://x",
            f"alerts.notify.{'9' * 5000}.url=http://x",  # more digits than int() takes
        )
    *problems, digits = caught.value.problems
    assert digits.message.endswith("9' in it")
    assert [(p.where, p.message, p.fix) for p in problems] == [
        (f"--set {key}", message, "give the whole list as 'alerts.notify'")
        for key, message in [
            (
                "alerts.notify[1].url",
                "'alerts.notify' is a list with item 0 alone; there is no '1' in it",
            ),
            (
                "alerts.notify.url",
                "'alerts.notify' is a list with item 0 alone; there is no 'url' in it",
            ),
        ]
    ]


def test_secrets_come_from_files_and_are_never_shown(tmp_path: Path) -> None:
    """A *_file is read into its secret; show and repr say *** only."""
    (tmp_path / "key").write_text("tops3cret\n")
    (tmp_path / "hook").write_text("http://127.0.0.1/hook-s3cret")
    text = NGRAM + (
        f"server:\n  host: 0.0.0.0\n  api_key_file: {tmp_path}/key\n"
        f"alerts:\n  notify:\n    - type: slack\n      url_file: {tmp_path}/hook\n"
    )
    loaded = load_text(tmp_path, text)
    assert loaded.settings.server.api_key is not None
    assert loaded.settings.server.api_key.get_secret_value() == "tops3cret"
    assert sorted(loaded.secrets()) == ["http://127.0.0.1/hook-s3cret", "tops3cret"]
    shown = {r.key: r.value for r in rows(loaded)}
    assert shown["server.api_key"] == "***"
    assert shown["alerts.notify[0].url"] == "***"
    assert "s3cret" not in repr(loaded) + json.dumps(shown)


def test_secrets_in_the_engines_environment_are_known_by_their_names(tmp_path: Path) -> None:
    """A token in engine.env is masked where the config is shown and redacted in logs; other variables are not."""
    loaded = load_text(
        tmp_path, NGRAM + "engine: {env: {HF_TOKEN: tops3cret, TOKENIZERS_PARALLELISM: 'false'}}\n"
    )
    shown = {r.key: r.value for r in rows(loaded)}
    assert shown["engine.env"] == {"HF_TOKEN": "***", "TOKENIZERS_PARALLELISM": "false"}
    assert loaded.secrets() == ("tops3cret",)


def test_secrets_that_are_passed_on_are_masked_and_known(tmp_path: Path) -> None:
    """Logins and JSON in extra_args, a receiver's URL: masked where shown; names tell the log's redactor."""
    text = NGRAM + (
        "engine:\n  extra_args:\n    otlp-traces-endpoint: https://me:s3cret@h/\n"
        '    kv-transfer-config: {extra: [{api_key: s3cret-1}]}\n    kv-events-config: \'{"token": "s3cret-2"}\'\n'
        "alerts:\n  notify:\n    - {type: webhook, url: 'https://me:s3cret@h/?access_token=s3cret'}\n"
    )
    loaded = load_text(tmp_path, text)
    assert loaded.secrets() == ("s3cret-1", "s3cret-2")
    assert "s3cret" not in json.dumps({r.key: r.value for r in rows(loaded)})
    assert Redactor(loaded.secrets()).redact("to https://me:s3cret@h/ {'api_key': 's3cret-1'}") == (
        "to https://***@h/ {'api_key': '***'}"
    )


def test_an_empty_secret_is_no_secret(tmp_path: Path) -> None:
    """A secret that is blank is refused wherever it comes from, not taken for a wish to have none."""
    for text, sets, environ in (
        ("server: {host: 0.0.0.0, api_key: '${KEY}'}\n", (), {"KEY": ""}),
        ("server: {api_key: ' '}\n", (), {}),
        ("", ("server.api_key=",), {}),
        ("", (), {"SPECSERVE_SERVER__API_KEY": "\n"}),
        ("alerts: {notify: [{type: webhook, url: 'http://h/x', secret: ''}]}\n", (), {}),
    ):
        with pytest.raises(ConfigError, match=r"is empty; must hold the secret"):
            load_text(tmp_path, NGRAM + text, *sets, **environ)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${KEY}", "k-1"),
        ("$${KEY}", "${KEY}"),
        ("'quoted'", "quoted"),
        ('"@ b"', "@ b"),
        *(
            (text, text)
            for text in (
                "@b",
                "*b",
                "&b",
                "!b",
                "%b",
                "#b",
                "a: b",
                "a: b: c",
                "a #b",
                "0123",
                "- b",
            )
        ),
    ],
)
def test_a_text_given_beside_the_file_is_that_text(tmp_path: Path, text: str, value: str) -> None:
    """Variables are replaced as in the file, quotes go, and what YAML reads otherwise or not at all is kept."""
    for sets, environ in (
        ((f"server.api_key={text}",), {}),
        ((), {"SPECSERVE_SERVER__API_KEY": f"{text}\n"}),
    ):
        key = load_text(tmp_path, NGRAM, *sets, KEY="k-1", **environ).settings.server.api_key
        assert key is not None
        assert key.get_secret_value() == value


def test_a_variable_that_is_not_set_is_told_at_the_override(tmp_path: Path) -> None:
    """A --set with an unset variable is refused at its own place."""
    with pytest.raises(ConfigError, match=r"--set server\.port: 'server\.port' uses \$\{NOPE\}"):
        load_text(tmp_path, NGRAM, "server.port=${NOPE}")


def test_names_of_the_users_keep_their_case(tmp_path: Path) -> None:
    """Below engine.env a variable's name is the user's, with dots and underscores; alerts are found in any case."""
    loaded = load_text(
        tmp_path,
        NGRAM,
        "models.target_model.sha256.a.safetensors=abc",
        SPECSERVE_ENGINE__ENV__NCCL__DEBUG="INFO",
        SPECSERVE_ALERTS__RULES__ENGINEDOWN__FOR_SECONDS="3",
    ).settings
    assert loaded.engine.env == {"NCCL__DEBUG": "INFO"}
    assert loaded.models.target_model.sha256 == {"a.safetensors": "abc"}
    assert loaded.alerts.rules.EngineDown.for_seconds == 3


def test_a_list_says_who_set_each_item(tmp_path: Path) -> None:
    """Keys of list items have their source, so a benchmark's record has them; webhook paths are masked in it."""
    text = (
        NGRAM
        + "alerts:\n  notify:\n    - type: webhook\n      url: https://me:pw@h:1/hook/s3cret?k=s3cret\n"
    )
    by_key = {r.key: r for r in rows(load_text(tmp_path, text))}
    assert by_key["alerts.notify[0].url"].source == f"{tmp_path / 'config.yaml'}:9"
    assert by_key["alerts.notify[0].url"].value == "https://***@h:1/***"
    assert by_key["alerts.notify[0].secret"].is_default
    by_key = {
        r.key: r
        for r in rows(load_text(tmp_path, NGRAM, "alerts.notify=[{type: webhook, url: http://h}]"))
    }
    assert by_key["alerts.notify[0].url"].source == "--set alerts.notify"


def test_addresses_and_paths_as_people_write_them(tmp_path: Path) -> None:
    """Brackets of IPv6 and the home folder's sign are resolved once, in the schema."""
    found = load_text(
        tmp_path, NGRAM, "server.host='[::1]'", "models.target_model.path=~/m"
    ).settings
    assert (found.server.host, found.base_url) == ("::1", "http://[::1]:8000")
    assert found.models.target_model.path == str(Path.home() / "m")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.host=http://127.0.0.1", "'http://127.0.0.1' is a URL; must be an address alone"),
        ("server.host=127.0.0.1:80", "has a port, which has a key of its own"),
        ("server.port=true", "'server.port' is true or false; must be a number"),
        ("hardware.gpu_memory_gib=.inf", "must be a finite number"),
        ("hardware.gpu_memory_gib='inf'", "must be a finite number"),
        ("hardware.gpu_memory_gib=1.0e+300", "must be at most 65536"),
        ("engine.startup_timeout_seconds=1e300", "must be at most 1e9"),
        (f"engine.max_num_seqs={10**400}", "'engine.max_num_seqs' is too large"),
        ("engine.extra_args.x=.nan", "'engine.extra_args.x' is .nan; must be a finite number"),
        ("engine.env={A B: x}", "'A B' in 'engine.env' names no variable"),
        ('engine.env={A: "\\0"}', "'engine.env.A' has a NUL character"),
        (
            "engine.max_model_len=5",
            "'num_speculative_tokens' is 5; must be less than engine.max_model_len (5)",
        ),
    ],
)
def test_values_that_no_engine_takes(tmp_path: Path, override: str, message: str) -> None:
    """What would fail later, or make invalid JSON, is refused where it stands."""
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, NGRAM, override)
    assert message in str(caught.value)


def test_a_secret_given_twice_is_refused(tmp_path: Path) -> None:
    """A secret and its file together are two truths."""
    (tmp_path / "key").write_text("k")
    with pytest.raises(
        ConfigError, match=r"both 'server\.api_key' and 'server\.api_key_file' are set"
    ):
        load_text(tmp_path, NGRAM + f"server:\n  api_key: abc\n  api_key_file: {tmp_path}/key\n")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"x" * 70_000), "has more than 65536 bytes"),
        (lambda path: path.write_bytes(b"\xff"), "it is not UTF-8 text"),
    ],
    ids=["device", "folder", "large", "binary"],
)
@pytest.mark.timeout(20)
def test_a_secret_file_that_is_no_small_text_is_refused(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    """A file of a secret that is endless, large or binary is named with the reason, at once."""
    make(tmp_path / "key")
    with pytest.raises(ConfigError, match=f"'server.api_key_file' names .*: {reason}"):
        load_text(tmp_path, NGRAM + f"server:\n  api_key_file: {tmp_path}/key\n")


def test_target_alone_from_the_same_file() -> None:
    """enabled: false serves the target, whatever the speculative section says."""
    loaded = load(GUIDE, environ={}, overrides=["speculative_decoding.enabled=false"])
    assert loaded.settings.method is None
    assert not loaded.settings.uses_draft_model
    assert loaded.warnings == ()


def test_every_key_is_described() -> None:
    """The schema says what each key means."""
    schema = Settings.model_json_schema()
    for name, section in [("Settings", schema), *schema["$defs"].items()]:
        for key, value in section.get("properties", {}).items():
            described = (
                schema["$defs"][value["$ref"].rsplit("/", 1)[-1]] if "$ref" in value else value
            )
            assert described.get("description"), f"{name}.{key}"


def test_show_marks_defaults_and_sources() -> None:
    """Rows tell what nobody set from what the file set."""
    by_key = {r.key: r for r in rows(load(GUIDE, environ={}))}
    assert by_key["server.host"].is_default
    assert by_key["server.port"].source == f"{GUIDE}:2"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    """A path that is no file is an error of configuration, not a traceback."""
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "absent.yaml", environ={})
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path, environ={})


def test_huge_and_binary_files_are_refused(tmp_path: Path) -> None:
    """What is no text, or far too large, is refused before it is parsed."""
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load(path, environ={})
    path.write_bytes(b"a" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match="is larger than"):
        load(path, environ={})


def settings_or_problems(path: Path) -> Settings | list[Problem]:
    try:
        return load(path, environ={}).settings
    except ConfigError as error:
        return error.problems


SECTION_KEYS = [
    "server",
    "models",
    "target_model",
    "draft_model",
    "path",
    "port",
    "engine",
    "env",
    "alerts",
    "notify",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["${X}", "ngram"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(SECTION_KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=VALUES)
def test_any_yaml_is_settings_or_an_error_with_a_place(tmp_path: Path, value: object) -> None:
    """Whatever a YAML file holds, the answer is Settings or a ConfigError whose problems have a place."""
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(value, allow_unicode=True), encoding="utf-8")
    outcome = settings_or_problems(path)
    assert isinstance(outcome, Settings) or (
        outcome and all(p.where and p.message for p in outcome)
    )


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"%@`#,?\n\t 0~."), max_size=60))
def test_any_text_is_settings_or_an_error_with_a_place(tmp_path: Path, text: str) -> None:
    """Text that is hardly YAML gives a ConfigError with a place, never another exception."""
    path = tmp_path / "any.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, environ={})
    assert all(p.where for p in caught.value.problems)


@pytest.mark.parametrize(
    ("environ", "sets", "place"),
    [
        ({"SPECSERVE_SERVER": "{host: 127.0.0.3}"}, (), "environment SPECSERVE_SERVER"),
        ({}, ("server={host: 127.0.0.3}",), "--set server"),
    ],
)
def test_a_mapping_over_a_mapping_says_who_set_each_key(
    tmp_path: Path, environ: dict[str, str], sets: tuple[str, ...], place: str
) -> None:
    """What a mapping of a higher layer leaves alone keeps the file's place, in errors as well."""
    text = "models: {target_model: {path: t}}\nspeculative_decoding: {enabled: false}\n"
    path = write(tmp_path, text + "server:\n  port: 8001\n")
    sources = load(path, environ=environ, overrides=sets).sources
    assert sources["server.host"] == place
    assert sources["server.port"] == f"{path}:4"
    path = write(tmp_path, text + "server:\n  port: 99999\n")
    with pytest.raises(ConfigError) as error:
        load(path, environ=environ, overrides=sets)
    assert [problem.where for problem in error.value.problems] == [f"{path}:4"]


def test_an_empty_mapping_takes_nothing_over(tmp_path: Path) -> None:
    """`--set alerts.labels={}` merges nothing into the file's labels, which keep their place."""
    text = "models: {target_model: {path: t}}\nspeculative_decoding: {enabled: false}\n"
    path = write(tmp_path, text + "alerts: {labels: {cluster: a}}\n")
    loaded = load(path, environ={}, overrides=["alerts.labels={}"])
    assert loaded.settings.alerts.labels == {"cluster": "a"}
    assert loaded.sources["alerts.labels.cluster"] == f"{path}:3"


def test_an_item_below_a_null_is_refused(tmp_path: Path) -> None:
    """A null clears a list of a lower layer: none of its items comes back by its number."""
    text = "models: {target_model: {path: t}}\nspeculative_decoding: {enabled: false}\n"
    path = write(tmp_path, text + "alerts: {notify: [{type: webhook, url: http://a/b}]}\n")
    environ = {
        "SPECSERVE_ALERTS__NOTIFY": "null",
        "SPECSERVE_ALERTS__NOTIFY__0__URL": "http://c/d",
    }
    with pytest.raises(ConfigError, match=r"'alerts\.notify' is a mapping; must be a list"):
        load(path, environ=environ)


def test_a_whole_list_says_who_set_it(tmp_path: Path) -> None:
    """A list given by --set replaces one whose item a variable had set, and so does its place."""
    text = "models: {target_model: {path: t}}\nspeculative_decoding: {enabled: false}\n"
    path = write(tmp_path, text + "alerts: {notify: [{type: webhook, url: http://a/b}]}\n")
    loaded = load(
        path,
        environ={"SPECSERVE_ALERTS__NOTIFY__0__URL": "http://c/d"},
        overrides=["alerts.notify=[{type: webhook, url: http://e/f}]"],
    )
    assert loaded.sources["alerts.notify[0].url"] == "--set alerts.notify"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hardware: {gpu_count: !!int ''}", "'hardware.gpu_count' is '', which YAML cannot read"),
        ("hardware: {gpu_count: !!int '-'}", "'hardware.gpu_count' is '-', which YAML cannot"),
        ("hardware: {gpu_count: !!int _}", "'hardware.gpu_count' is '_', which YAML cannot read"),
        ("hardware: {gpu_memory_gib: !!float ''}", "'hardware.gpu_memory_gib' is '', which YAML"),
        ("sidecar: {enabled: !!bool x}", "'sidecar.enabled' is 'x', which YAML cannot read"),
        ("sidecar: {enabled: !!bool ''}", "'sidecar.enabled' is '', which YAML cannot read"),
        ('server: {served_model_name: "\\ud800x"}', "'server.served_model_name' has half a char"),
        ('engine: {env: {A: "\\ud800"}}', "'engine.env.A' has half a character"),
        ('engine: {extra_args: {seed: "\\udfff"}}', "'engine.extra_args.seed' has half a char"),
        ('engine: {env: {"A\\ud800": x}}', "a key has half a character"),
        ("server: {port: 1" + ":59" * 5000 + "}", "'server.port' is a number of 15001 characters"),
    ],
)
def test_scalars_that_yaml_itself_cannot_read(tmp_path: Path, line: str, says: str) -> None:
    """A tag over the wrong text, half a character, a number of thousands of digits: a sentence."""
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, NGRAM + line + "\n")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "engine: {extra_args: {x: [" + ",".join(["1"] * 200_000) + "]}}\n",
        "engine:\n  env:\n" + "".join(f"    K{i}: 1\n" for i in range(60_000)),
        'engine: {extra_args: {x: &a "' + "y" * 500_000 + '", z: [' + "*a," * 20_000 + "]}}\n",
    ],
    ids=["list", "keys", "aliases"],
)
def test_more_than_a_config_holds_is_refused(tmp_path: Path, text: str) -> None:
    """The file is given up at a number of values, before all of it was read or expanded."""
    with pytest.raises(ConfigError, match=r"more values than a config|expands to too many"):
        load_text(tmp_path, NGRAM + text)


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    """A pipe that nobody writes to would hold the command for ever."""
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        load(pipe, environ={})


def test_a_pipe_of_the_shell_is_one() -> None:
    """``specserve check <(make-config)`` hands over a pipe on purpose."""
    reading, writing = os.pipe()
    os.write(writing, NGRAM.encode())
    os.close(writing)
    try:
        assert load(Path(f"/dev/fd/{reading}"), environ={}).settings.method == "ngram"
    finally:
        os.close(reading)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/random"])
def test_a_device_without_an_end_is_not_read(tmp_path: Path, device: str) -> None:
    """A key is in a small file, never in a device."""
    with pytest.raises(ConfigError, match="not a regular file"):
        load_text(tmp_path, NGRAM, f"server.api_key_file={device}")


def test_a_hang_can_be_ended_only_where_it_is_proven(tmp_path: Path) -> None:
    """Restarting what hangs rests on the sidecar's proof: without a sidecar it is refused."""
    text = NGRAM + "engine: {restart_when_stalled: true}\n"
    assert load_text(tmp_path, text).settings.engine.restart_when_stalled
    with pytest.raises(ConfigError, match="it is the sidecar that proves a hang"):
        load_text(tmp_path, text + "sidecar: {enabled: false}\n")


@pytest.mark.parametrize(
    ("sizes", "flags", "nodes", "per_node"),
    [
        ((1, 1), {"data-parallel-size": 16, "enable-expert-parallel": True}, 2, 8),
        ((8, 1), {"-dp": 2}, 2, 8),
        ((8, 1), {"data-parallel-size": 2, "data-parallel-size-local": 1}, 2, 8),
        ((8, 2), {}, 2, 8),
        ((8, 2), {"dp": 2, "dpl": 1}, 4, 8),
        ((2, 1), {"prefill-context-parallel-size": 2, "dp": 4}, 2, 8),
        ((2, 1), {"dp": 8, "dpl": 2}, 1, 4),
        ((2, 1), {"dp": 8, "dpn": 3}, 1, 2),
        ((2, 1), {"dp": 3}, 1, 6),
    ],
)
def test_ranks_and_copies_are_shared_by_the_nodes(
    sizes: tuple[int, int], flags: dict[str, object], nodes: int, per_node: int
) -> None:
    """The world over several nodes is data x tensor x pipeline parallel, as vLLM counts it."""
    asked = Settings.model_validate(
        {
            "models": {
                "target_model": {
                    "path": "m",
                    "tensor_parallel_size": sizes[0],
                    "pipeline_parallel_size": sizes[1],
                }
            },
            "speculative_decoding": {"enabled": False},
            "engine": {"extra_args": flags, "node_count": nodes, "leader_address": "a"},
        }
    )
    assert asked.gpus_per_node == per_node
    assert not list(complaints(asked))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"dp": 3}, "2 nodes cannot share 3 GPUs evenly (tensor x pipeline x data parallel size)"),
        (
            {"dp": 16, "dpl": 4},
            "'data-parallel-size-local' is 4, but each of 2 nodes runs 8",
        ),
    ],
)
def test_ranks_that_nodes_cannot_share_are_refused(flags: dict[str, object], said: str) -> None:
    """An uneven world, and a number of local ranks that is not this world's, are named."""
    asked = Settings.model_validate(
        {
            "models": {"target_model": {"path": "m"}},
            "speculative_decoding": {"enabled": False},
            "engine": {"extra_args": flags, "node_count": 2, "leader_address": "a"},
        }
    )
    (found,) = complaints(asked)
    assert said in found.message
