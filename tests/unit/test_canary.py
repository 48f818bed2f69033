"""The canary, and the comparison while serving, against a small HTTP engine whose model is a formula."""

from __future__ import annotations

import itertools
import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specserve.app.sidecar import Watch
from specserve.config.schema import Settings
from specserve.engine.canary import corruption
from specserve.engine.canary import run as canary
from specserve.engine.canary.corruption import Judged
from specserve.engine.http.client import EngineClient, EngineUnreachable
from specserve.metric_families import key
from specserve.sidecar.canaries import Canaries
from specserve.sidecar.launch_state import LaunchState, output_mismatch
from specserve.sidecar.probe import Scrape

WORDS = 97


class Formula(ThreadingHTTPServer):
    """An engine. ``flat``: how often a sampled token is not the best one, as in a model with flat distributions."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.random = random.Random(1)
        self.lists_tokens = self.counts = self.drafts = self.scores = self.has_template = True
        self.flat, self.position0, self.drafts_only_forced = 0.1, 0.8, False
        self.default_position0 = 0.4  # of a request that says nothing about sampling
        self.garbage: set[str] = set()  # kinds of drafted text that are garbage: greedy, sampled
        self.refuses_scores = self.short_context = False
        self.near_ties = (
            False  # drafted greedy text takes the second best where the two are nearly equal
        )
        self.fails = False  # a sampled request with top_k kills the engine
        self.in_flight = self.widest = 0
        self.counters = dict.fromkeys(("drafts", "accepted", "finished"), 0.0)

    def best(self, prefix: list[int]) -> int:
        return (sum(prefix[-3:]) * 7 + 3) % WORDS

    def token(self, prefix: list[int], temperature: float) -> int:
        flat = temperature > 0 and self.random.random() < self.flat * temperature
        return self.random.randrange(WORDS) if flat else self.best(prefix)

    def text(self, prefix: list[int], body: dict) -> list[int]:
        """The first token follows the prefill; the others are drafted."""
        temperature = body.get("temperature", 1.0)
        made = [self.token(prefix, temperature)]
        kind = "sampled" if temperature else "greedy"
        while len(made) < body["max_tokens"]:
            if kind in self.garbage:
                made.append(self.random.randrange(WORDS))
            elif self.near_ties and kind == "greedy" and len(made) % 4 == 0:
                made.append((self.best(prefix + made) + 1) % WORDS)
            else:
                made.append(self.token(prefix + made, temperature))
        if (
            len(made) > 1
            and self.drafts
            and (not self.drafts_only_forced or "allowed_token_ids" in body)
        ):
            drafts = len(made) / 2
            self.counters["drafts"] += drafts
            rate = self.position0 if "temperature" in body else self.default_position0
            self.counters["accepted"] += 0 if kind in self.garbage else drafts * rate
        self.counters["finished"] += 1
        return made

    def score(self, prefix: list[int], token: int) -> dict:
        """The best token, the asked one, and in between what makes it a near-tie."""
        best = self.best(prefix)
        near = self.near_ties and token == (best + 1) % WORDS
        rows = {str(best): {"logprob": -0.1, "rank": 1}}
        return (
            rows
            if token == best
            else rows | {str(token): {"logprob": -0.2 if near else -9.0, "rank": 2}}
        )


class Answer(BaseHTTPRequestHandler):
    """One connection."""

    server: Formula

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        counters = self.server.counters
        lines = [
            f'vllm:request_success_total{{engine="0",finished_reason="length"}} {counters["finished"]}'
        ]
        if self.server.counts:
            lines.append(f'vllm:spec_decode_num_drafts_total{{engine="0"}} {counters["drafts"]}')
            at_0 = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {counters["accepted"]}'
            lines.append(at_0)
        self.send(("\n".join(lines) + "\n").encode())

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = "messages" in body
        if chat and not server.has_template:
            return self.send(b'{"error": "no chat template"}', 400)
        if (
            server.short_context
            and isinstance(body.get("prompt"), str)
            and len(body["prompt"]) > 50
        ):
            return self.send(b'{"error": "maximum context length"}', 400)
        if server.refuses_scores and body.get("prompt_logprobs"):
            return self.send(
                b'{"error": "Requested prompt logprobs of 1, which is greater than max allowed: 0"}',
                400,
            )
        if server.fails and body.get("top_k") and body["max_tokens"] > 1:
            return self.send(b'{"error": "EngineCore encountered an issue"}', 500)
        given = [3, 1, 4] if chat or isinstance(body["prompt"], str) else body["prompt"]
        prompts = given if isinstance(given[0], list) else [given]
        server.in_flight += len(prompts)
        server.widest = max(server.widest, server.in_flight)
        choices = [self.choice(index, list(prompt), body) for index, prompt in enumerate(prompts)]
        server.in_flight -= len(prompts)
        return self.send(json.dumps({"choices": choices}).encode())

    def choice(self, index: int, prompt: list[int], body: dict) -> dict:
        made = self.server.text(prompt, body)
        choice: dict = {"index": index, "text": " ".join(map(str, made)), "finish_reason": "length"}
        if self.server.lists_tokens:
            choice |= {"token_ids": made, "prompt_token_ids": prompt}
        if body.get("prompt_logprobs") and self.server.scores:
            choice["prompt_logprobs"] = [
                self.server.score(prompt[:i], prompt[i]) if i else None for i in range(len(prompt))
            ]
        return choice


@pytest.fixture
def engine() -> Iterator[Formula]:
    """A right engine, to be bent."""
    server = Formula()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def settings(method: str | None = "draft_model", **sections) -> Settings:
    """Settings with this method."""
    draft = {"draft_model": {"path": "d"}} if method == "draft_model" else {}
    spec = {"method": method, "enabled": method is not None} | sections.pop(
        "speculative_decoding", {}
    )
    return Settings(
        models={"target_model": {"path": "t"}, **draft}, speculative_decoding=spec, **sections
    )


def check(engine: Formula, config: Settings | None = None) -> canary.CanaryResult:
    """One canary."""
    client = EngineClient(f"http://127.0.0.1:{engine.server_address[1]}", model="m")
    return canary.run(client, config or settings(), sleep=lambda _: None)


def test_right_engine_passes(engine):
    """Nothing differs from the server without drafts: ok, and position 0 is the counters'."""
    found = check(engine)
    assert (found.verdict, found.reasons, found.position0_acceptance, found.drafts) == (
        "ok",
        (),
        0.8,
        32,
    )
    assert found.default_position0_acceptance == pytest.approx(0.4)


