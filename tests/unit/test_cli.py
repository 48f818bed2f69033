"""The program as it is typed: what it says, and the exit code, for input that nobody should give."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from pydantic_core import SchemaError

from specserve import __version__, cli
from specserve.app.bench_setup import BenchOptions, _arms
from specserve.commands.examples import GROUPS
from specserve.commands.options import http_url
from specserve.config.load import load
from specserve.engine.installed import introspect
from specserve.engine.installed.introspect import installed

CONFIG = "models: {target_model: {path: /m}}\nspeculative_decoding: {method: ngram}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good config and files that are none of what a command wants."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.yaml").write_text(CONFIG)
    (tmp_path / "binary").write_bytes(b"\x00\xff\xfe" * 100)
    (tmp_path / "broken.json").write_text('{"a":')
    (tmp_path / "folder").mkdir()
    return tmp_path


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_version_names_engine_and_repairs(capsys):
    """--version says what a report of a bug needs: the engine beside us, the machine, and which
    of the engine's defects we repair."""
    code, out, _ = typed("--version", capsys)
    assert code == 0
    first, second, *rest, third, fourth = out.splitlines()
    assert first == f"specserve {__version__}"
    assert second.startswith(f"engine    {installed() or 'none here'}")
    assert [line.split()[0] for line in rest] == ["python", "platform", "gpu", "extras"]
    assert third.startswith("repair    cpu-speculative-sampling: ")
    assert fourth.startswith("repair    cpu-yielding: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config show missing.yaml", "Error: missing.yaml: no such file"),
        ("config show folder", "Error: folder: is a folder; must be a YAML file"),
        ("config show binary", "Error: binary:1: is not UTF-8 text; must be UTF-8"),
        ("config show ok.yaml --set server.port", "Error: --set server.port: is not KEY=VALUE"),
        (
            "config show ok.yaml --set server.port.x=1",
            "Error: --set server.port.x: 'server.port' is a mapping; must be a whole number",
        ),
        (
            "config show ok.yaml --set SERVER.PORT=1",
            "Error: --set SERVER.PORT: unknown key 'SERVER'",
        ),
        (
            "config show ok.yaml --set server.port=2026-01-01",
            "'server.port' is '2026-01-01'; must be a whole number",
        ),
        (
            "config show ok.yaml --set speculative_decoding.num_speculative_tokens=1e99",
            "'speculative_decoding.num_speculative_tokens' is '1e99'; must be a whole number",
        ),
        ("launch ok.yaml --ready-file folder", "File 'folder' is a directory"),
        ("bench ok.yaml --out binary", "Error: binary: File exists"),
        (
            "bench ok.yaml --concurrency 0",
            "Error: --concurrency: '0' must be different whole numbers from 1",
        ),
        (
            "bench ok.yaml --url-baseline x --url-speculative y",
            "'x' is no URL; must be like http://127.0.0.1:8000",
        ),
        ("bench ok.yaml --trace broken.json", "Error: broken.json:1: is not JSON: "),
        ("bench ok.yaml --trace folder", "Error: folder: cannot be read: Is a directory"),
        ("report binary", "Error: binary: is not a benchmark result of version 1"),
        ("trace redact broken.json out", "Error: broken.json:1: is not JSON: "),
        ("trace redact ok.yaml nowhere/out", "Error: nowhere/out: No such file or directory"),
        ("verify", "Error: verify: neither CONFIG nor --url is given; must have one"),
        ("verify --url http://127.0.0.1:99999", "'http://127.0.0.1:99999' is no URL"),
        ("verify --url http://[::1", "'http://[::1' is no URL"),
        (
            "verify --url http://h --api-key-file binary",
            "Error: --api-key-file binary: is not UTF-8 text",
        ),
        (
            "verify --url http://h --api-key-file missing",
            "Error: --api-key-file missing: cannot be read: No such file or directory",
        ),
        ("alerts lint binary", "Error: binary: is not UTF-8 text; must be a Prometheus rule file"),
        ("alerts lint ok.yaml", "Error: ok.yaml: no 'groups'; a Prometheus rule file is needed"),
        ("nonsense", "Error: No such command 'nonsense'."),
    ],
)
def test_bad_input_is_2_with_its_place(line, message, here, capsys):
    """No input is a traceback or a bug of ours: its place is named on stderr, and the exit code is 2."""
    code, out, err = typed(line, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("rules", ["groups: [3]", "groups: [{rules: 3}]", "groups: [{rules: [3]}]"])
def test_rule_files_of_another_shape(rules, here, capsys):
    """A rule file whose groups hold no rules is refused, not stumbled over."""
    (here / "rules.yaml").write_text(rules)
    code, _, err = typed("alerts lint rules.yaml", capsys)
    assert code == 2
    assert (
        err
        == "Error: rules.yaml: a group without a list of 'rules'; a Prometheus rule file is needed\n"
    )


def test_every_command_explains_itself(capsys):
    """--help works everywhere and says more than the name."""
    commands = [[name] for name in cli.program.commands]
    for name, command in cli.program.commands.items():
        commands += [[name, sub] for sub in getattr(command, "commands", ())]
    for words in commands:
        code, out, err = typed(" ".join([*words, "--help"]), capsys)
        assert (code, err) == (0, "")
        assert len(out.splitlines()) > 5, words


def words_of_commands() -> list[tuple[str, ...]]:
    """Every command and every group, as its words."""
    found: list[tuple[str, ...]] = [()]
    for name, command in cli.program.commands.items():
        found.append((name,))
        found += [(name, sub) for sub in getattr(command, "commands", ())]
    return found


@pytest.mark.parametrize("words", words_of_commands(), ids=" ".join)
def test_help_ends_with_two_examples_and_a_page(words, capsys):
    """Each example is a line that the program can read; the page is there."""
    _, out, _ = typed(" ".join([*words, "--help"]), capsys)
    lines = [line.strip() for line in out.partition("Examples:")[2].splitlines()]
    examples = [line for line in lines if line.startswith("specserve ")]
    assert len(examples) == 2, "commands/examples.py wants two lines for it"
    for example in examples:
        read_by_click(example.partition(" > ")[0].partition(" >> ")[0])
    page = lines[-1].removeprefix("More: ")
    assert (Path(__file__).parents[2] / page).is_file(), page


def read_by_click(line: str) -> None:
    """Parse a command line down to its last command, without running it. Files need not exist."""
    command: click.Command = cli.program
    words = shlex.split(line)[1:]
    context = click.Context(command)
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
        context = click.Context(command, parent=context)
    options = {name for param in command.params for name in param.opts}
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in options, word
    command.make_parser(context).parse_args(words)


def test_every_command_has_its_heading():
    """The groups of --help name commands that are there, and each in one group."""
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(cli.program.commands)


@pytest.mark.parametrize(
    ("shell", "variable", "file"),
    [
        ("bash", "XDG_DATA_HOME", "bash-completion/completions/specserve"),
        ("zsh", "XDG_DATA_HOME", "zsh/site-functions/_specserve"),
        ("fish", "XDG_CONFIG_HOME", "fish/completions/specserve.fish"),
    ],
)
def test_completion_is_installed_by_one_command(
    tmp_path, monkeypatch, capsys, *, shell, variable, file
):
    """The shell's own folder gets click's script, and the next line is said."""
    monkeypatch.setenv(variable, str(tmp_path))
    code, out, _ = typed(f"completion {shell} --install", capsys)
    assert code == 0
    assert "_SPECSERVE_COMPLETE" in (tmp_path / file).read_text(encoding="utf-8")
    assert out.splitlines()[-1] == f"Next: exec {shell}"


def test_config_show_changed_leaves_defaults_out(here, capsys):
    """Only what the file, the environment and --set say, with its place."""
    code, out, err = typed("config show ok.yaml --changed --set server.port=9000", capsys)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "server.port",
        "models.target_model.path",
        "speculative_decoding.method",
    ]
    assert err == "Next: specserve check ok.yaml --set server.port=9000\n"


