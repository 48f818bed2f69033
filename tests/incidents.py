"""Thirty incidents and their healthy look-alikes in virtual time.

A server of one or more ranks takes requests, each with a length, a kind of text and its draft's acceptance; a step
takes as long as its sequences and prompts make it. An incident changes what brings it about (the requests, a rank's
checkpoint, the machine, the engine's version), never a number that a rule reads.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from specserve.alert.causes import Cause, ServerFacts, find, suspects_output
from specserve.engine.http.metrics import parse
from specserve.metric_families import Readings, key
from specserve.sidecar.baseline import SetupRecord
from specserve.sidecar.changes import Changes
from specserve.sidecar.observer import Observer
from specserve.sidecar.probe import Scrape
from tests.virtual_engine import VirtualEngine

WALL = 1.8e9
WARM_SECONDS, WARM_STEP = 5_400.0, 60.0
INCIDENT_SECONDS, INCIDENT_STEP = 480.0, 15.0
DRAFT_CONTEXT = 4096
POSITIONS = 3


@dataclass(frozen=True)
class Text:
    """One kind of request: how well a good draft predicts it, its lengths, and what of it a pruned vocabulary lacks."""

    first: float = 0.8
    further: float = 0.85
    prompt: float = 400.0
    answer: float = 200.0
    at_limit: float = 0.05
    foreign: float = 0.0
    """Share of its drafts that need tokens which a pruned vocabulary lacks."""


CHAT, CODE = Text(), Text(0.9, 0.92, 900.0, 350.0, 0.1)
CREATIVE = Text(0.5, 0.6, 400.0, 200.0)
"""High temperature: every position loses."""
DOCUMENTS = Text(0.78, 0.84, 12_000.0, 150.0, 0.02)
SUMMARIES = Text(0.55, 0.65, 2_500.0, 60.0, 0.0)
ESSAYS = Text(0.6, 0.7, 150.0, 1_500.0, 0.6)
CHINESE = Text(0.76, 0.82, 420.0, 210.0, foreign=0.8)
USUAL = ((CHAT, 0.7), (CODE, 0.3))


@dataclass
class Rank:
    """One engine: its counters, and what its checkpoint makes of a draft's chances."""

    engine: VirtualEngine
    quality: float = 1.0
    """Of the checkpoint that its draft runs with: 1 as made, 0 another model's."""
    verifies: float = 1.0
    """Part of the right draft tokens that its verification takes."""


