"""The engine's exposition text: every version, several engines, and everything that can be wrong with it."""

from __future__ import annotations

import math

import pytest

from specserve.engine.http.metrics import (
    MAX_BYTES,
    MAX_LINES,
    MAX_REASONS,
    MAX_SERIES,
    MetricsError,
    parse,
)
from tests.virtual_engine import STYLES, VirtualEngine


def engine(**given: object) -> VirtualEngine:
    """One engine after 100 drafts of three tokens."""
    virtual = VirtualEngine(**given)  # type: ignore[arg-type]
    virtual.running, virtual.waiting, virtual.kv_usage = 4, 2, 0.25
    virtual.counters["prefix_cache_queries"], virtual.counters["prefix_cache_hits"] = 80.0, 20.0
    virtual.work(drafts=100, rates=(0.9, 0.6, 0.3), requests=7, plain=5)
    virtual.observe("itl", 0.015, 10)
    return virtual


@pytest.mark.parametrize("style", STYLES)
def test_every_version_says_the_same(style: str) -> None:
    """Tokens, requests, gauges and gaps are read alike from the names of every version, and counted once."""
    seen = parse(engine().text(style), at_seconds=5.0)
    assert seen.at_seconds == 5.0
    assert seen.total("draft_tokens") == 300
    assert seen.total("accepted_tokens") == 180
    assert seen.total("generation_tokens") == 285
    assert seen.total("running") == 4
    assert seen.total("waiting") == 2
    assert seen.kv_cache_usage_ratio == 0.25
    assert seen.finished_requests == 7
    assert seen.total("steps") == 105
    assert seen.engines[0].histograms["inter_token_latency"].count == 10
    assert seen.engines[0].histograms["inter_token_latency"].sum == pytest.approx(0.15)
    assert seen.speculates


@pytest.mark.parametrize("style", [s for s in STYLES if s != "0.8-v0"])
def test_v1_engines_count_drafts_positions_and_the_prefix_cache(style: str) -> None:
    """What V0 did not have is read wherever it exists; a thing under two names is not counted twice."""
    seen = parse(engine().text(style), at_seconds=0.0)
    assert seen.total("drafts") == 100
    assert seen.accepted_per_position == (90, 60, 30)
    assert (seen.total("prefix_cache_queries"), seen.total("prefix_cache_hits")) == (80, 20)


def test_what_is_not_said_is_none_not_zero() -> None:
    """An engine without speculation, without positions and without a start time leaves all of them out."""
    seen = parse(engine(positions=0).text(start=None), at_seconds=0.0)
    assert seen.total("drafts") is None
    assert seen.accepted_per_position is None
    assert seen.process_start_seconds is None
    assert seen.http is None
    assert seen.cache_tokens is None
    assert not seen.speculates


def test_data_parallel_engines_add_up() -> None:
    """Counters of ranks add up, the KV cache is that of the fullest, names are listed."""
    text = "".join(engine(engine=str(i), model=f"m{i % 2}").text(start=None) for i in range(4))
    seen = parse(text, at_seconds=0.0)
    assert len(seen.engines) == 4
    assert seen.total("draft_tokens") == 1200
    assert seen.accepted_per_position == (360, 240, 120)
    assert seen.kv_cache_usage_ratio == 0.25
    assert {sample.model_name for sample in seen.engines} == {"m0", "m1"}


def test_several_api_servers() -> None:
    """Of gauges repeated by pid the largest counts; counters by pid add up."""
    labels = 'model_name="m",engine="0"'
    text = (
        f'vllm:num_requests_running{{{labels},pid="1"}} 0.0\nvllm:num_requests_running{{{labels},pid="2"}} 9.0\n'
        f'vllm:generation_tokens_total{{{labels},pid="1"}} 10\nvllm:generation_tokens_total{{{labels},pid="2"}} 5\n'
    )
    seen = parse(text, at_seconds=0.0)
    assert (seen.total("running"), seen.total("generation_tokens")) == (9, 15)


