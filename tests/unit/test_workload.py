"""Workloads: what comes with specserve, and traces of many shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.bench import workload
from specserve.errors import ConfigError


def trace(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(
        "\n".join(
            line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
            for line in lines
        )
    )
    return path


def test_the_built_in_workloads_are_many_and_whole() -> None:
    """Nine classes, more than two hundred different prompts, English and Chinese, each with its predictability."""
    found = [workload.builtin(n) for n in workload.builtin_names()]
    prompts = [r.messages[0]["content"] for w in found for r in w.requests if r.messages]
    assert len(found) == 9
    assert len(prompts) == len(set(prompts)) >= 200
    assert all(w.predictability and w.description for w in found)
    chinese = [p for p in prompts if any("\u4e00" <= c <= "\u9fff" for c in p)]
    assert 30 <= len(chinese) < len(prompts) / 2


def test_an_unknown_workload_is_named() -> None:
    """A wrong name is answered with the right ones."""
    with pytest.raises(ConfigError, match="unknown workload 'chta'; known: chat, "):
        workload.builtin("chta")


def test_the_same_seed_picks_the_same_prompts() -> None:
    """A benchmark can be repeated: the choice depends on the seed alone."""
    chat = workload.builtin("chat")
    first, again = workload.pick(chat, 8, seed=1), workload.pick(chat, 8, seed=1)
    assert first == again != workload.pick(chat, 8, seed=2)
    assert len(first.requests) == 8


def test_traces_of_many_shapes(tmp_path: Path) -> None:
    """OpenAI bodies, wrapped bodies, completions, ShareGPT and plain text become requests."""
    path = trace(
        tmp_path,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7},
        {
            "custom_id": "x",
            "body": {
                "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
            },
        },
        {"prompt": "once", "temperature": 0.5},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "plain text",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ]
        },
    )
    found = workload.from_file(path, max_tokens=99)
    user = [[m["content"] for m in r.messages or () if m["role"] == "user"] for r in found.requests]
    assert user == [["hi"], ["u"], ["once"], ["q"], ["plain text"], ["a\nb"]]
    assert found.requests[1].messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
    )
    assert [r.max_tokens for r in found.requests] == [7, 99, 99, 99, 99, 99]
    assert not found.is_timed


def test_recorded_times_start_at_zero(tmp_path: Path) -> None:
    """A trace with a time for every request is replayed at them, in order."""
    found = workload.from_file(
        trace(tmp_path, {"prompt": "b", "timestamp": 105.5}, {"prompt": "a", "timestamp": 100})
    )
    assert [(r.prompt, r.at_seconds) for r in found.requests] == [("a", 0.0), ("b", 5.5)]
    assert found.is_timed


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    """All bad lines at once, each with its number."""
    image = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ]
    }
    path = trace(
        tmp_path,
        {"prompt": "ok"},
        "{broken",
        {"nothing": 1},
        {"prompt": "x", "max_tokens": -1},
        image,
    )
    with pytest.raises(ConfigError) as caught:
        workload.from_file(path)
    assert [p.where for p in caught.value.problems] == [f"{path}:{n}" for n in (2, 3, 4, 5)]


def test_an_absent_or_empty_trace_is_an_error(tmp_path: Path) -> None:
    """No file, or no request in it: one sentence."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        workload.from_file(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="holds no requests"):
        workload.from_file(trace(tmp_path, ""))


def test_redaction_drops_who_and_what_but_keeps_the_shape(tmp_path: Path) -> None:
    """User ids and words go; lengths, repetition, roles and times stay."""
    line = {
        "user": "ann@example.org",
        "timestamp": 3,
        "messages": [{"role": "user", "content": "Ann likes tea, tea!"}],
    }
    count = workload.redact_file(trace(tmp_path, line), tmp_path / "out.jsonl", keep_text=False)
    out = json.loads((tmp_path / "out.jsonl").read_text())
    content = out["messages"][0]["content"]
    assert count == 1
    assert "ann" not in json.dumps(out).lower()
    assert "tea" not in content
    assert [len(w) for w in content.split(" ")] == [3, 5, 4, 4]
    assert content.split(" ")[2][:3] == content.split(" ")[3][:3]
    assert (out["timestamp"], out["messages"][0]["role"]) == (3, "user")


def test_a_redacted_trace_is_the_same_load(tmp_path: Path) -> None:
    """Content in parts, times and lengths under any name that is read: the redacted file reads as the original does."""
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Ann"}]}]}
    lines = [
        {"body": parts, "at_seconds": 1, "output_tokens": 7},
        {**parts, "at_seconds": 3.5, "output_tokens": 9},
    ]
    source = trace(tmp_path, *lines)
    workload.redact_file(source, tmp_path / "out.jsonl", keep_text=False)
    before, after = workload.from_file(source), workload.from_file(tmp_path / "out.jsonl")
    for read in (before, after):
        assert [(r.at_seconds, r.max_tokens) for r in read.requests] == [(0, 7), (2.5, 9)]


def test_times_as_text_are_times(tmp_path: Path) -> None:
    """ISO 8601 is replayed as seconds are and stays when redacted; what only stands in its place is redacted."""
    lines = [
        {"prompt": "b", "timestamp": "2026-01-01T00:00:02+01:00"},
        {"prompt": "a", "timestamp": "2026-01-01"},
    ]
    source = trace(tmp_path, *lines, {"prompt": "c", "timestamp": 1767225600.5})
    workload.redact_file(source, tmp_path / "out.jsonl", keep_text=False)
    for path in (source, tmp_path / "out.jsonl"):
        assert [r.at_seconds for r in workload.from_file(path).requests] == [0, 3598, 3598.5]
    assert "Ann" not in workload.redact('{"prompt": "b", "timestamp": "Ann"}', keep_text=False)
    assert not workload.from_file(trace(tmp_path, '{"prompt": "b", "timestamp": 1e999}')).is_timed


def test_redaction_spares_its_source(tmp_path: Path) -> None:
    """The trace is never written over, and a line that cannot be redacted leaves nothing behind."""
    source = trace(tmp_path, {"prompt": "hello"}, '{"a":' * 20_000)
    before = source.read_text()
    with pytest.raises(ConfigError, match="is the trace itself"):
        workload.redact_file(source, tmp_path / "." / source.name, keep_text=False)
    for read in (
        workload.from_file,
        lambda s: workload.redact_file(s, tmp_path / "out", keep_text=False),
    ):
        with pytest.raises(ConfigError, match=r"jsonl:2: is nested too deeply"):
            read(source)
    assert source.read_text() == before
    assert list(tmp_path.iterdir()) == [source]


def test_redaction_can_keep_the_text(tmp_path: Path) -> None:
    """--keep-text drops only what tells who sent it."""
    line = {"user": "ann", "prompt": "hello", "metadata": {"ip": "1.2.3.4"}}
    workload.redact_file(trace(tmp_path, line), tmp_path / "out.jsonl", keep_text=True)
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"prompt": "hello"}
