"""Vocabularies, token by token, from every kind of tokenizer file."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from specserve.checkpoint import encoding
from specserve.checkpoint import tokenizer as tokenizer_files
from specserve.checkpoint.read import read
from specserve.checkpoint.safetensors import Corrupt
from specserve.checkpoint.tokenizer import Tokenizer
from specserve.pair import vocabulary
from tests import checkpoints as make

TEXT = [
    "the cat sat on the mat and the dog ran to the house",
    "a quick brown fox jumps over lazy dogs again",
] * 20


def folder(path: Path, **files: bytes | dict[str, Any] | None) -> Path:
    """A checkpoint with these tokenizer files (``tokenizer_model`` is ``tokenizer.model``)."""
    checkpoint = make.llama()
    checkpoint.tokenizer = None
    make.write(path, checkpoint)
    for name, body in files.items():
        if body is not None:
            target = path / name.replace("_", ".", 1)
            target.write_bytes(json.dumps(body).encode() if isinstance(body, dict) else body)
    return path


def load(path: Path) -> Tokenizer:
    """Its tokenizer, which must be there."""
    tokenizer = tokenizer_files.load(read(str(path)))
    assert tokenizer is not None
    return tokenizer


def sentencepiece_model(size: int) -> bytes:
    """A SentencePiece model trained on a few sentences."""
    trainer = sentencepiece.SentencePieceTrainer
    out = io.BytesIO()
    trainer.train(
        sentence_iterator=iter(TEXT), model_writer=out, vocab_size=size, byte_fallback=True, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return out.getvalue()


def tiktoken_file(words: list[str]) -> bytes:
    """256 bytes and some words, as tiktoken writes them."""
    tokens = [bytes([i]) for i in range(256)] + [w.encode() for w in words]
    return b"\n".join(base64.b64encode(t) + b" " + str(i).encode() for i, t in enumerate(tokens))


def tekken_file(words: list[str], specials: int = 4) -> dict[str, Any]:
    """The same as tekken."""
    tokens = [bytes([i]) for i in range(256)] + [w.encode() for w in words]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate(tokens)
    ]
    config = {
        "pattern": ".",
        "default_vocab_size": len(tokens) + specials,
        "default_num_special_tokens": specials,
    }
    return {
        "config": config,
        "vocab": vocab,
        "special_tokens": [{"rank": 1, "token_str": "<s>", "is_control": True}],
    }


def test_tokenizer_json(tmp_path: Path) -> None:
    """Base and added tokens are kept apart, the sample encodes."""
    make.write(tmp_path / "m", make.llama())
    tokenizer = load(tmp_path / "m")
    assert (tokenizer.kind, len(tokenizer.base), tokenizer.size) == ("tokenizer.json", 317, 320)
    assert dict(tokenizer.added) == {"<unk>": 0, "<s>": 1, "</s>": 2}
    encode = tokenizer_files.encoder(tokenizer)
    assert encode("the") == [318, 104]
    assert tokenizer.space_prefix() == ("Ġ",)


def test_sentencepiece(tmp_path: Path) -> None:
    """Pieces and control symbols; two trainings of other sizes differ, the same file does not."""
    small, large = sentencepiece_model(290), sentencepiece_model(300)
    one = load(folder(tmp_path / "one", tokenizer_model=small))
    two = load(folder(tmp_path / "two", tokenizer_model=large))
    assert one.kind == "sentencepiece"
    assert set(one.added) == {"<unk>", "<s>", "</s>"}
    assert plain({"▁a": 0}).space_prefix() == ("▁",)
    assert plain({}).space_prefix() == ("Ġ", "▁")
    assert vocabulary.compare(one, one).relation == "identical"
    assert vocabulary.compare(one, two).relation == "different"
    encode = tokenizer_files.encoder(one)
    assert all(0 <= i < one.size for i in encode(vocabulary.SAMPLE[3]))


def test_tiktoken_in_both_clothes(tmp_path: Path) -> None:
    """``*.tiktoken`` and a ``tokenizer.model`` of tiktoken lines are read alike, in the alphabet of tokenizer.json."""
    data = tiktoken_file([" the", "ing"])
    named = load(folder(tmp_path / "a", qwen_tiktoken=data))
    hidden = load(folder(tmp_path / "b", tokenizer_model=data))
    assert named.kind == hidden.kind == "tiktoken"
    assert named.base == hidden.base
    assert (named.base["Ġthe"], named.base["ing"], named.base["Ċ"]) == (256, 257, 10)


def test_tekken(tmp_path: Path) -> None:
    """Ranks come after the special tokens."""
    tokenizer = load(folder(tmp_path / "m", tekken_json=tekken_file([" the"])))
    assert (tokenizer.kind, tokenizer.base["Ġthe"], tokenizer.added) == ("tekken", 260, {"<s>": 1})


def test_tekken_encodes(tmp_path: Path) -> None:
    """Words of the file's own pattern, ids behind the special tokens; another pattern shows in the sample."""
    body = tekken_file(["ab"])
    body["config"]["pattern"] = "[a-z]+|."
    whole = load(folder(tmp_path / "a", tekken_json=body))
    assert tokenizer_files.encoder(whole)("abz") == [260, 4 + ord("z")]
    single = load(folder(tmp_path / "b", tekken_json=tekken_file(["ab"])))
    comparison = vocabulary.compare(whole, single)
    assert comparison.relation == "identical"
    assert (comparison.rule_differences, comparison.not_encoded) == (("pre_tokenizer",), None)
    body["config"]["pattern"] = "("
    with pytest.raises(Corrupt):
        vocabulary.compare(load(folder(tmp_path / "c", tekken_json=body)), single)