def test_http_statuses_become_classes() -> None:
    """Status codes and classes of all handlers add up."""
    text = engine().text(http={"200": 5, "2xx": 3, "404": 2, "500": 1})
    assert parse(text, at_seconds=0.0).http == {"2xx": 8, "4xx": 2, "5xx": 1}


CACHE = 'vllm:cache_config_info{{block_size="16",engine="{e}",num_gpu_blocks="{n}"{own}}} 1.0\n'
"""What the label says in 0.32: blocks of all engines under each, tokens of one engine."""


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        ([(0, "50000", "400000")], 400_000),  # hybrid: blocks times block size would be 800,000
        ([(0, "50000", "400000"), (1, "50000", "400000")], 800_000),
        ([(0, "50000", "400000"), (0, "50000", "400000")], 400_000),  # one engine, listed twice
        ([(0, "100", None)], 1600),
        ([(0, "100", "None")], 1600),
        ([(0, "200", None), (1, "200", None)], 3200),  # 200 is already the sum of both
        ([(0, "100", None), (1, "50", None)], 2400),
        ([(0, "None", "None")], None),
        ([], None),
    ],
)
def test_cache_size_is_the_engines_own_count(
    lines: list[tuple[int, str, str | None]], tokens: int | None
) -> None:
    """Tokens as the engine counts them, each rank once; blocks times block size only without."""
    text = engine().text()
    for number, blocks, own in lines:
        label = ""
        if own is not None:
            label = f',kv_cache_size_tokens="{own}"'
        text += CACHE.format(e=number, n=blocks, own=label)
    assert parse(text, at_seconds=0.0).cache_tokens == tokens


def test_nan_is_unknown() -> None:
    """A NaN or an infinite gauge is left out, the rest is read."""
    labels = 'engine="0",model_name="m"'
    text = f"vllm:kv_cache_usage_perc{{{labels}}} NaN\nvllm:num_requests_running{{{labels}}} 1\n"
    seen = parse(text, at_seconds=0.0)
    assert seen.kv_cache_usage_ratio is None
    assert seen.total("running") == 1


def test_a_histogram_without_its_last_bucket_is_left_out() -> None:
    """Half of a histogram would give wrong quantiles."""
    text = "\n".join(line for line in engine().text().split("\n") if 'le="+Inf"' not in line)
    assert parse(text, at_seconds=0.0).engines[0].histograms == {}


def test_bounds_end_with_infinity() -> None:
    """Buckets come sorted, cumulative, the last one infinite."""
    histogram = parse(engine().text(), at_seconds=0.0).engines[0].histograms["inter_token_latency"]
    assert histogram.bounds[-1] == math.inf
    assert list(histogram.bounds) == sorted(histogram.bounds)
    assert list(histogram.counts) == sorted(histogram.counts)


def test_label_values_may_hold_anything() -> None:
    """Braces, spaces, escaped quotes and commas in a model's name, and a timestamp after the value."""
    text = 'vllm:num_requests_running{engine="0",model_name="a} b, \\"c\\" {d"} 2.0 1700000000000\n'
    seen = parse(text, at_seconds=0.0)
    assert [sample.model_name for sample in seen.engines] == ['a} b, "c" {d']
    assert seen.total("running") == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "none of vLLM's metrics"),
        ("<html>502 Bad Gateway</html>\n", "none of vLLM's metrics"),
        ("go_goroutines 12\n", "none of vLLM's metrics"),
        ('vllm:num_requests_running{engine="0"} 1', "cut off"),
        ('vllm:num_requests_running{engine="0"} one\n', "cannot read this line"),
        ('vllm:num_requests_running{engine="0" 1\n', "cannot read this line"),
        ('vllm:num_requests_running{engine="0"}\n', "cannot read this line"),
        (
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"} 1\n',
            "cannot read this line",
        ),
        ("x" * (MAX_BYTES + 1), "at most"),
        ("a 1\n" * (MAX_LINES + 1), "at most"),
    ],
    ids=[
        "empty",
        "html",
        "other",
        "cut",
        "no-number",
        "open-brace",
        "no-value",
        "no-position",
        "large",
        "long",
    ],
)
def test_useless_texts_are_refused(text: str, says: str) -> None:
    """Each with a sentence; none is taken for an idle engine."""
    with pytest.raises(MetricsError, match=says):
        parse(text, at_seconds=0.0)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.77, 0.9])