def test_the_next_command_repeats_no_secret(here, capsys):
    """A key that was typed is not printed again."""
    _, _, err = typed("launch ok.yaml --dry-run --set server.api_key=k-123456", capsys)
    assert err.splitlines()[-1] == "Next: specserve launch ok.yaml --set server.api_key=..."


@pytest.mark.parametrize(
    ("line", "following"),
    [
        ("gpus A100-80", "specserve plan CONFIG --set hardware.gpu_name="),
        ("alerts list", "specserve alerts rules"),
        ("alerts metrics", "specserve alerts lint"),
        ("alerts rules", "specserve alerts inhibit"),
        ("config show ok.yaml", "specserve config show ok.yaml --changed"),
        ("launch ok.yaml --dry-run", "specserve launch ok.yaml"),
        ("probe ready --url http://127.0.0.1:9", "specserve status --url http://127.0.0.1:9"),
    ],
)
def test_a_command_ends_with_the_next_one(here, capsys, line, following):
    """The last line to a person; never in what goes into a file or JSON."""
    _, out, err = typed(line, capsys)
    last = (err or out).splitlines()[-1]
    assert last.startswith(f"Next: {following}")
    if line in ("alerts rules", "config show ok.yaml"):
        assert "Next:" not in out


def test_a_dry_run_needs_no_engine(here, monkeypatch, capsys):
    """A laptop shows the command that a machine with GPUs would run, and says what it assumed."""
    monkeypatch.setattr(introspect, "DISTRIBUTIONS", ())
    code, out, err = typed("launch ok.yaml --dry-run", capsys)
    assert code == 0
    assert "python3 -P -m vllm.entrypoints.cli.main serve /m" in out
    assert err.startswith("no vLLM is installed here and no version is stated; judged for vllm 0.")


