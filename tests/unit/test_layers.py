"""What docs/config.md promises of defaults, file, environment and --set, promise by promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.config.load import Loaded, load
from specserve.config.show import rows
from specserve.errors import ConfigError

NGRAM = """\
models:
  target_model:
    path: /m/target
speculative_decoding:
  method: ngram
"""
HOOK = "alerts:\n  notify:\n    - type: webhook\n      url: http://file\n      secret: s\n"


def load_text(folder: Path, text: str, *overrides: str, **environ: str) -> Loaded:
    path = folder / "config.yaml"
    path.write_text(text)
    return load(path, environ=environ, overrides=overrides)


def problems(folder: Path, text: str, *overrides: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides, **environ)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("file", "environment", "override", "port", "source"),
    [
        (None, None, None, 9400, "default"),
        ("1001", None, None, 1001, "config.yaml:7"),
        ("1001", "1002", None, 1002, "environment SPECSERVE_SIDECAR__PORT"),
        ("1001", "1002", "1003", 1003, "--set sidecar.port"),
        (None, "1002", "1003", 1003, "--set sidecar.port"),
        (None, "1002", None, 1002, "environment SPECSERVE_SIDECAR__PORT"),
        (None, None, "1003", 1003, "--set sidecar.port"),
        ("1001", None, "1003", 1003, "--set sidecar.port"),
    ],
)
def test_the_highest_layer_that_says_something_wins(
    tmp_path: Path,
    *,
    file: str | None,
    environment: str | None,
    override: str | None,
    port: int,
    source: str,
) -> None:
    """Defaults, file, environment, --set: lowest first, whichever of them speak."""
    text = NGRAM
    overrides, environ = [], {}
    if file:
        text += f"sidecar:\n  port: {file}\n"
    if environment:
        environ["SPECSERVE_SIDECAR__PORT"] = environment
    if override:
        overrides.append(f"sidecar.port={override}")
    loaded = load_text(tmp_path, text, *overrides, **environ)
    assert loaded.settings.sidecar.port == port
    (row,) = [row for row in rows(loaded) if row.key == "sidecar.port"]
    assert row.source.replace(f"{tmp_path}/", "") == source


def test_the_last_of_equal_overrides_wins(tmp_path: Path) -> None:
    """--set a=1 --set a=2 is 2; a part of a section after the whole lies over it."""
    loaded = load_text(
        tmp_path, NGRAM, "server.port=1", "server.port=2", "engine.env={A: x}", "engine.env.B=y"
    )
    assert loaded.settings.server.port == 2
    assert loaded.settings.engine.env == {"A": "x", "B": "y"}


def test_sections_merge_key_by_key_and_lists_are_replaced(tmp_path: Path) -> None:
    """A mapping of a later layer changes the keys it names; a list is given as a whole."""
    text = NGRAM + "engine:\n  max_num_seqs: 8\n  env: {A: file, B: file}\n  repairs: []\n"
    loaded = load_text(
        tmp_path,
        text,
        "engine.env={B: flag}",
        SPECSERVE_ENGINE='{env: {C: variable}, repairs: ["cpu-yielding"]}',
    )
    engine = loaded.settings.engine
    assert engine.env == {"A": "file", "B": "flag", "C": "variable"}
    assert engine.repairs == ("cpu-yielding",)
    assert engine.max_num_seqs == 8


def test_null_takes_away_what_lower_layers_say(tmp_path: Path) -> None:
    """What is set below a null starts anew: no key of the file comes back from under it."""
    text = NGRAM + "  max_batch_size: 4\n"
    text = text.replace("speculative", "  draft_model: {path: d, revision: r}\nspeculative")
    text = text.replace("method: ngram", "method: draft_model")
    null, path = "models.draft_model=null", "models.draft_model.path=e"
    for overrides, environ in (
        ((null, path), {}),
        ((path,), {"SPECSERVE_MODELS__DRAFT_MODEL": "null"}),
        ((), {"SPECSERVE_MODELS__DRAFT_MODEL": "null", "SPECSERVE_MODELS__DRAFT_MODEL__PATH": "e"}),
    ):
        draft = load_text(tmp_path, text, *overrides, **environ).settings.models.draft_model
        assert draft is not None
        assert (draft.path, draft.revision) == ("e", None)
    spec = load_text(tmp_path, text, "speculative_decoding.max_batch_size=~").settings
    assert spec.speculative_decoding.max_batch_size is None


@pytest.mark.parametrize(("value", "name"), [("${NAME}", "n"), ("${NOPE:-d}", "d"), ("$$x", "$x")])
def test_variables_are_replaced_in_every_layer(tmp_path: Path, value: str, name: str) -> None:
    """${VAR}, ${VAR:-default} and $$ in the file, in a variable, in --set, alone or inside YAML."""
    for text, overrides, environ in (
        (f"server: {{served_model_name: '{value}'}}\n", (), {}),
        ("", (f"server.served_model_name={value}",), {}),
        ("", (f"server={{served_model_name: '{value}'}}",), {}),
        ("", (), {"SPECSERVE_SERVER__SERVED_MODEL_NAME": value}),
        ("", (), {"SPECSERVE_SERVER": f"{{served_model_name: '{value}'}}"}),
    ):
        loaded = load_text(tmp_path, NGRAM + text, *overrides, NAME="n", **environ)
        assert loaded.settings.server.served_model_name == name


def test_a_secrets_file_may_be_named_in_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A *_file key of the file, a variable or --set; a relative path starts at the working folder."""
    (tmp_path / "key").write_text("k\n")
    monkeypatch.chdir(tmp_path)
    for text, overrides, environ in (
        ("server: {api_key_file: key}\n", (), {}),
        ("", ("server.api_key_file=key",), {}),
        ("", (), {"SPECSERVE_SERVER__API_KEY_FILE": "key"}),
    ):
        loaded = load_text(tmp_path, NGRAM + text, *overrides, **environ)
        assert loaded.settings.server.api_key is not None
        assert loaded.settings.server.api_key.get_secret_value() == "k"
        (row,) = [row for row in rows(loaded) if row.key == "server.api_key"]
        assert row.source != "default"


