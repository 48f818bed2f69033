"""Secrets, and what may stand in for one: planted everywhere, searched in all that others can see."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.config.load import load
from specserve.config.show import rows
from specserve.engine.command.args import EngineCommand, masked_names, public_line, shell_line
from specserve.log import Redactor, printable
from specserve.sidecar.presentation import ProbeJson
from specserve.sidecar.server import Pages, SidecarServer

NAMES = """
DB_PASSPHRASE GITHUB_PAT PGPASS PASS PWD_DB AUTHORIZATION MY_AUTH BASIC_AUTH JWT COOKIE CREDS TOKENS API_KEYS
HF_TOKEN2 PRIVATE_KEY_PEM SIGNING_SALT HF_TOKEN AWS_SECRET_ACCESS_KEY OTEL_EXPORTER_OTLP_HEADERS HTTP_HEADERS
SLACK_WEBHOOK_URL PGPASSWORD GOOGLE_APPLICATION_CREDENTIALS
""".split()  # noqa: SIM905 - a list of words
UNSUSPICIOUS = ("MY_THING", "RELAY", "X", "COMPANY_LICENCE")
PLANTED = "pl4nted-value-7"


@pytest.mark.parametrize("name", [*NAMES, *UNSUSPICIOUS])
def test_no_variable_of_the_users_is_shown_to_others(name: str) -> None:
    """A name is no filter: what others read has values of known variables alone."""
    command = EngineCommand(("vllm", "serve", "m"), {name: PLANTED, "VLLM_USE_V1": "1"})
    assert PLANTED not in public_line(command)
    assert "VLLM_USE_V1=1" in public_line(command)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_say_so_are_masked_on_the_users_terminal(name: str) -> None:
    """--dry-run keeps values, but not those of names that sound like a secret; it says which."""
    command = EngineCommand(("vllm", "serve", "m"), {name: PLANTED})
    assert PLANTED not in shell_line(command)
    assert masked_names(command) == [name]


@pytest.mark.parametrize("name", UNSUSPICIOUS)
def test_other_names_keep_their_value_on_the_users_terminal(name: str) -> None:
    """The line can be pasted."""
    command = EngineCommand(("vllm", "serve", "m"), {name: PLANTED})
    assert PLANTED in shell_line(command)
    assert masked_names(command) == []


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("--seed", "7"), "--seed 7"),
        (("--max-num-batched-tokens", "8192"), "--max-num-batched-tokens 8192"),
        (("--served-model-name", "a", "b"), "--served-model-name a b"),
        (("--tool-call-parser=hermes",), "--tool-call-parser=hermes"),
        (("--kv-transfer-config", '{"kv_connector": "Nixl", "auth": "pl4nted-value-7"}'), "Nixl"),
        (("--kv-transfer-config", '{"extra": {"deep": ["pl4nted-value-7"]}}'), "deep"),
        (("--some-new-flag", PLANTED), "--some-new-flag"),
        (("--otlp-traces-endpoint", f"https://u:{PLANTED}@h/"), "--otlp-traces-endpoint"),
        (("--model", f"https://h/x?sig={PLANTED}"), "--model"),
        (("--x-api-keys", f'["{PLANTED}"]'), "--x-api-keys"),
        (("--hf-overrides", '{"max_position_embeddings": 131072}'), "131072"),
    ],
)
def test_flags_show_others_what_is_known_to_be_harmless(argv: tuple[str, ...], shown: str) -> None:
    """Numbers, and texts of flags that say how the engine runs; nothing inside JSON that is not known."""
    line = public_line(EngineCommand(("vllm", "serve", "m", *argv)))
    assert shown in line
    assert PLANTED not in line


def test_what_is_hidden_is_also_replaced_in_logs(tmp_path: Path) -> None:
    """The engine prints its arguments; texts that are not known to be harmless come out as ***."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "models: {target_model: {path: /m/t}}\nspeculative_decoding: {method: ngram}\n"
        "engine:\n"
        "  env: {RELAY: relay-pl4nted, OTEL_EXPORTER_OTLP_HEADERS: 'authorization=Basic abcdef', CACHE: /data/cache}\n"
        "  extra_args: {kv-transfer-config: {kv_connector: NixlConnector, extra: {phrase: phrase-pl4nted}}}\n"
    )
    redact = Redactor(load(path, environ={}).secrets()).redact
    said = redact(
        "args: NixlConnector phrase-pl4nted relay-pl4nted authorization: Basic abcdef /data/cache"
    )
    assert "pl4nted" not in said
    assert "abcdef" not in said
    assert "NixlConnector" in said
    assert "/data/cache" in said