def test_a_sample_that_cannot_be_encoded_is_said(tmp_path: Path) -> None:
    """A tiktoken file has no pattern: equal maps are reported as such, with what was not compared."""
    pair = []
    for name, end in (("target", b""), ("draft", b"\n")):
        place = make.write(tmp_path / name, make.llama())
        (place / "tokenizer.json").unlink()
        (place / "qwen.tiktoken").write_bytes(tiktoken_file(["ing"]) + end)
        pair.append(read(str(place)))
    verdict = vocabulary.check(*pair, heterogeneous=False, is_head=False, floor=0.5)
    (finding,) = [f for f in verdict.findings if f.code == "tokenizer-rules"]
    assert finding.severity == "info"
    assert "not encoded with both: qwen.tiktoken does not say how text is split" in finding.message
    assert verdict.comparison.as_dict()["sample_identical"] is None


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_json": b"\xff\xfe"},
        {"tokenizer_json": {"model": {}}},
        {"tokenizer_json": {"model": {"vocab": {"a": "b"}}}},
        {"tokenizer_json": {"model": {"vocab": {"a": -1}}}},
        {"tokenizer_json": {"model": {"vocab": {}}, "added_tokens": [{"content": "x"}]}},
        {"tekken_json": {"config": {}}},
        {"qwen_tiktoken": b"!!! 0"},
        {"tokenizer_model": b"\x00" * 100},
    ],
)
def test_broken_file(tmp_path: Path, files: dict[str, Any]) -> None:
    """Each broken file is Corrupt, never anything else."""
    with pytest.raises(Corrupt):
        tokenizer_files.load(read(str(folder(tmp_path / "m", **files))))