def test_lists_of_commands_are_whole_at_80_columns(monkeypatch, capsys):
    """What a command does is said in one line that no terminal cuts."""
    monkeypatch.setenv("COLUMNS", "80")
    for group in ("", "alerts", "models", "trace", "config"):
        _, out, _ = typed(f"{group} --help", capsys)
        listed = out.partition("--help")[2].partition("Examples:")[0]
        assert len(listed.splitlines()) > 2
        assert "..." not in listed, out


@pytest.mark.parametrize(
    "line", ["--debug config show missing.yaml", "config show missing.yaml --debug"]
)
def test_debug_adds_the_traceback_and_keeps_the_exit_code(line, here, capsys):
    """--debug may stand anywhere; the error and its code are the same as without."""
    code, _, err = typed(line, capsys)
    assert code == 2
    assert err.startswith("Error: missing.yaml: no such file")
    assert "Traceback" in err


def test_ctrl_c_inside_a_library_is_an_interruption(capsys):
    """pydantic wraps a Ctrl-C that comes while it builds a schema; that is no bug."""
    wrapped = SchemaError("Error building `literal` serializer:\n  KeyboardInterrupt: ")
    assert cli._told(wrapped) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/metrics"]
)
def test_a_url_for_clients_or_scrapers_is_the_servers(url):
    """What launch prints for clients (/v1) and what Prometheus scrapes (/metrics) name the same server."""
    assert http_url(None, None, url) == "http://h:1"
    assert http_url(None, None, (url,)) == ("http://h:1",)


def test_verify_asks_nothing_more_where_nobody_answers(capsys):
    """A server that is not there is one failed check, not one for each."""
    code, out, err = typed("verify --url http://127.0.0.1:1", capsys)
    assert code == 6
    assert [line.split()[0] for line in out.splitlines()] == ["FAIL", *["SKIP"] * 10]
    assert (
        out.splitlines()[0]
        == "FAIL  models       http://127.0.0.1:1/v1/models: no answer (Connection refused)"
    )
    assert err == (
        "Error: verify: 1 of 1 checks failed; not fit to go live (10 more were not made)\n"
    )


def test_a_dry_run_is_quoted_for_whoever_reads_it(here, capsys):
    """A path that a shell would take apart comes back whole from the line and from JSON."""
    path = '/m/it\'s $HOME "größe" #1'
    (here / "odd.yaml").write_text(
        json.dumps(
            {
                "models": {"target_model": {"path": path}},
                "speculative_decoding": {"method": "ngram"},
            }
        )
    )
    _, line, _ = typed("launch odd.yaml --dry-run", capsys)
    assert path in shlex.split(line)
    _, body, _ = typed("launch odd.yaml --dry-run --format json", capsys)
    assert path in json.loads(body)["argv"] == yaml.safe_load(body)["argv"]