@pytest.mark.parametrize("flat", [0.5, 1.0])
def test_flat_distributions_are_no_corruption(engine, flat):
    """A model that rarely takes its best token does so with and without drafts."""
    engine.flat = flat * 3
    assert [check(engine).verdict for _ in range(3)] == ["ok"] * 3


def test_sampled_garbage_is_proven(engine):
    """Garbage only above temperature 0 is found by the sampled texts."""
    engine.garbage = {"sampled"}
    found = check(engine)
    assert found.verdict == "corrupt"
    assert found.reasons[0].startswith("sampled text is not the target's: ")
    assert found.blocks(settings().engine.canary)
    assert not found.blocks(settings(engine={"canary": {"policy": "warn"}}).engine.canary)


def test_greedy_garbage_is_proven_by_scores(engine):
    """Greedy text that leaves the target's choices is weighed by the target's own scores."""
    engine.garbage = {"greedy"}
    found = check(engine)
    assert found.verdict == "corrupt"
    assert found.reasons[0].startswith("greedy text is not the target's: ")


def test_near_ties_are_no_corruption(engine):
    """Greedy text may take a token that is nearly as good as the best one."""
    engine.near_ties = True
    assert check(engine).verdict == "ok"


@pytest.mark.parametrize("refuses", [False, True])
def test_without_scores_greedy_text_stays_unproven(engine, refuses):
    """Differences that cannot be weighed are said, not guessed at, whether scores are refused or just missing."""
    engine.near_ties, engine.scores, engine.refuses_scores = True, False, refuses
    found = check(engine)
    assert found.verdict == "unproven"
    assert "no scores to weigh it" in found.reasons[0]


def test_engine_that_fails_is_corrupt(engine):
    """An engine that answers 500 to a sampled request must not get ready."""
    engine.fails = True
    found = check(engine)
    assert found.verdict == "corrupt"
    assert found.reasons[0].startswith("the engine failed on a request: ")


