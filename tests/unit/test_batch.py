"""Batch: what is kept through a kill, in which order, from which lines, at which pace."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.app.batch import inputs, job, journal
from specserve.app.batch.inputs import BadLine, LineShape, Raw
from specserve.app.batch.job import BatchOutcome
from specserve.app.batch.journal import SEGMENT, Fate, Journal, Kept, Totals
from specserve.app.batch.pace import Pace, Yielding
from specserve.config.load import Loaded, load
from specserve.engine.http import metrics
from specserve.errors import ConfigError


def kept(index: int, fate: Fate = Fate.ANSWERED) -> Kept:
    return Kept(
        fate,
        json.dumps({"index": index, "text": "x" * (index % 7)}).encode() + b"\n",
        index % 5 or None,
    )


def indexes(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("out.jsonl*"))


# --- the journal ---


@pytest.mark.parametrize("ordered", [True, False])
def test_a_cut_at_every_byte_leaves_one_answer_for_each(tmp_path, ordered):
    """Whatever file ends at whatever byte, what is there is kept, the rest is asked again, nothing is there twice."""
    count = 6
    order = [2, 0, 1, 5, 4]
    begun = tmp_path / "begun"
    begun.mkdir()
    with Journal(begun / "out.jsonl", "same", ordered=ordered, window=64) as first:
        for index in order:
            first.add(index, kept(index))
    for victim in files(begun):
        header = (
            len(victim.read_bytes().partition(b"\n")[0]) + 1
            if victim.name.endswith("journal")
            else 0
        )
        for size in range(header, victim.stat().st_size):
            folder = tmp_path / "cut"
            shutil.copytree(begun, folder)
            with (folder / victim.name).open("r+b") as file:
                file.truncate(size)
            with Journal(
                folder / "out.jsonl", "same", ordered=ordered, resume=True, window=64
            ) as again:
                for index in random.Random(size).sample(range(count), count):
                    if not again.has(index):
                        again.add(index, kept(index))
                again.finish()
                assert again.totals.lines == count
            found = indexes(folder / "out.jsonl")
            assert sorted(found) == list(range(count))
            assert not ordered or found == sorted(found)
            assert [p.name for p in files(folder)] == ["out.jsonl", "out.jsonl.journal"]
            shutil.rmtree(folder)


def test_a_kill_before_the_first_line_of_the_journal_begins_anew(tmp_path):
    """A journal with half a first line, and nothing in OUTPUT, is no obstacle."""
    (tmp_path / "out.jsonl.journal").write_bytes(b'{"specserve_ba')
    with Journal(tmp_path / "out.jsonl", "same", resume=True) as fresh:
        fresh.add(0, kept(0))
    with Journal(tmp_path / "out.jsonl", "same", resume=True) as again:
        assert again.has(0)


def test_answers_that_wait_survive_and_are_not_asked_again(tmp_path):
    """An answer that came before an earlier one is on disk until its turn, also over a restart."""
    with Journal(tmp_path / "out.jsonl", "same") as first:
        for index in range(1, 2 * SEGMENT + 10):
            first.add(index, kept(index))
        assert (tmp_path / "out.jsonl").read_bytes() == b""
    with Journal(tmp_path / "out.jsonl", "same", resume=True) as again:
        assert not again.has(0)
        assert all(again.has(index) for index in range(1, 2 * SEGMENT + 10))
        again.add(0, kept(0))
        assert indexes(tmp_path / "out.jsonl") == list(range(2 * SEGMENT + 10))
        assert [p.name for p in files(tmp_path)] == [
            "out.jsonl",
            "out.jsonl.journal",
            "out.jsonl.waiting-2",
        ]
        again.finish()
    assert [p.name for p in files(tmp_path)] == ["out.jsonl", "out.jsonl.journal"]


def test_totals_are_those_of_all_runs(tmp_path):
    """Answered, failed, bad lines and tokens are read back from the journal."""
    with Journal(tmp_path / "out.jsonl", "same") as first:
        for index, fate in enumerate([Fate.ANSWERED, Fate.FAILED, Fate.BAD_LINE, Fate.ANSWERED]):
            first.add(index, kept(index, fate))
        before = first.totals
    with Journal(tmp_path / "out.jsonl", "same", resume=True) as again:
        assert again.totals == before
    assert (before.answered, before.failed, before.bad_lines, before.without_tokens) == (2, 1, 1, 1)


def test_no_answer_is_taken_beyond_the_window(tmp_path):
    """One request that does not end stops new ones at the window, not the memory."""
    with Journal(tmp_path / "out.jsonl", "same", window=8) as few:
        for index in range(1, 8):
            few.add(index, kept(index))
        assert not few.has_room(8)
        few.add(0, kept(0))
        assert few.has_room(15)


def refused(path: Path, identity: str = "same", **options: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        Journal(path, identity, **options)
    return str(caught.value)


def test_what_must_not_be_continued_is_refused_and_stays(tmp_path):
    """Another input, another order, no --resume, a changed line, a foreign file: a sentence, and no byte is touched."""
    path = tmp_path / "out.jsonl"
    with Journal(path, "same") as first:
        for index in range(4):
            first.add(index, kept(index))
        assert "another specserve batch" in refused(path, resume=True)
    assert "exists already" in refused(path)
    assert "the input or the options" in refused(path, "other", resume=True)
    assert "--unordered" in refused(path, ordered=False, resume=True)
    text = path.read_text()
    path.write_text(text.replace('"index": 1', '"index": 7'))
    assert "was changed" in refused(path, resume=True)
    assert path.read_text() == text.replace('"index": 1', '"index": 7')
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("mine\n")
    assert "does not say whose" in refused(foreign, resume=True)
    assert [p.name for p in tmp_path.glob("foreign*")] == ["foreign.jsonl"]


def test_what_holds_no_answer_is_no_obstacle(tmp_path):
    """After a start that failed, and where OUTPUT was deleted, the same command begins anew without --resume."""
    path = tmp_path / "out.jsonl"
    Journal(path, "same").close()
    with Journal(path, "same") as first:
        first.add(0, kept(0))
        first.add(2, kept(2))
    path.unlink()
    with Journal(path, "other") as again:
        assert not again.has(0)
        assert not again.has(2)


def test_blocks_of_zeros_from_a_power_cut_are_cut_off(tmp_path):
    """A file system that lost power may keep a length without the bytes."""
    path = tmp_path / "out.jsonl"
    with Journal(path, "same") as first:
        for index in range(4):
            first.add(index, kept(index))
    whole = path.read_bytes()
    at = whole.index(b'{"index": 2')
    path.write_bytes(whole[:at] + bytes(len(whole) - at))
    with Journal(path, "same", resume=True) as again:
        assert [again.has(index) for index in range(4)] == [True, True, False, False]


def test_a_name_with_a_pattern_in_it_finds_its_own_files(tmp_path):
    """OUTPUT may be called out[1].jsonl."""
    path = tmp_path / "out[1].jsonl"
    with Journal(path, "same") as first:
        first.add(1, kept(1))
    with Journal(path, "same", resume=True) as again:
        assert again.has(1)


# --- lines ---


def read(text: bytes, **shape: object) -> list[object]:
    """The request of each line, or why it is none."""
    made = LineShape(**shape)
    found: list[object] = []
    for raw in inputs.lines(io.BytesIO(text), made):
        try:
            found.append(inputs.request(raw, made))
        except BadLine as error:
            found.append(f"{raw.line}: {error}")
    return found


def openai(**changes: object) -> bytes:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": []},
    }
    return json.dumps({**line, **changes}).encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{broken", "no JSON"),
        (b"[1]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "no JSON"),
        (openai(custom_id=None), "custom_id"),
        (openai(custom_id=3), "custom_id"),
        (openai(method="GET"), "method"),
        (openai(body=[]), "body"),
        (openai(body={"stream": True}), "stream"),
        (openai(url="http://elsewhere/v1/chat"), "url"),
        (openai(url="/v1/../metrics"), "url"),
        (openai(url="//elsewhere/v1"), "url"),
        (openai().replace(b"[]", b"NaN"), "NaN"),
        (openai().replace(b"[]", b"1e999"), "too large"),
        (openai().replace(b"[]", b"1" * 5000), "no JSON"),
    ],
)
def test_a_broken_line_is_told_and_the_next_one_is_read(line, said):
    """Bad JSON, bad keys, other hosts: the line says why, its neighbours are requests."""
    first, bad, last = read(b"\n".join([openai(), line, openai()]), format="openai")
    assert said in str(bad)
    assert str(bad).startswith("2: ")
    assert first == last
    assert not isinstance(first, str)


@pytest.mark.parametrize(
    "line",
    [
        openai(),
        openai(extra_key=1),
        openai(url="/v1/embeddings"),
        openai(url="/v1/completions"),
        openai(url="/score"),
        openai(body={"stream": False, "messages": [{"role": "user", "content": "ж \ud800"}]}),
    ],
)
def test_legal_lines_are_requests(line):
    """Other endpoints, unknown keys, a stream that is off, half a surrogate pair."""
    (found,) = read(line, format="openai")
    assert not isinstance(found, str)


def test_a_line_that_is_too_long_is_left_out_whole(monkeypatch):
    """What follows it is read as its own line."""
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 100)
    found = read(b"a\n" + b"x" * 450 + b"\nb\n", format="prompts")
    assert [getattr(one, "custom_id", one) for one in found] == [
        "line-1",
        "2: is longer than 100 B",
        "line-3",
    ]


def test_prompts_and_columns_become_chats_or_completions():
    """Blank lines do not count; the template and --body are laid around each."""
    (chat,) = read(
        b"\n\xef\xbb\xbf hi \n\n",
        format="prompts",
        template="Say {prompt} {{}}",
        extra={"max_tokens": 3},
    )
    assert chat.body == {
        "messages": [{"role": "user", "content": "Say \ufeff hi {}"}],
        "max_tokens": 3,
    }
    (plain,) = read(b"hi", format="prompts", completions=True, model="m")
    assert (plain.path, plain.body) == ("/v1/completions", {"prompt": "hi", "model": "m"})


def test_rows_of_csv_may_have_line_feeds_and_be_broken():
    """A quoted line feed stays in its row; a row that is broken is told with its line."""
    text = b'id,text\n1,"two\nlines, {x}"\n2\n3,\n4,"open "quote"\n5,\xff\n6,last\n'
    found = read(text, format="csv", csv_column="text", template="{id}: {text}")
    shown = [one if isinstance(one, str) else one.body["messages"][0]["content"] for one in found]
    assert shown[0] == "1: two\nlines, {x}"
    assert shown[-1] == "6: last"
    assert [str(s).partition(":")[0] for s in shown[1:-1]] == ["4", "5", "6", "7"]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"format": "csv", "csv_column": "txet"}, "did you mean 'text'"),
        ({"format": "csv", "csv_column": "text", "template": "{nope}"}, "no column 'nope'"),
    ],
)
def test_a_column_that_is_not_there_is_told_at_once(shape, said):
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=said):
        read(b"id,text\n1,a\n", **shape)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"format": "openai", "template": "{prompt}"}, "whole requests"),
        ({"format": "prompts", "template": "no place"}, "no place"),
        ({"format": "prompts", "template": "{prompt} {other}"}, "other"),
    ],
)
def test_a_template_that_cannot_be_meant_is_refused(shape, said):
    """One that ignores the line, or asks for what a line does not have."""
    with pytest.raises(ConfigError, match=said):
        inputs.require_template(LineShape(**shape))


def test_memory_holds_one_line_at_a_time():
    """The reader takes no more of the input than it has given, but for its buffer."""

    class Endless(io.RawIOBase):
        given = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:
            line = b"a prompt\n" * (len(buffer) // 9)
            buffer[: len(line)] = line
            self.given += len(line)
            return len(line)

    source = Endless()
    lines: Iterator[Raw] = inputs.lines(
        io.BufferedReader(source, 8192), LineShape(format="prompts")
    )
    for _ in range(10_000):
        last = next(lines)
    assert last.ends_at == 90_000
    assert source.given < 90_000 + 2 * 8192


# --- pace ---


def simulated(
    pace: Pace, rate_of, seconds: float, *, answer: float = 1.0, slots: int = 10_000
) -> Pace:
    """A server that makes ``rate_of(in flight)`` answers a second, noise included, until ``seconds``."""
    draw = random.Random(7)
    now = 0.0
    while now < seconds:
        in_flight = pace.allowed(now)
        if in_flight > slots:
            pace.refused(now, in_flight, answer)
        if in_flight == 0:
            now = max(now + 0.01, pace.paused_until)
            continue
        now += draw.expovariate(rate_of(in_flight))
        pace.finished(now, 10, in_flight)
    return pace


@pytest.mark.parametrize("best", [1, 8, 40, 100, 256])
def test_it_finds_as_many_as_bring_a_gain(best):
    """A server whose rate grows to ``best`` requests and then stays: near all of its rate, without 256 where 16 do."""
    pace = simulated(Pace(), lambda n: 20.0 * min(n, best), 120)
    assert min(pace.limit, best) >= 0.75 * best
    assert pace.limit <= max(4 * best, 32)


def test_it_stays_below_a_number_that_makes_the_server_slower():
    """Where more in flight bring less, it does not stay there."""
    pace = simulated(Pace(), lambda n: 20.0 * n if n <= 32 else 640.0 * (32 / n) ** 2, 120)
    assert 16 <= pace.limit <= 48


def test_a_refusal_cuts_and_waits_as_long_as_it_says():
    """Retry-After is kept; several refusals at once are one; later more is tried again."""
    pace = Pace(limit=64)
    for _ in range(5):
        pace.refused(10.0, 64, 7.0)
    assert pace.limit == 44
    assert (pace.allowed(16.9), pace.allowed(17.1)) == (0, 44)


def test_it_settles_below_what_the_server_refuses():
    """A server with 20 places is not refused again and again."""
    pace = simulated(Pace(), lambda n: 50.0 * n, 120, slots=20)
    assert 8 <= pace.limit <= 30


def test_a_given_number_stays():
    """--concurrency is not changed by rates."""
    assert simulated(Pace(most=3, limit=3, fixed=True), lambda n: 50.0 * n, 60).limit == 3


def snapshot(
    at: float, running: float, waiting: float, *, finished: int = 0, fast: int = 0, slow: int = 0
):
    text = f"""vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:request_success_total{{engine="0",finished_reason="stop"}} {finished}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="1.0"}} {fast}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {fast + slow}