def test_variables_and_overrides_take_yaml(tmp_path: Path) -> None:
    """Lists, mappings, numbers, booleans and null as in the file; a plain text needs no quotes."""
    loaded = load_text(
        tmp_path,
        NGRAM,
        "speculative_decoding.schedule=[[1, 8, 4], [9, 64, 0]]",
        "engine.extra_args={max-logprobs: 5, middleware: [a, b]}",
        "server.max_concurrent_requests=null",
        SPECSERVE_ENGINE__ENFORCE_EAGER="yes",
        SPECSERVE_ALERTS__LABELS="{cluster: a}",
        SPECSERVE_SPECULATIVE_DECODING__SCHEDULE="[[1, 4, 1]]",
    ).settings
    assert loaded.speculative_decoding.schedule == [(1, 8, 4), (9, 64, 0)]
    assert loaded.engine.extra_args == {"max-logprobs": 5, "middleware": ["a", "b"]}
    assert loaded.server.max_concurrent_requests is None
    assert loaded.engine.enforce_eager is True
    assert loaded.alerts.labels == {"cluster": "a"}


def test_names_below_engine_env_keep_their_case(tmp_path: Path) -> None:
    """Small letters, capitals and two underscores; a later layer means the very same name."""
    loaded = load_text(
        tmp_path,
        NGRAM + "engine:\n  env: {http_proxy: file}\n",
        SPECSERVE_ENGINE__ENV__http_proxy="http://p",
        SPECSERVE_ENGINE__ENV__VLLM_LOGGING_LEVEL="DEBUG",
        SPECSERVE_ENGINE__ENV__A__B="x",
    )
    assert loaded.settings.engine.env == {
        "http_proxy": "http://p",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "A__B": "x",
    }
    assert loaded.sources["engine.env.A__B"] == "environment SPECSERVE_ENGINE__ENV__A__B"


def test_an_item_may_be_set_over_a_list_of_any_lower_layer(tmp_path: Path) -> None:
    """--set reaches into the file's list, a variable's, and the one of an earlier --set."""
    item = "alerts.notify[0].url=http://flag"
    whole = "[{type: webhook, url: http://x, secret: t}]"
    for overrides, environ, secret in (
        ((item,), {}, "s"),
        ((item,), {"SPECSERVE_ALERTS__NOTIFY": whole}, "t"),
        ((f"alerts.notify={whole}", item), {}, "t"),
        ((item,), {"SPECSERVE_ALERTS__NOTIFY__0__SECRET": "u"}, "u"),
        ((item,), {"SPECSERVE_ALERTS": f"{{notify: {whole}}}"}, "t"),
    ):
        loaded = load_text(tmp_path, NGRAM + HOOK, *overrides, **environ)
        (hook,) = loaded.settings.alerts.notify
        assert hook.url == "http://flag"
        assert hook.secret.get_secret_value() == secret
    loaded = load_text(
        tmp_path,
        NGRAM + HOOK,
        SPECSERVE_ALERTS__NOTIFY=whole,
        SPECSERVE_ALERTS__NOTIFY__0__URL="http://variable",
    )
    (hook,) = loaded.settings.alerts.notify
    assert (hook.url, hook.secret.get_secret_value()) == ("http://variable", "t")