def test_half_a_body_is_never_a_smaller_engine(share: float) -> None:
    """A text that ends in the middle of a line is refused, so a cut number cannot look like a reset."""
    whole = engine().text()
    cut = whole[: int(len(whole) * share)].rstrip("\n")
    with pytest.raises(MetricsError, match="cut off"):
        parse(cut, at_seconds=0.0)


POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@pytest.mark.parametrize("position", ["999999999", "1024", "-5", "1_0", "٣", "", " 1", "1.0"])
def test_a_position_that_no_draft_has_is_refused(position: str) -> None:
    """A damaged label must neither cost memory nor be read as another number."""
    text = engine().text() + f'{POSITION}{{engine="0",model_name="m",position="{position}"}} 1\n'
    with pytest.raises(MetricsError, match="cannot read this line"):
        parse(text, at_seconds=0.0)


@pytest.mark.parametrize("value", ["-1", "1e308", "-1e300", "1e19"])
@pytest.mark.parametrize(
    ("series", "name"),
    [
        ("vllm:num_requests_running", "running"),
        ("vllm:num_requests_waiting", "waiting"),
        ("vllm:generation_tokens_total", "generation_tokens"),
        ("vllm:kv_cache_usage_perc", "kv_cache_usage_ratio"),
    ],
)
def test_a_number_that_cannot_be_meant_is_not_believed(series: str, name: str, value: str) -> None:
    """Negative requests and 309 digits are a fault of the engine's; the thing counts as unknown."""
    others = 'vllm:num_preemptions_total{engine="0",model_name="m"} 1\n'
    seen = parse(f'{others}{series}{{engine="0",model_name="m"}} {value}\n', at_seconds=0.0)
    assert seen.total(name) is None


@pytest.mark.parametrize("value", ["1_000", "٣", "0x10"])
def test_numbers_are_written_in_ascii(value: str) -> None:
    """What Python alone would read as a number is a damaged line."""
    with pytest.raises(MetricsError, match="cannot read this line"):
        parse(f'vllm:num_requests_running{{engine="0",model_name="m"}} {value}\n', at_seconds=0.0)


def test_reasons_without_end_are_counted_together() -> None:
    """Every request counts, and what is kept stays small however many reasons an engine makes up."""
    lines = [
        f'vllm:request_success_total{{engine="0",finished_reason="r{i}",model_name="m"}} 1\n'
        for i in range(5_000)
    ]
    seen = parse("".join(lines), at_seconds=0.0)
    assert seen.finished_requests == 5_000
    finished = seen.engines[0].finished
    assert finished is not None
    assert len(finished) <= MAX_REASONS + 1
    assert finished["other"] > 4_000


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{{engine="{i}",model_name="m"}} 1\n',
        'vllm:num_requests_running{{engine="0",model_name="m{i}"}} 1\n',
        'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{i}",model_name="m"}} 1\n',
    ],
    ids=["engines", "models", "buckets"],
)
def test_series_without_end_are_refused(line: str) -> None:
    """No engine has thousands of ranks, models or buckets."""
    with pytest.raises(MetricsError, match="cannot read this line"):
        parse("".join(line.format(i=i) for i in range(MAX_SERIES + 1)), at_seconds=0.0)


def test_a_name_of_a_megabyte_is_refused() -> None:
    """Labels are exported again; one that is no name is not."""
    with pytest.raises(MetricsError, match="cannot read this line"):
        parse(
            f'vllm:num_requests_running{{engine="{"1" * 1_000_000}",model_name="m"}} 1\n',
            at_seconds=0.0,
        )