vllm:time_to_first_token_seconds_sum{{engine="0"}} {slow}
"""
    return metrics.parse(text, at_seconds=at)


@pytest.mark.parametrize(
    ("running", "waiting", "own", "steps_back"),
    [
        (20, 0, 20, False),  # ours alone
        (16, 10, 26, False),  # ours alone, of which some wait
        (16, 10, 24, True),  # two of others, and somebody waits
        (16, 0, 10, False),  # others run, nobody waits
        (0, 3, 0, True),
    ],
)
def test_it_steps_back_only_for_others_that_wait(running, waiting, own, steps_back):
    """Our own requests in the queue are not a reason."""
    assert bool(Yielding(1.0).read(snapshot(0, running, waiting), own)) is steps_back


def test_it_steps_back_for_a_long_ttft_where_there_are_others():
    """Of our own requests it may be long."""
    alone, shared = Yielding(1.0), Yielding(1.0)
    for one, own in ((alone, 5), (shared, 3)):
        one.read(snapshot(0, 4, 0), 4)
        one.own_finished = own
    later = snapshot(1, 4, 0, finished=5, fast=4, slow=1)
    assert alone.read(later, 4) is None
    assert "TTFT" in str(shared.read(later, 4))


def test_the_cap_falls_to_nothing_and_comes_back():
    """Halved at each look while others wait, doubled when they do not, then gone."""
    cap, seen = None, []
    for reason in ["wait", "wait", "wait", None, None, None, None]:
        cap = Yielding.cap(cap, 4 if cap is None else cap, 4, reason)
        seen.append(cap)
    assert seen == [2, 1, 0, 1, 2, None, None]


def test_the_journal_names_its_version():
    """What another version wrote is not read as ours."""
    assert json.loads(journal._header("x", ordered=True))["specserve_batch"] == journal.VERSION


# --- the last line ---


def counted(drafts: float, drafted: float, accepted: float, made: float, start: float = 1.0):
    text = f"""vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:generation_tokens_total{{engine="0"}} {made}