def test_a_list_given_as_a_whole_replaces_items_set_below_it(tmp_path: Path) -> None:
    """--set of the list wins over a variable that sets one item of the file's."""
    loaded = load_text(
        tmp_path,
        NGRAM + HOOK,
        "alerts.notify=[{type: slack, url: http://s}]",
        SPECSERVE_ALERTS__NOTIFY__0__URL="http://variable",
    )
    (slack,) = loaded.settings.alerts.notify
    assert slack.type == "slack"
    assert loaded.sources["alerts.notify[0].url"] == "--set alerts.notify"


def test_every_leaf_says_who_set_it(tmp_path: Path) -> None:
    """Each value of the merged config has its own source: line, variable or flag."""
    text = NGRAM + HOOK + "engine:\n  env: {A: x, B: y}\n  extra_args: {}\n"
    loaded = load_text(
        tmp_path,
        text,
        "engine.env.B=z",
        "alerts.notify[0].url=http://flag",
        SPECSERVE_ENGINE__ENV="{C: v, A: w}",
        SPECSERVE_SERVER__TLS="{cert_file: c, key_file: k}",
        SPECSERVE_ALERTS__NOTIFY__0__SECRET="t",
    )
    found = {key: source.replace(f"{tmp_path}/", "") for key, source in loaded.sources.items()}
    assert found == {
        "models.target_model.path": "config.yaml:3",
        "speculative_decoding.method": "config.yaml:5",
        "alerts.notify[0].type": "config.yaml:8",
        "alerts.notify[0].url": "--set alerts.notify[0].url",
        "alerts.notify[0].secret": "environment SPECSERVE_ALERTS__NOTIFY__0__SECRET",
        "engine.env.A": "environment SPECSERVE_ENGINE__ENV",
        "engine.env.B": "--set engine.env.B",
        "engine.env.C": "environment SPECSERVE_ENGINE__ENV",
        "engine.extra_args": "config.yaml:13",
        "server.tls.cert_file": "environment SPECSERVE_SERVER__TLS",
        "server.tls.key_file": "environment SPECSERVE_SERVER__TLS",
    }


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SPECSERVE_SERVER__PROT": "1"}, "unknown key 'server.prot'; did you mean 'port'?"),
        ({"SPECSERVE_SERVRE__PORT": "1"}, "unknown key 'servre'; did you mean 'server'?"),
        (
            {"SPECSERVE_ALERTS__RULES__ENGINEDON__ENABLED": "no"},
            "unknown key 'alerts.rules.enginedon'; did you mean 'EngineDown'?",
        ),
        (
            {"SPECSERVE_SERVER__PORT__X": "1"},
            "'server.port' is a mapping; must be a whole number",
        ),
        (
            {"SPECSERVE_SERVER__PORT": "1", "SPECSERVE_SERVER__PORT__X": "1"},
            "'server.port' is a mapping; must be a whole number",
        ),
        (
            {"SPECSERVE_SERVER": "1"},
            "'server' is 1; must be a section with keys of its own",
        ),
        (
            {"SPECSERVE_HARDWARE": "null"},
            "'hardware' is empty; must be a section with keys of its own",
        ),
        (
            {"SPECSERVE_SERVER__TLS": "{cert_fil: c}"},
            "unknown key 'server.tls.cert_fil'; did you mean 'cert_file'?",
        ),
        ({"SPECSERVE_MODELS__TARGET_MODEL__TENSOR_PARALLEL_SIZE": "true"}, "true or false"),
        ({"SPECSERVE_SERVER__PORT": "[1"}, "has a value that is not valid YAML"),
        (
            {"SPECSERVE_ALERTS__NOTIFY__0__URL": "http://x"},
            "'alerts.notify' is a mapping; must be a list",
        ),
    ],
)
def test_a_variable_that_is_no_key_is_refused_by_its_name(
    tmp_path: Path, environ: dict[str, str], said: str
) -> None:
    """Unknown keys have a near name, values a sentence, and the place is the variable."""
    (problem,) = problems(tmp_path, NGRAM, **environ)
    assert said in problem
    assert problem.startswith("environment SPECSERVE_")
    assert problem.split(":")[0].split()[1] in environ