def test_nothing_drafted_is_inactive(engine):
    """Speculation that is configured but does not happen is told apart from a bad draft."""
    engine.drafts = False
    found = check(engine)
    assert (found.verdict, found.position0_acceptance, found.drafts) == ("inactive", None, 0)
    assert not found.blocks(settings().engine.canary)
    assert found.blocks(settings(engine={"canary": {"acceptance_policy": "block"}}).engine.canary)


@pytest.mark.parametrize(("forced", "verdict"), [(True, "ok"), (False, "inactive")])
def test_lookup_without_a_match_is_not_inactive(engine, forced, verdict):
    """A lookup method that drafts nothing gets a text that must repeat before it is called inactive."""
    engine.drafts, engine.drafts_only_forced = forced, True
    assert check(engine, settings("ngram")).verdict == verdict


def test_schedule_that_leaves_single_requests_alone_expects_no_drafts(engine):
    """With no drafts at batch size 1, none are missed."""
    engine.drafts = False
    schedule = {"schedule": [[1, 1, 0], [2, 64, 5]]}
    assert check(engine, settings(speculative_decoding=schedule)).verdict == "ok"


def test_low_position0_is_ineffective(engine):
    """Under the floor the draft is named, and the text is still right."""
    engine.position0 = 0.05
    found = check(engine)
    assert (found.verdict, found.position0_acceptance) == ("ineffective", 0.05)
    assert "5.0 % of drafts are accepted at position 0" in found.reasons[0]


def test_target_alone(engine):
    """Without speculation one text is asked for and nothing is compared."""
    engine.counts = False
    found = check(engine, settings(None))
    assert (found.verdict, found.drafts, found.compared_tokens) == ("ok", None, 0)


def test_engine_without_template(engine):
    """No chat template: the raw text is used."""
    engine.has_template = False
    assert check(engine).verdict == "ok"


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_engine_without_counters_does_not_speculate(engine, method):
    """vLLM has the counters from its start: where they are missing, the model is served alone, as nobody asked."""
    engine.counts = False
    found = check(engine, settings(method))
    assert (found.verdict, found.position0_acceptance, found.drafts) == ("inactive", None, 0)


def test_engine_that_lists_no_tokens_is_judged_by_signs(engine):
    """Without tokens, acceptance that collapses only for sampled text proves it; else nothing is proven."""
    engine.lists_tokens = False
    assert check(engine).verdict == "unproven"
    engine.garbage = {"sampled"}
    found = check(engine)
    assert found.verdict == "corrupt"
    assert (
        found.reasons[0]
        == "acceptance at position 0 falls from 80.0 % in greedy text to 0.0 % in sampled text"
    )


def test_short_context_gets_a_short_text(engine):
    """A model whose context has no room for the text is asked to continue a shorter one."""
    engine.has_template, engine.short_context = False, True
    found = check(engine, settings(server={"max_concurrent_requests": 1}))
    assert found.reasons == ()
    assert (found.verdict, found.drafts) == ("ok", 16)


def test_one_request_at_a_time_is_respected(engine):
    """Never more prompts at a time than server.max_concurrent_requests."""
    for limit in (1, 3):
        engine.widest = 0
        assert check(engine, settings(server={"max_concurrent_requests": limit})).verdict == "ok"
        assert engine.widest <= limit


def test_time_that_is_up_leaves_it_unproven(engine):
    """A canary that runs out of time says so."""
    ticks = iter([0.0] * 8 + [1000.0] * 1000)
    client = EngineClient(f"http://127.0.0.1:{engine.server_address[1]}", model="m")
    found = canary.run(client, settings(), clock=lambda: next(ticks), sleep=lambda _: None)
    assert (found.verdict, found.reasons) == ("unproven", (canary.LATE,))


def test_engine_that_is_gone_is_an_error():
    """Nobody answers: that is no verdict."""
    with pytest.raises(EngineUnreachable):
        canary.run(EngineClient("http://127.0.0.1:9", model="m"), settings())