def test_missing_library_is_said(tmp_path: Path) -> None:
    """Without sentencepiece the pair is not refused, and the command that would help is given."""
    make.write(tmp_path / "target", make.llama())
    folder(tmp_path / "draft", tokenizer_model=b"\x0a\x0b")
    program = """
import sys
sys.modules["sentencepiece"] = None
from specserve.pair import vocabulary
from specserve.checkpoint.read import read
target, draft = read(sys.argv[1] + "/target"), read(sys.argv[1] + "/draft")
verdict = vocabulary.check(target, draft, heterogeneous=False, is_head=False, floor=0.5)
print([(f.code, f.severity, f.fix) for f in verdict.findings])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(
        [("tokenizer-unreadable", "warning", "pip install 'specserve[vocab]'")]
    )


def plain(
    base: dict[str, int], added: dict[str, int] | None = None, digest: str = "x"
) -> Tokenizer:
    """A tokenizer that is only a map."""
    return Tokenizer("tiktoken", "f", digest, base, added or {})


def test_first_five_differences_with_both_strings() -> None:
    """Ids in order, at most five, and how many there are."""
    base = {chr(97 + i): i for i in range(20)}
    other = {chr(97 + i): (i if i < 10 else 29 - i) for i in range(20)}
    comparison = vocabulary.compare(plain(base), plain(other, digest="y"))
    assert comparison.ordinary_difference_count == 10
    assert comparison.ordinary_differences[0] == (10, "k", "t")
    assert len(comparison.ordinary_differences) == 5


@pytest.mark.parametrize(
    ("ours", "theirs", "relation"),
    [
        (({"a": 0}, {"<e>": 1}), ({"a": 0}, {"<e>": 1}), "identical"),
        (({"a": 0}, {"<e>": 1}), ({"a": 0, "<e>": 1}, {}), "identical"),
        (({"a": 0}, {"<e>": 1}), ({"a": 0}, {}), "added"),
        (({"a": 0}, {"<e>": 1}), ({"a": 0}, {"<e>": 2}), "added"),
        (({"a": 0, "<unused0>": 1}, {}), ({"a": 0, "<unused1>": 1}, {"<t>": 2}), "added"),
        (({"a": 0, "b": 1}, {}), ({"a": 0}, {"<t>": 1}), "different"),
        (({"a": 0, "b": 1}, {}), ({"a": 0}, {}), "different"),
        (({"a": 0, "b": 1}, {}), ({"a": 1, "b": 0}, {}), "different"),
    ],
)
def test_relation(
    ours: tuple[dict[str, int], dict[str, int]],
    theirs: tuple[dict[str, int], dict[str, int]],
    relation: str,
) -> None:
    """Reserved and added tokens may differ with a warning, ordinary ones may not."""
    assert vocabulary.compare(plain(*ours), plain(*theirs, digest="y")).relation == relation


def test_overlap_makes_space_marks_equal() -> None:
    """``Ġthe`` and ``▁the`` are the same word; the share is of the draft's tokens."""
    byte_level = plain({"Ġa": 0, "Ġthe": 1, "x": 2, "y": 3})
    pieces = plain({"▁a": 5, "▁the": 6, "z": 7, "Ġ": 8}, digest="y")
    assert vocabulary.overlap_ratio(byte_level, pieces) == 0.5
    assert vocabulary.overlap_ratio(byte_level, byte_level) == 1.0
    assert vocabulary.overlap_ratio(byte_level, plain({})) is None


def test_newer_and_older_merges_are_the_same_rules(tmp_path: Path) -> None:
    """``["a", "b"]`` and ``"a b"`` are one merge."""
    new, old = make.llama(), make.llama()
    assert old.tokenizer is not None
    old.tokenizer["model"]["merges"] = [" ".join(m) for m in old.tokenizer["model"]["merges"]]
    make.write(tmp_path / "new", new)
    make.write(tmp_path / "old", old)
    comparison = vocabulary.compare(load(tmp_path / "new"), load(tmp_path / "old"))
    assert (comparison.relation, comparison.rule_differences, comparison.same_file) == (
        "identical",
        (),
        False,
    )


def test_other_rules_same_sample(tmp_path: Path) -> None:
    """A rule that changes nothing in the sample is information, not a warning."""
    other = make.small_llama()
    assert other.tokenizer is not None
    other.tokenizer["normalizer"] = {"type": "Sequence", "normalizers": []}
    target, draft = (
        read(str(make.write(tmp_path / "t", make.llama()))),
        read(str(make.write(tmp_path / "d", other))),
    )
    verdict = vocabulary.check(target, draft, heterogeneous=False, is_head=False, floor=0.5)
    assert [(f.code, f.severity) for f in verdict.findings] == [("tokenizer-rules", "info")]
    assert verdict.comparison is not None
    assert verdict.comparison.as_dict()["sample_identical"] is True