def test_all_layers_complain_at_once(tmp_path: Path) -> None:
    """One run names every mistake, each at its own place, file lines first come first."""
    text = NGRAM + "server:\n  port: x\n  prot: 1\nengine:\n  env: {A: '${NOPE}'}\n"
    said = problems(
        tmp_path,
        text,
        "sidecar.port=y",
        "sidecar.prt=1",
        "engine.repairs[0]=z",
        "nonsense",
        SPECSERVE_ENGINE__MAX_NUM_SEQS="0",
        SPECSERVE_ALERTS__LABELS="{a: ",
    )
    assert sorted(line.split(": ")[0] for line in said) == [
        "--set engine.repairs[0]",
        "--set nonsense",
        "--set sidecar.port",
        "--set sidecar.prt",
        "config.yaml:10",
        "config.yaml:7",
        "config.yaml:8",
        "environment SPECSERVE_ALERTS__LABELS",
        "environment SPECSERVE_ENGINE__MAX_NUM_SEQS",
    ]


def test_a_text_is_kept_as_written_in_every_layer(tmp_path: Path) -> None:
    """Digits that YAML takes for a number stay as they are, also where a list item is set."""
    loaded = load_text(
        tmp_path,
        NGRAM + HOOK,
        "models.target_model.revision=0123",
        "alerts.notify[0].secret=007",
        "engine.env={A: 010}",
        SPECSERVE_SERVER__SERVED_MODEL_NAME="1_0",
        SPECSERVE_SERVER__API_KEY="0x10",
    ).settings
    assert loaded.models.target_model.revision == "0123"
    assert loaded.alerts.notify[0].secret.get_secret_value() == "007"
    assert loaded.engine.env == {"A": "010"}
    assert loaded.server.served_model_name == "1_0"
    assert loaded.server.api_key.get_secret_value() == "0x10"


def test_a_later_layer_overrides_a_flag_in_any_spelling(tmp_path: Path) -> None:
    """vLLM's flags are compared by meaning: the file's spelling goes when --set has another."""
    loaded = load_text(
        tmp_path,
        NGRAM + "engine:\n  extra_args: {max-logprobs: 5, cc.mode: 1, cc.level: 2}\n",
        "engine.extra_args.--max_logprobs=7",
        SPECSERVE_ENGINE__EXTRA_ARGS="{compilation-config: {mode: 3}}",
    )
    assert loaded.settings.engine.extra_args == {
        "--max_logprobs": 7,
        "compilation-config": {"mode": 3},
    }


@pytest.mark.parametrize(
    ("file", "override", "flag"),
    [
        ("{cc: {mode: 1, level: 2}}", "compilation-config.mode=3", {"mode": 3, "level": 2}),
        ("{cc.mode: 1, cc.level: 2}", "compilation_config.mode=3", {"mode": 3, "level": 2}),
        ("""{cc: '{"mode": 1, "level": 2}'}""", "--cc.mode=3", {"mode": 3, "level": 2}),
        ("{cc: {mode: 1, level: 2}}", "compilation-config={mode: 3}", {"mode": 3}),
        ("{cc.mode: 1, cc.level: 2}", """compilation-config='{"mode": 3}'""", {"mode": 3}),
        (
            "{cc: {pass_config: {a: 1, b: 2}}}",
            "compilation-config.pass_config.a=3",
            {"pass_config": {"a": 3, "b": 2}},
        ),
    ],
)
def test_a_later_layer_replaces_what_it_sets_of_a_flag(
    tmp_path: Path, file: str, override: str, flag: dict[str, int]
) -> None:
    """A key inside a flag replaces that key, a whole flag the whole, whatever the spelling."""
    text = NGRAM + f"engine:\n  extra_args: {file}\n"
    loaded = load_text(tmp_path, text, f"engine.extra_args.{override}")
    assert loaded.settings.engine.flags.mapping("compilation-config") == flag