def test_a_full_disk_is_no_bug_of_ours(here, monkeypatch, capsys):
    """What cannot be written for lack of room says so."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main(["config", "schema"])
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is still in its buffer
    assert ended.value.code == 2
    assert "Error: output: No space left on device\nFix: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "stream", "code"),
    [
        ("config schema", "stdout", 141),
        ("status --help", "stdout", 141),
        ("verify --url http://127.0.0.1:1", "stdout", 141),
        ("verify --url http://127.0.0.1:1", "stderr", 6),
        ("config show missing.yaml", "stderr", 2),
        ("config show", "stderr", 2),
    ],
)
def test_a_reader_that_went_away_makes_no_success(line, stream, code, here, monkeypatch):
    """`| head` may cut the output short; it never turns a verdict into 0 or a bug of ours."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr(f"sys.{stream}", unread)
        with pytest.raises(SystemExit) as ended:
            cli.main(line.split())
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), unread.fileno())  # what is still in its buffer
    assert ended.value.code == code


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_is_heeded_on_a_terminal(environ, colored, here, monkeypatch):
    """NO_COLOR also takes the color off errors, verdicts and PASS lines."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code = "from specserve import cli; cli.main(['verify', '--url', 'http://127.0.0.1:1'])"
    ours, theirs = os.openpty()
    ended = subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, check=False)
    os.close(theirs)
    said = os.read(ours, 65536)
    os.close(ours)
    assert ended.returncode == 6
    assert (b"\x1b[" in said) is colored


def test_any_encoding_can_be_written_to(here):
    """Where stdout is Latin-1, JSON is escaped and text is readable, and neither is a bug of ours."""
    (here / "ł.yaml").write_text(CONFIG.replace("/m", "/ł"), encoding="utf-8")
    for arguments in (
        ["check", "ł.yaml"],
        ["check", "ł.yaml", "--format", "json"],
        ["config", "show", "ł.yaml"],
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "specserve", *arguments],
            env=os.environ | {"PYTHONIOENCODING": "latin-1"},
            capture_output=True,
            check=False,
        )
        assert ended.returncode in (0, 3)
        assert b"\\u0142" in ended.stdout


def test_show_as_json_tells_where_each_value_is_from(here, capsys):
    """config show --format json has one entry a key: the value and its source."""
    code, out, _ = typed("config show ok.yaml --set server.port=9000 --format json", capsys)
    assert code == 0
    shown = json.loads(out)
    assert shown["server.port"] == {"value": 9000, "source": "--set server.port"}
    assert shown["speculative_decoding.method"] == {"value": "ngram", "source": "ok.yaml:2"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "it is not JSON"),
        ('{"arms": [], "blocks": []}', "arms: List should have at least 1 item"),
        (
            '{"arms": [{"kv_cache_tokens": NaN}]}',
            "it holds the number NaN; must be what was measured",
        ),
        ('{"arms": [{"kv_cache_tokens": 1%s}]}' % ("0" * 400), "it holds the number 1000"),
        ('{"arms": [{"ready_seconds": [1e308]}]}', "it holds the number 1e308"),
    ],
)
def test_a_result_that_bench_did_not_write(text, reason, here, capsys):
    """Depth, sizes and numbers that no benchmark has are refused by report, with the reason."""
    (here / "odd.json").write_text(
        text.replace("{", '{"specserve_version": "1", "created": "now", ', 1)
    )
    code, _, err = typed("report odd.json", capsys)
    assert code == 2
    assert err.startswith(f"Error: odd.json: is not a benchmark result of version 1: {reason}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "is not a JSON object; must be one request"),
        ('{"messages": 3}', "'messages' is not a list; must hold the turns of a chat"),
        ('{"conversations": 5}', "'conversations' is not a list; must hold the turns of a chat"),
        (
            '{"prompt": 3}',
            "has neither 'messages' nor 'prompt' nor 'conversations'; must have one of them",
        ),
        (
            '{"prompt": "x", "max_tokens": "many"}',
            "asks for 'many' tokens; must be a whole number from 1",
        ),
        ('{"prompt": "x", "max_tokens": 0}', "asks for 0 tokens; must be a whole number from 1"),
        (
            '{"prompt": "x", "max_tokens": 1e400}',
            "asks for inf tokens; must be a whole number from 1",
        ),
        (
            '{"prompt": "x", "temperature": [1]}',
            "'temperature' is [1]; must be a number from 0 to 2",
        ),
    ],
)
def test_bad_lines_of_a_trace_are_named(line, message, here, capsys):
    """A request that cannot be sent is refused with file and line before anything starts."""
    (here / "trace.jsonl").write_text(f"fine\n{line}\n")
    code, _, err = typed("bench ok.yaml --trace trace.jsonl", capsys)
    assert code == 2
    assert err == f"Error: trace.jsonl:2: {message}\n"


def test_a_trace_may_not_be_taken_for_a_builtin_workload(here, capsys):
    """Cells are told apart by the workload's name, so two of one name would be measured as one."""
    (here / "chat.jsonl").write_text("hello\n")
    urls = "--url-baseline http://127.0.0.1:9 --url-speculative http://127.0.0.1:9"
    code, _, err = typed(f"bench ok.yaml --workload chat --trace chat.jsonl {urls}", capsys)
    assert code == 2
    assert "chat.jsonl: has the name of the built-in workload chat" in err


def test_overrides_are_for_every_arm(here):
    """A port given by --set is the port of an arm that is a file as well."""
    (here / "other.yaml").write_text(CONFIG)
    loaded = load(here / "ok.yaml", environ={}, overrides=["server.port=9000"])
    arms = _arms(loaded, BenchOptions(arms="baseline,other.yaml"), {})
    assert [a.loaded.settings.server.port for a in arms] == [9000, 9000]