def test_stop_ids_prefer_generation_config(tmp_path: Path) -> None:
    """What the engine stops at: generation_config.json first, one id or several."""
    facts = read(str(make.write(tmp_path / "m", make.llama())))
    assert vocabulary.stop_ids(facts) == [2]
    assert vocabulary.stop_ids(replace(facts, generation_config={"eos_token_id": [9, 7]})) == [7, 9]
    assert (
        vocabulary.stop_ids(replace(facts, config={}, generation_config={"eos_token_id": None}))
        == []
    )


def tokenizer_with(folder: Path, **parts: Any) -> Path:
    """A checkpoint whose tokenizer.json has other parts."""
    checkpoint = make.llama()
    checkpoint.tokenizer = {**make.tokenizer(), **parts}
    return make.write(folder, checkpoint)


MEASURE = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "specserve", "check", sys.argv[1]], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""
"""Runs in a small process: a child's peak counts what its parent held when it was started."""


def test_rules_that_make_gigabytes_are_given_up(tmp_path: Path) -> None:
    """An empty pattern that inserts megabytes between all letters: the sample is not compared, and memory is bounded."""
    bomb = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 3_000_000}
    target = read(str(make.write(tmp_path / "t", make.llama())))
    draft = read(str(tokenizer_with(tmp_path / "d", normalizer=bomb)))
    verdict = vocabulary.check(target, draft, heterogeneous=False, is_head=False, floor=0.5)
    assert verdict.comparison is not None
    assert "it takes more than" in (verdict.comparison.not_encoded or "")
    assert [f.severity for f in verdict.findings if f.code == "tokenizer-rules"] == ["info"]
    config = tmp_path / "c.yaml"
    config.write_text(
        f"models: {{target_model: {{path: {target.path}}}, draft_model: {{path: {draft.path}}}}}\n"
        "engine: {version: '0.32'}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(config)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 300


@pytest.mark.parametrize(
    "model",
    [
        {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]] * 800_000},
        {"type": "BPE", "vocab": {f"t{i}": i for i in range(1_600_000)}, "merges": []},
    ],
    ids=["merges", "tokens"],
)
def test_more_than_any_tokenizer_has_is_not_read(tmp_path: Path, model: dict[str, Any]) -> None:
    """Known before the file is parsed; a warning, since it may be somebody's own."""
    target = read(str(make.write(tmp_path / "t", make.llama())))
    draft = read(str(tokenizer_with(tmp_path / "d", model=model)))
    verdict = vocabulary.check(target, draft, heterogeneous=False, is_head=False, floor=0.5)
    (said,) = [f for f in verdict.findings if f.code == "tokenizer-unreadable"]
    assert said.severity == "warning"
    assert "more tokens and merges" in said.message


def test_other_rules_over_the_same_vocabulary_are_tried_without_loading_it_twice(
    tmp_path: Path,
) -> None:
    """The draft's normalizer and pre-tokenizer over the target's model give what the draft's own file gives."""
    target = read(str(make.write(tmp_path / "t", make.llama())))
    lower = {"type": "Lowercase"}
    draft = read(str(tokenizer_with(tmp_path / "d", normalizer=lower)))
    ours, theirs = tokenizer_files.load(target), tokenizer_files.load(draft)
    assert ours is not None
    assert theirs is not None
    assert theirs.shares_model_with(ours)
    texts = ["The THE the", "ABC def", *vocabulary.SAMPLE]
    together = encoding.encode([ours, theirs], texts).ids
    alone = tuple(encoding.encode([one], texts).ids[0] for one in (ours, theirs))
    assert together == alone
    assert together[0] != together[1]