def test_a_receivers_address_is_masked_where_the_config_is_shown(tmp_path: Path) -> None:
    """A gateway before Alertmanager may have its secret in the path, as webhooks do."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "models: {target_model: {path: /m/t}}\nspeculative_decoding: {method: ngram}\n"
        f"alerts: {{notify: [{{type: alertmanager, url: 'http://am:9093/{PLANTED}'}}]}}\n"
    )
    table = rows(load(path, environ={}))
    assert PLANTED not in json.dumps([row.value for row in table])
    assert [row.key for row in table if row.is_masked] == ["alerts.notify[0].url"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[31mERROR\x1b[0m bad", "ERROR bad"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\rb", "a\\rb"),
        ("safe\u202etxt.exe", "safe\\u202etxt.exe"),
        ("tab\tand\nline 模型 é", "tab\tand\nline 模型 é"),
    ],
)
def test_what_an_engine_says_cannot_drive_the_terminal(said: str, shown: str) -> None:
    """Colors go, other control characters are written out, text of every script stays."""
    assert printable(said) == shown
    assert Redactor().redact(said) == shown


def up() -> ProbeJson:
    """A verdict."""
    return {"ok": True, "reason": "up"}


@pytest.fixture
def guarded() -> Iterator[str]:
    """A sidecar's server with a token."""
    pages = Pages(
        metrics=lambda: b"up 1\n",
        status=dict,  # type: ignore[typeddict-item,return-value]
        probe=lambda name: up(),
        page=lambda: "<p>page",
    )
    server = SidecarServer("127.0.0.1", 0, pages, token="t0ken-for-readers")
    server.start()
    yield server.url
    server.stop()


def get(url: str, authorization: str | None = None) -> int:
    """The status of an answer."""
    headers = {"Authorization": authorization} if authorization else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/livez?verbose"])
def test_probes_stay_open(guarded: str, path: str) -> None:
    """A kubelet has no token."""
    assert get(guarded + path) == 200


@pytest.mark.parametrize("path", ["/metrics", "/status", "/", "/metrics?x", "/nowhere", "/Livez"])
def test_the_rest_asks_for_the_token(guarded: str, path: str) -> None:
    """Without it, with half of it, or as another scheme: 401."""
    basic = base64.b64encode(b"me:wrong").decode()
    for wrong in (
        None,
        "Bearer t0ken",
        "Bearer",
        "t0ken-for-readers",
        f"Basic {basic}",
        "Basic \x80",
    ):
        assert get(guarded + path, wrong) == 401


@pytest.mark.parametrize("path", ["/metrics", "/status", "/"])
def test_the_token_opens_it(guarded: str, path: str) -> None:
    """As Prometheus sends it, and as a browser does."""
    basic = base64.b64encode(b"anyone:t0ken-for-readers").decode()
    assert get(guarded + path, "Bearer t0ken-for-readers") == 200
    assert get(guarded + path, f"Basic {basic}") == 200


def test_a_sidecar_that_all_can_reach_is_said(tmp_path: Path) -> None:
    """The engine's address is refused without a key; the sidecar's is a warning without a token."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "models: {target_model: {path: /m/t}}\nspeculative_decoding: {method: ngram}\nsidecar: {host: 0.0.0.0}\n"
    )
    (warning,) = load(path, environ={}).warnings
    assert "anyone who reaches port 9400" in warning.message
    token = tmp_path / "token"
    token.write_text("t0ken-for-readers\n")
    guarded = load(path, environ={}, overrides=[f"sidecar.token_file={token}"])
    assert guarded.warnings == ()
    assert "t0ken-for-readers" in guarded.secrets()