@dataclass
class Server:
    """The whole server; incidents change its fields."""

    rng: random.Random
    ranks: list[Rank]
    mix: tuple[tuple[Text, float], ...] = USUAL
    requests_per_second: float = 4.0
    slowness: float = 1.0
    """Of the machine: times the usual step."""
    start: float = 1000.0
    version: str = "0.31"
    pruned: bool = False
    context: int | None = None
    """The draft's own; prompts beyond it are drafted by chance."""
    rank_mix: dict[int, tuple[tuple[Text, float], ...]] = field(default_factory=dict)

    def serve(self, seconds: float) -> None:
        """Some time of traffic."""
        for number, rank in enumerate(self.ranks):
            self._serve(rank, seconds, self.rank_mix.get(number, self.mix))

    def _serve(self, rank: Rank, seconds: float, mix: tuple[tuple[Text, float], ...]) -> None:
        rate = self.requests_per_second / len(self.ranks)
        requests = rate * seconds
        engine, texts = rank.engine, [text for text, _ in mix]
        n = int(requests) + int(self.rng.random() < requests % 1)
        sequences = 0.0
        for text in self.rng.choices(texts, [share for _, share in mix], k=n):
            prompt = text.prompt * self.rng.uniform(0.7, 1.3)
            answer = text.answer * self.rng.uniform(0.7, 1.3)
            rates = self._rates(rank, text, prompt)
            drafts = answer / (1 + sum(rates))
            # The drafts of a few requests are drawn; noise is that of real samples.
            noisy = tuple(min(1.0, max(0.0, self.rng.gauss(r, 0.01))) for r in rates)
            engine.work(drafts=drafts, rates=noisy)
            sequences += drafts
            engine.counters["prompt_tokens"] += prompt
            engine.counters["prefix_cache_queries"] += prompt
            engine.counters["prefix_cache_hits"] += prompt * 0.4
            engine.observe("prompt", prompt)
            engine.observe("generation", answer)
            reason = "length" if self.rng.random() < text.at_limit else "stop"
            engine.finished[reason] += 1
        self._steps(rank, sequences, mix, n)

    def _rates(self, rank: Rank, text: Text, prompt: float) -> tuple[float, ...]:
        """Unconditional acceptance by position."""
        first, further = text.first, text.further
        if self.context is not None and prompt > self.context:
            first, further = 0.25 * first, 0.8 * further
        if self.pruned and text.foreign:
            # Its drafts fail at once where a token lacks; the others are as good as ever.
            first *= 1 - text.foreign
        first *= rank.quality * rank.verifies
        further *= (0.5 + 0.5 * rank.quality) * rank.verifies
        out, kept = [], 1.0
        for position in range(POSITIONS):
            kept *= first if position == 0 else further
            out.append(max(kept, 0.004 * (position == 0)))
        return tuple(out)

    def _steps(
        self, rank: Rank, drafts: float, mix: tuple[tuple[Text, float], ...], n: int
    ) -> None:
        """The steps that this took. A step of b sequences takes 10 ms + 0.6 ms each, and its prompts' tokens."""
        if not drafts:
            return
        engine = rank.engine
        batch = min(64.0, max(1.0, self.requests_per_second / len(self.ranks) * 1.5))
        steps = drafts / batch
        prompts = sum(text.prompt * share for text, share in mix) * n / steps
        seconds = (0.010 + 0.0006 * batch + 0.000_002 * prompts) * self.slowness
        # `work` counts one step for each draft; they share steps of a batch.
        engine.histograms["iteration"] = [0.0] * len(engine.histograms["iteration"])
        self._add_steps(rank, steps)
        engine.observe("itl", seconds, drafts)
        engine.observe("ttft", seconds * 4, n)
        engine.running = batch

    def _add_steps(self, rank: Rank, steps: float) -> None:
        total = self._steps_done.get(id(rank), 0.0) + steps
        self._steps_done[id(rank)] = total
        rank.engine.histograms["iteration"][0] = total

    _steps_done: dict[int, float] = field(default_factory=dict)

    def restart(self, version: str | None = None) -> None:
        """Another process, with counters from zero."""
        self.start += 100_000
        self.version = version or self.version
        self._steps_done.clear()
        for rank in self.ranks:
            rank.engine.reset()

    def text(self) -> str:
        """Its exposition: the ranks' lines, one process start."""
        parts = [rank.engine.text(start=None) for rank in self.ranks]
        return "".join(parts) + f"process_start_time_seconds {self.start}\n"


Disturbance = Callable[[Server], None]
MTP = ServerFacts("mtp")


@dataclass(frozen=True)
class Incident:
    """What happens, and which cause must be named first; ``first`` None is a look-alike in which nothing is wrong."""

    name: str
    first: str | None
    happens: tuple[Disturbance, ...]
    also: tuple[str, ...] = ()
    """Other causes that must be named, in any place."""
    facts: ServerFacts = MTP
    ranks: int = 1
    usual: tuple[tuple[Text, float], ...] = USUAL
    new_setup: bool = False
    """Whether the server comes back with another configuration."""
    named: str = ""
    """A word that the first cause's summary must hold."""
    suspect: bool = False


def _mix(*mix: tuple[Text, float]) -> Disturbance:
    def happen(server: Server) -> None:
        server.mix = mix

    return happen


def _slow(times: float) -> Disturbance:
    def happen(server: Server) -> None:
        server.slowness *= times

    return happen


def _load(times: float) -> Disturbance:
    def happen(server: Server) -> None:
        server.requests_per_second *= times

    return happen


def _restart(version: str | None = None, quality: float = 1.0) -> Disturbance:
    """The engine comes back, perhaps as another version, perhaps with another checkpoint's draft."""

    def happen(server: Server) -> None:
        server.restart(version)
        for rank in server.ranks:
            rank.quality = quality

    return happen


def _damaged(verifies: float, *ranks: int) -> Disturbance:
    """Verification refuses what is right: a defect, or a damaged cache."""

    def happen(server: Server) -> None:
        for number in ranks or range(len(server.ranks)):
            server.ranks[number].verifies = verifies

    return happen


def _other_file(number: int, quality: float) -> Disturbance:
    """One rank runs another checkpoint."""

    def happen(server: Server) -> None:
        server.ranks[number].quality = quality

    return happen