process_start_time_seconds {start}
"""
    return metrics.parse(text, at_seconds=0.0)


def outcome(**changes: object) -> BatchOutcome:
    totals = Totals(answered=10, tokens=1000)
    return BatchOutcome(
        **{
            "output": Path("o"),
            "totals": totals,
            "bad_lines": (),
            "made": 10,
            "tokens": 1000,
            "seconds": 10.0,
            "most_in_flight": 4,
            **changes,
        }
    )


@pytest.fixture
def with_profile(tmp_path) -> Loaded:
    cell = {
        "concurrency": 4,
        "baseline_step_seconds": 0.01,
        "speculative_step_seconds": 0.0125,
        "num_speculative_tokens": 3,
    }
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"version": 1, "cells": [cell]}))
    config = tmp_path / "c.yaml"
    config.write_text(
        f"models: {{target_model: {{path: /m}}}}\nspeculative_decoding: {{method: ngram}}\nsidecar: {{benchmark_profile: {profile}}}\n"
    )
    return load(config, environ={})


def test_time_saved_is_estimated_from_a_profile(with_profile):
    """2 tokens a step at 1.25 times the cost: 10 s would have been 16 s without; the profile is named."""
    done = job._compared(
        outcome(), with_profile, counted(0, 0, 0, 0), counted(500, 1500, 500, 1000), 4.0
    )
    assert done.saved_seconds == pytest.approx(6.0)
    assert done.acceptance_rate == pytest.approx(1 / 3)
    said = done.sentence()
    assert said.startswith(
        "10 answered in 10 s, 100 tokens/s with up to 4 in flight; acceptance 33.3 %; about 6 s less"
    )
    assert "estimated from" in said


@pytest.mark.parametrize(
    ("before", "after", "in_flight", "acceptance"),
    [
        (
            counted(0, 0, 0, 0),
            counted(500, 1500, 500, 1000),
            40.0,
            1 / 3,
        ),  # more in flight than was measured
        (counted(9, 9, 9, 9), counted(500, 1500, 500, 1000, start=2.0), 4.0, None),  # started anew
        (None, counted(500, 1500, 500, 1000), 4.0, None),
        (counted(0, 0, 0, 0), counted(0, 0, 0, 1000), 4.0, None),  # nothing drafted
    ],
)
def test_what_is_not_known_is_not_said(with_profile, before, after, in_flight, acceptance):
    """No time saved beyond the profile, no acceptance over a restart of the server."""
    done = job._compared(outcome(), with_profile, before, after, in_flight)
    assert done.saved_seconds is None
    assert done.acceptance_rate == (acceptance and pytest.approx(acceptance))
    assert "than without" not in done.sentence()


def test_tokens_of_others_are_told():
    """The server's counters know no clients."""
    done = job._compared(outcome(), None, counted(0, 0, 0, 0), counted(500, 1500, 500, 3000), 4.0)
    assert "(with 2,000 tokens of others)" in done.sentence()
    assert done.saved_seconds is None


def test_a_run_that_had_nothing_to_do_says_no_rate():
    """After --resume of a finished batch."""
    assert outcome(made=0, tokens=0, seconds=0.0).sentence() == "10 answered (0 of them now)."