def test_a_request_that_fails_proves_nothing_about_text(engine):
    """An engine that dies answers 500, twice if asked twice: that is no wrong text, and no alert says so."""
    engine.fails = True
    found = check(engine)
    assert (found.verdict, output_mismatch(LaunchState(canary=found))) == ("corrupt", None)
    client = EngineClient(f"http://127.0.0.1:{engine.server_address[1]}", model="m")
    canaries = Canaries(
        client,
        settings(sidecar={"comparison_interval_seconds": 1}),
        alone=True,
        clock=time.monotonic,
        late=lambda: None,
    )
    canaries.compare(math.inf)
    for thread in threading.enumerate():
        if thread.name == "sidecar-comparison":
            thread.join()
    assert canaries.added_to(LaunchState()) == LaunchState()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_canary_that_breaks_off_comes_back_as_no_evidence(engine):
    """A mistake of our own while it runs: as long as none comes back no other is sent, and it must not look like a
    stall."""
    calls = itertools.count()

    def clock() -> float:
        if next(calls) >= 2:
            raise RuntimeError("no clock")
        return 1.0

    client = EngineClient(f"http://127.0.0.1:{engine.server_address[1]}", model="m")
    canaries = Canaries(client, settings(), alone=False, clock=clock, late=lambda: None)
    canaries.send(Scrape("ok"))
    for thread in threading.enumerate():
        if thread.name == "sidecar-canary":
            thread.join()
    back = canaries.collect()
    assert back is not None
    assert (back.outcome.result, back.started_up) == ("refused", False)


def test_readiness_comes_back_when_the_next_comparison_is_right(engine, tmp_path):
    """Wrong text keeps readiness away, and comparing goes on, or nothing but a restart could give it back."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    times = dict.fromkeys(("scrape_interval_seconds", "comparison_interval_seconds"), 0.05)
    config = settings(sidecar={"port": port, **times}, server={"served_model_name": "m"})
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    watch = Watch(config, engine_url=url, state_dir=tmp_path).start()
    try:
        for garbage, mismatch in ((set(), 0), ({"sampled"}, 1), (set(), 0)):
            engine.garbage = garbage
            end = time.monotonic() + 60
            while watch.readings().get(key("specserve_output_mismatch")) != mismatch or watch.probe(
                "ready"
            )["ok"] is bool(mismatch):
                assert time.monotonic() < end, watch.status()["comparison"]
                time.sleep(0.02)
    finally:
        watch.stop()


def test_a_look_that_fails_is_not_the_last(engine, tmp_path, caplog):
    """A mistake in one look is in the log with its traceback, and the next look is taken."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = settings(
        sidecar={"port": port, "scrape_interval_seconds": 0.05}, server={"served_model_name": "m"}
    )
    mistakes = iter(["first", "second"])

    def launch_state():
        for mistake in mistakes:
            raise LookupError(mistake)
        return LaunchState()

    watch = Watch(
        config,
        engine_url=f"http://127.0.0.1:{engine.server_address[1]}",
        state_dir=tmp_path,
        launch_state=launch_state,
    ).start()
    try:
        end = time.monotonic() + 60
        while not watch.probe("ready")["ok"]:
            assert time.monotonic() < end, watch.probe("ready")
            time.sleep(0.02)
    finally:
        watch.stop()
    failed = [r for r in caplog.records if r.getMessage() == "a look at the engine failed"]
    assert [str(r.exc_info[1]) for r in failed] == ["first", "second"]


def test_disagreement_is_exact():
    """McNemar's one-sided binomial tail: 9 misses and 1 hit of 10 that differ is 11/1024; ties count for nothing."""
    missed, hit, tie = Judged((9,), (1,), (1,)), Judged((1,), (1,), (9,)), Judged((1,), (1,), (1,))
    assert corruption.disagreement([missed] * 9 + [hit] + [tie] * 50) == 11 / 1024
    assert corruption.disagreement([tie]) == 1.0


def test_disagreement_rarely_accuses_a_right_sampler():
    """Of 3000 right samplers with random agreement, none is below the threshold."""
    source = random.Random(5)

    def right() -> Judged:
        p = source.random()
        draw = lambda: tuple(int(source.random() > p) for _ in range(96))  # noqa: E731
        return Judged(draw(), (0,) * 96, draw())

    assert min(corruption.disagreement([right()]) for _ in range(3000)) > corruption.FALSE_ALARM