def _routed(number: int, *mix: tuple[Text, float]) -> Disturbance:
    def happen(server: Server) -> None:
        server.rank_mix[number] = mix

    return happen


EAGLE = ServerFacts("eagle3", DRAFT_CONTEXT)
PRUNED = ServerFacts("eagle3", None, 0.25)
BOTH = ServerFacts("eagle3", DRAFT_CONTEXT, 0.25)
LONG_HALF, LONG_MOST = _mix((CHAT, 0.5), (DOCUMENTS, 0.5)), _mix((CHAT, 0.1), (DOCUMENTS, 0.9))
CHINESE_MOST, CHINESE_HALF = _mix((CHINESE, 0.9), (CHAT, 0.1)), _mix((CHINESE, 0.5), (CHAT, 0.5))
CONTEXT, VOCABULARY = "prompts_beyond_draft_context", "pruned_vocabulary"

INCIDENTS = (
    Incident("long prompts, half", CONTEXT, (LONG_HALF,), facts=EAGLE),
    Incident("long prompts, most", CONTEXT, (LONG_MOST,), facts=EAGLE),
    Incident("summaries", "traffic_mix", (_mix((SUMMARIES, 0.9), (CHAT, 0.1)),)),
    Incident("essays", "traffic_mix", (_mix((ESSAYS, 0.9), (CHAT, 0.1)),)),
    Incident("high temperature", "traffic_mix", (_mix((CREATIVE, 0.8), (CHAT, 0.2)),)),
    Incident("Chinese, pruned head", VOCABULARY, (CHINESE_MOST,), facts=PRUNED),
    Incident("half Chinese, pruned head", VOCABULARY, (CHINESE_HALF,), facts=PRUNED),
    Incident("another model's head", "draft_not_applied", (_restart(quality=0.0),)),
    Incident(
        "another head by config", "draft_not_applied", (_restart(quality=0.02),), new_setup=True
    ),
    Incident("upgrade, worse draft", "engine_changed", (_restart("0.32", 0.6),)),
    Incident("restart with an older draft", "engine_changed", (_restart(quality=0.6),)),
    Incident(
        "two ranks, one with another file",
        "rank_differs",
        (_other_file(1, 0.3),),
        ranks=2,
        named="engine 1",
    ),
    Incident(
        "four ranks, one damaged", "rank_differs", (_damaged(0.4, 2),), ranks=4, named="engine 2"
    ),
    Incident("slow machine", "machine_slow", (_slow(1.8),)),
    Incident("very slow machine", "machine_slow", (_slow(4.0),)),
    Incident("damaged verification", "wrong_output", (_damaged(0.1),), suspect=True),
    Incident("half damaged verification", "wrong_output", (_damaged(0.35),), suspect=True),
    # Two at once.
    Incident(
        "long prompts and a slow machine",
        CONTEXT,
        # Prompts of twenty times the length explain the steps as well.
        (LONG_MOST, _slow(2.0)),
        facts=EAGLE,
    ),
    Incident(
        "damaged and slow",
        "wrong_output",
        (_damaged(0.1), _slow(1.6)),
        also=("machine_slow",),
        suspect=True,
    ),
    Incident("damaged under load", "wrong_output", (_damaged(0.2), _load(3)), suspect=True),
    Incident("long prompts under load", CONTEXT, (LONG_HALF, _load(2)), facts=EAGLE),
    Incident(
        "a rank's file and a slow machine",
        "rank_differs",
        (_other_file(0, 0.1), _slow(1.4)),
        also=("machine_slow",),
        ranks=2,
        named="engine 0",
    ),
    Incident("slow under load", "machine_slow", (_slow(3.0), _load(2))),
    Incident("slow after other lengths", "machine_slow", (_slow(3.0), _mix((CODE, 1.0)))),
    Incident("upgrade and load", "engine_changed", (_restart("0.32", 0.6), _load(2))),
    Incident("upgrade, worse and slower", "engine_changed", (_restart("0.32", 0.6), _slow(1.5))),
    Incident("Chinese under load", VOCABULARY, (CHINESE_MOST, _load(2)), facts=PRUNED),
    Incident("Chinese and slow", VOCABULARY, (CHINESE_MOST, _slow(1.5)), ("machine_slow",), PRUNED),
    Incident(
        "a rank's file under load",
        "rank_differs",
        (_other_file(3, 0.2), _load(2)),
        ranks=4,
        named="engine 3",
    ),
    Incident("long prompts with a pruned head", CONTEXT, (LONG_MOST, _load(1.5)), facts=BOTH),
)

