"""Verdicts as a document: what a person decides from. Nothing is measured or judged here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from specserve.bench import breakeven
from specserve.bench.advice import conclusion, objectives
from specserve.bench.document import ReportSection, Table
from specserve.bench.judge import ArmCell, BenchCell, BenchVerdict
from specserve.bench.result import Answers, Result, Search
from specserve.bench.stats import Spread, mean
from specserve.units import gib, percent


def document(
    verdicts: Sequence[BenchVerdict], drawn: Sequence[Mapping[str, str]] = ()
) -> list[ReportSection]:
    """The report of one verdict, or of several side by side; ``drawn`` holds the pictures of
    each."""
    pictures = list(drawn) or [{} for _ in verdicts]
    if len(verdicts) == 1:
        return _sections(verdicts[0], pictures[0])
    out = [_comparison(verdicts)]
    for verdict, shown in zip(verdicts, pictures, strict=True):
        out += _sections(verdict, shown, prefix=f"{_name(verdict.result)}: ")
    return out


def _name(result: Result) -> str:
    return f"{result.title or 'result'} ({result.created[:10]})"


def _sections(
    verdict: BenchVerdict, drawn: Mapping[str, str], *, prefix: str = ""
) -> list[ReportSection]:
    result, cells = verdict.result, verdict.cells

    def section(
        title: str, text: Sequence[str], table: Table | None = None, *plots: str
    ) -> ReportSection:
        shown = tuple(drawn[name] for name in plots if name in drawn)
        return ReportSection(prefix + title, tuple(text), table, shown)

    sections = [
        section("In short", conclusion(verdict)),
        section("Speedup", SPEEDUP, _speedups(cells), "speedup", "tpot", "throughput"),
        section("Latency and load", (), _latencies(cells)),
        section("Highest load", _search_text(result.searches), _searches(result.searches)),
        section("Acceptance", _acceptance_text(result), _acceptance(cells), "positions"),
        section("GPU", (), _gpu(result)),
        section("Break-even", BREAK_EVEN, _break_even(verdict), "breakeven"),
        section("Same answers", _answers_text(result), _answers(result.answers)),
        section("How it was measured", _method(result), _arms(result)),
    ]
    return [s for s in sections if s.text or (s.table and s.table.rows)]


def _shown(value: float | None, pattern: str) -> str:
    """A number in a pattern; a dash where there is none.

    >>> _shown(1.234, "{:.2f}x"), _shown(None, "{:.2f}x")
    ('1.23x', '-')
    """
    if value is None:
        return "-"
    return pattern.format(value)


SPEEDUP = (
    (
        "Speedup is the baseline's median TPOT over the speculative one, paired by prompt; "
        "above 1 is faster."
    ),
    (
        "The interval covers other prompts (bootstrap) and the noise between equal blocks, "
        "with 95 % confidence."
    ),
    "TTFT is the speculative median over the baseline's: above 1 the first token comes later.",
)


def _speedups(cells: Sequence[BenchCell]) -> Table:
    head = ("workload", "concurrency", "verdict", "speedup", "95 % interval")
    rows = []
    for c in cells:
        speedup = ("-", "-")
        if c.speedup is not None:
            interval = f"{c.speedup.low:.2f} to {c.speedup.high:.2f}"
            speedup = (f"{c.speedup.value:.2f}x", interval)
        others = (_shown(c.throughput_speedup, "{:.2f}x"), _shown(c.ttft_ratio, "{:.2f}x"))
        ratios = (percent(c.noise), percent(c.speculative.acceptance_rate))
        rows.append((c.workload, str(c.concurrency), c.verdict, *speedup, *others, *ratios))
    return Table((*head, "throughput", "TTFT", "noise", "acceptance"), tuple(rows))


def _latencies(cells: Sequence[BenchCell]) -> Table:
    load = ("workload", "concurrency", "arm")
    times = ("TTFT P50/P90/P99 ms", "TPOT P50/P90/P99 ms", "e2e P50/P99 s")
    rows = []
    for c in cells:
        for arm in (c.baseline, c.speculative):
            whole = "-"
            if arm.e2e is not None:
                whole = f"{arm.e2e.p50:.2f} / {arm.e2e.p99:.2f}"
            rates = (f"{arm.requests_per_second:.2f}", f"{arm.output_tokens_per_second:.1f}")
            hits, errors = percent(arm.prefix_cache_hit_ratio), f"{arm.errors} of {arm.requests}"
            latencies = (_ms(arm.ttft), _ms(arm.tpot), whole)
            rows.append((c.workload, str(c.concurrency), arm.arm, *latencies, *rates, hits, errors))
    return Table(
        (*load, *times, "requests/s", "output tokens/s", "prefix hits", "errors"), tuple(rows)
    )


def _ms(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{seconds * 1000:.1f}" for seconds in (spread.p50, spread.p90, spread.p99))


def _acceptance_text(result: Result) -> list[str]:
    others = [b.foreign_tokens for b in result.blocks]
    used, unknown = sum(1 for n in others if n), others.count(None)
    said = [
        (
            "Acceptance rate is accepted over drafted tokens; "
            "mean acceptance length is 1 + accepted over drafts."
        )
    ]
    if used:
        blocks = f"In {used} of {len(others)} blocks"
        said.append(f"{blocks} somebody else used the server: there it is unknown.")
    if unknown:
        blocks = f"In {unknown} of {len(others)} blocks"
        said.append(f"{blocks} it is not known whether somebody else used the server.")
    if not used and not unknown:
        said.append("From the engine's counters over each block; nobody else used the server.")
    return said


def _acceptance(cells: Sequence[BenchCell]) -> Table:
    known = [c for c in cells if c.speculative.acceptance_rate is not None]
    return Table(
        ("workload", "concurrency", "acceptance rate", "mean acceptance length", "by position"),
        tuple((c.workload, str(c.concurrency), *_accepted(c.speculative)) for c in known),
    )


def _accepted(arm: ArmCell) -> tuple[str, str, str]:
    return (
        percent(arm.acceptance_rate),
        _shown(arm.mean_acceptance_length, "{:.2f}"),
        " / ".join(percent(p) for p in arm.acceptance_per_position) or "-",
    )


def _gpu(result: Result) -> Table:
    """Means of the blocks of each arm and load; empty without a GPU."""
    measured: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for b in result.blocks:
        if b.gpu:
            measured.setdefault((b.workload, str(b.concurrency), b.arm), []).append(b.gpu)
    rows = []
    for key, blocks in measured.items():
        use, power, memory = (
            mean([block[name] for block in blocks if name in block])
            for name in ("utilization_ratio", "power_watts", "memory_used_bytes")
        )
        held = "-"
        if memory is not None:
            held = gib(memory)
        rows.append((*key, percent(use), _shown(power, "{:.0f}"), held))
    head = ("workload", "concurrency", "arm", "utilization", "power, W", "memory")
    return Table(head, tuple(rows))


BREAK_EVEN = (
    "The acceptance rate at which a token costs the same in both arms, from their step times.",
    "Below it speculation loses at that load.",
)


def _break_even(verdict: BenchVerdict) -> Table:
    rows = []
    for concurrency, step in breakeven.profile(verdict).cells:
        here = [c.speculative for c in verdict.cells if c.concurrency == concurrency]
        measured = mean([a.acceptance_rate for a in here if a.acceptance_rate is not None])
        limit = "never pays"
        if step.break_even is not None:
            limit = percent(step.break_even)
        off, on = step.off_seconds, step.on_seconds
        times = (f"{off * 1000:.1f}", f"{on * 1000:.1f}")
        rows.append((f"{concurrency:.0f}", *times, limit, percent(measured)))
    head = ("concurrency", "step off, ms", "step on, ms")
    return Table((*head, "break-even acceptance", "measured acceptance"), tuple(rows))


def _search_text(searches: Sequence[Search]) -> list[str]:
    if not searches:
        return []
    met = f"99 % of the requests meet {objectives(searches[0])}"
    return [
        (
            f"Searched by guidellm: the most requests at once at which {met}. "
            "Every load it tried is in result.json."
        )
    ]


def _searches(searches: Sequence[Search]) -> Table:
    head = ("workload", "arm", "requests at once", "requests/s", "TTFT P99 ms", "TPOT P99 ms")
    rows = []
    for found in searches:
        best = found.best
        shown: tuple[str, ...] = ("none", *"----")
        if best is not None:
            enough = "yes"
            if not best.is_certain:
                enough = f"no, {best.requests} requests are too few: raise --slo-seconds"
            latencies = [
                _shown(seconds and seconds * 1000, "{:.1f}")
                for seconds in (best.ttft_p99_seconds, best.tpot_p99_seconds)
            ]
            shown = (str(best.concurrency), f"{best.requests_per_second:.2f}", *latencies, enough)
        rows.append((found.workload, found.arm, *shown))
    return Table((*head, "sure"), tuple(rows))


def _answers_text(result: Result) -> list[str]:
    checks = [f"Under a JSON Schema, '{c.arm}': {c.status}, {c.message}." for c in result.checks]
    if not result.answers:
        return checks
    return [
        "Greedy answers of both arms, and of each arm streamed and in one piece.",
        "Where the target itself is undecided (near-tie), a difference is numeric.",
        "Divergent answers are ones that the target would not have given.",
        *checks,
    ]


def _answers(answers: Sequence[Answers]) -> Table:
    rows = []
    for a in answers:
        what = "both arms"
        if a.is_streaming:
            what = f"{a.arm}: streamed, in one piece"
        counts = (a.compared, a.identical, a.near_ties, a.divergent, a.unscored, a.repeat_differs)
        shown = (_shown(n, "{}") for n in counts)
        rows.append((a.workload, what, *shown, percent(a.common_prefix_ratio)))
    head = ("workload", "what", "compared", "identical", "near-ties", "divergent", "not scored")
    return Table((*head, "differs from itself", "part after"), tuple(rows))


def _method(result: Result) -> list[str]:
    machine = result.machine
    gpus = ", ".join(machine.gpus) or "no GPU"
    memory = ""
    if machine.memory_bytes is not None:
        memory = f", {gib(machine.memory_bytes)}"
    cores = _shown(machine.cores, "{}").replace("-", "?")
    engine = result.engine or "engine unknown"
    return [
        f"specserve {result.specserve_version}, {engine}, {result.created}.",
        f"Machine: {cores} cores{memory}, {gpus}, {machine.system}.",
        f"Order: {'; '.join(_order(result))}.",
    ]


def _order(result: Result) -> Iterator[str]:
    """Starts, stops, and how many blocks of which arm lay between them; each block is in the
    result."""
    block = re.compile(r"block \d+: (.+) \S+ x\d+")
    for what, labels in itertools.groupby(result.order, lambda label: block.sub(r"of \1", label)):
        if what.startswith("of "):
            count = len(list(labels))
            yield f"{count} block{'s' * (count > 1)} {what}"
        else:
            yield what


def _arms(result: Result) -> Table:
    rows = []
    for arm in result.arms:
        ready = ", ".join(f"{seconds:.0f}" for seconds in arm.ready_seconds) or "already ran"
        config = "; ".join(f"{key}={value}" for key, value in arm.config.items())
        rows.append((arm.name, ready, _shown(arm.kv_cache_tokens, "{:,}"), config))
    return Table(("arm", "ready after, s", "KV cache tokens", "configuration"), tuple(rows))


def _comparison(verdicts: Sequence[BenchVerdict]) -> ReportSection:
    found = [{(c.workload, c.concurrency): c for c in v.cells} for v in verdicts]
    rows = []
    for key in sorted({k for cells in found for k in cells}):
        shown = []
        for cells in found:
            cell = cells.get(key)
            if cell is None or cell.speedup is None:
                shown.append("-")
            else:
                shown.append(f"{cell.speedup.value:.2f}x {cell.verdict}")
        rows.append((key[0], str(key[1]), *shown))
    head = ("workload", "concurrency", *(_name(v.result) for v in verdicts))
    return ReportSection(
        "Side by side",
        ("Speedup of each result in the cells that they share.",),
        Table(head, tuple(rows)),
    )