HEALTHY = (
    Incident("nothing", None, ()),
    Incident("load", None, (_load(4),)),
    Incident("little traffic", None, (_load(0.2),)),
    Incident("restart", None, (_restart(),)),
    Incident("upgrade", None, (_restart("0.32"),)),
    Incident("code only", None, (_mix((CODE, 1.0)),)),
    Incident("long prompts, no context known", None, (LONG_HALF, _load(0.5))),
    Incident("Chinese, whole vocabulary", None, (_mix((CHINESE, 0.9), (CHAT, 0.1)),)),
    Incident("four equal ranks", None, (_load(2),), ranks=4),
    Incident("always long prompts", None, (), facts=EAGLE, usual=((DOCUMENTS, 0.6), (CHAT, 0.4))),
    Incident("always Chinese", None, (), facts=PRUNED, usual=((CHINESE, 0.6), (CHAT, 0.4))),
    Incident("one rank gets code", None, (_routed(0, (CODE, 1.0)), _load(1.5)), ranks=2),
    Incident("slightly slower", None, (_slow(1.15),)),
)


@dataclass
class Scene:
    """A warm server with its sidecar's memory."""

    server: Server
    observer: Observer
    now: float = 0.0

    def step(self, seconds: float) -> Readings:
        """Serve, then look."""
        self.server.serve(seconds)
        self.now += seconds
        scrape = Scrape("ok", snapshot=parse(self.server.text(), at_seconds=self.now))
        return self.observer.observe(self.now, WALL + self.now, scrape).readings


def warm(incident: Incident, seed: int = 0) -> Scene:
    """Ninety minutes of usual traffic."""
    facts, rng = incident.facts, random.Random(seed)
    ranks = [Rank(VirtualEngine(engine=str(n), positions=POSITIONS)) for n in range(incident.ranks)]
    server = Server(
        rng,
        ranks,
        incident.usual,
        4.0 * incident.ranks,
        pruned=facts.draft_vocabulary_ratio is not None,
        context=facts.draft_context_tokens,
    )
    observer = Observer(
        speculation_configured=True, draft_context_tokens=facts.draft_context_tokens
    )
    scene = Scene(server, observer)
    while scene.now < WARM_SECONDS:
        scene.step(WARM_STEP)
    return scene


def play(incident: Incident, scene: Scene | None = None, seed: int = 0) -> tuple[Cause, ...]:
    """The causes that are named at the end of an incident of eight minutes."""
    scene = scene or warm(incident, seed)
    record = SetupRecord(setup="a", engine_version=scene.server.version)
    changes = Changes(record, "a")
    readings = scene.step(INCIDENT_STEP)
    changes.observe(WALL + scene.now, readings[RESTARTS], scene.server.version)
    for disturbance in incident.happens:
        disturbance(scene.server)
    if incident.new_setup:
        changes = Changes(record, "b")
    end = scene.now + INCIDENT_SECONDS
    while scene.now < end:
        readings = scene.step(INCIDENT_STEP)
        changes.observe(WALL + scene.now, readings[RESTARTS], scene.server.version)
    return find(readings, replace(incident.facts, changes=changes.now(WALL + scene.now)))


RESTARTS = key("specserve_engine_restarts_total")


def is_right(incident: Incident, causes: tuple[Cause, ...]) -> bool:
    """Whether the right cause came first."""
    if incident.first is None:
        return not causes
    if not causes or causes[0].name != incident.first:
        return False
    names = {cause.name for cause in causes}
    return (
        incident.named in causes[0].summary
        and names >= set(incident.also)
        and suspects_output(causes) == incident.suspect
    )


def scenes(seed: int = 0) -> Iterator[tuple[Incident, tuple[Cause, ...]]]:
    """Every incident and look-alike played; those that begin alike share the warm hour and a half."""
    kept: dict[tuple[object, ...], Scene] = {}
    for incident in (*INCIDENTS, *HEALTHY):
        start = (incident.facts, incident.ranks, incident.usual)
        if start not in kept:
            kept[start] = warm(incident, seed)
        yield incident, play(incident, copy.deepcopy(kept[start]))
