"""A result as a document: what a person decides from. Measures nothing; judges by :mod:`specserve.bench.judge`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from specserve.bench import breakeven, judge
from specserve.bench.advice import conclusion, objectives
from specserve.bench.document import Part, Table
from specserve.bench.judge import ArmCell, Cell
from specserve.bench.result import Answers, Check, Result, Search
from specserve.bench.stats import Spread
from specserve.units import gib, percent


def document(results: Sequence[Result], drawn: Sequence[Mapping[str, str]] = ()) -> list[Part]:
    """The report of one result of two arms, or of several side by side; ``drawn`` holds the pictures of each."""
    pictures = list(drawn) or [{} for _ in results]
    if len(results) == 1:
        return _parts(results[0], pictures[0], prefix="")
    each = [_parts(r, p, prefix=f"{_name(r)}: ") for r, p in zip(results, pictures, strict=True)]
    return [_comparison(results), *itertools.chain.from_iterable(each)]


def _name(result: Result) -> str:
    return f"{result.title or 'result'} ({result.created[:10]})"


def _parts(result: Result, drawn: Mapping[str, str], prefix: str) -> list[Part]:
    cells = judge.cells(result)

    def plots(*names: str) -> tuple[str, ...]:
        return tuple(drawn[name] for name in names if name in drawn)

    parts = [
        Part(f"{prefix}In short", tuple(conclusion(result, cells))),
        Part(
            f"{prefix}Speedup",
            _speedup_text(),
            _speedups(cells),
            plots("speedup", "tpot", "throughput"),
        ),
        Part(f"{prefix}Latency and load", (), _latencies(cells)),
        Part(
            f"{prefix}Highest load",
            tuple(_search_text(result.searches)),
            _searches(result.searches),
        ),
        Part(
            f"{prefix}Acceptance", _acceptance_text(result), _acceptance(cells), plots("positions")
        ),
        Part(f"{prefix}GPU", (), _gpu(result)),
        Part(
            f"{prefix}Break-even",
            _break_even_text(),
            _break_even(result, cells),
            plots("breakeven"),
        ),
        Part(f"{prefix}Same answers", tuple(_answers_text(result)), _answers(result.answers)),
        Part(f"{prefix}How it was measured", tuple(_method(result)), _arms(result)),
    ]
    return [p for p in parts if p.text or (p.table and p.table.rows)]


def _speedup_text() -> tuple[str, ...]:
    return (
        "Speedup is the baseline's median TPOT over the speculative one, paired by prompt; above 1 is faster.",
        "The interval covers other prompts (bootstrap) and the noise between equal blocks, with 95 % confidence.",
        "TTFT is the speculative median over the baseline's: above 1 the first token comes later.",
    )


def _speedups(cells: Sequence[Cell]) -> Table:
    return Table(
        (
            "workload",
            "concurrency",
            "verdict",
            "speedup",
            "95 % interval",
            "throughput",
            "TTFT",
            "noise",
            "acceptance",
        ),
        tuple(
            (
                c.workload,
                str(c.concurrency),
                c.verdict,
                f"{c.speedup.value:.2f}x" if c.speedup else "-",
                f"{c.speedup.low:.2f} to {c.speedup.high:.2f}" if c.speedup else "-",
                f"{c.throughput_speedup:.2f}x" if c.throughput_speedup else "-",
                f"{c.ttft_ratio:.2f}x" if c.ttft_ratio else "-",
                percent(c.noise),
                percent(c.speculative.acceptance_rate),
            )
            for c in cells
        ),
    )


def _latencies(cells: Sequence[Cell]) -> Table:
    head = (
        "workload",
        "concurrency",
        "arm",
        "TTFT P50/P90/P99 ms",
        "TPOT P50/P90/P99 ms",
        "e2e P50/P99 s",
    )
    return Table(
        (*head, "requests/s", "output tokens/s", "prefix hits", "errors"),
        tuple(
            (
                c.workload,
                str(c.concurrency),
                arm.arm,
                _ms(arm.ttft),
                _ms(arm.tpot),
                f"{arm.e2e.p50:.2f} / {arm.e2e.p99:.2f}" if arm.e2e else "-",
                f"{arm.requests_per_second:.2f}",
                f"{arm.output_tokens_per_second:.1f}",
                percent(arm.prefix_cache_hit_ratio),
                f"{arm.errors} of {arm.requests}",
            )
            for c in cells
            for arm in (c.baseline, c.speculative)
        ),
    )


def _ms(spread: Spread | None) -> str:
    return (
        "-"
        if spread is None
        else " / ".join(f"{v * 1000:.1f}" for v in (spread.p50, spread.p90, spread.p99))
    )


def _acceptance_text(result: Result) -> tuple[str, ...]:
    others = [b.foreign_tokens for b in result.blocks]
    used, unknown = sum(1 for n in others if n), others.count(None)
    said = (
        [f"In {used} of {len(others)} blocks somebody else used the server: there it is unknown."]
        if used
        else []
    )
    if unknown:
        said.append(
            f"In {unknown} of {len(others)} blocks it is not known whether somebody else used the server."
        )
    return (
        "Acceptance rate is accepted over drafted tokens; mean acceptance length is 1 + accepted over drafts.",
        *(said or ["From the engine's counters over each block; nobody else used the server."]),
    )


def _acceptance(cells: Sequence[Cell]) -> Table:
    known = [c for c in cells if c.speculative.acceptance_rate is not None]
    return Table(
        ("workload", "concurrency", "acceptance rate", "mean acceptance length", "by position"),
        tuple((c.workload, str(c.concurrency), *_accepted(c.speculative)) for c in known),
    )


def _accepted(arm: ArmCell) -> tuple[str, str, str]:
    return (
        percent(arm.acceptance_rate),
        f"{arm.mean_acceptance_length:.2f}" if arm.mean_acceptance_length else "-",
        " / ".join(percent(p) for p in arm.acceptance_per_position) or "-",
    )


def _gpu(result: Result) -> Table:
    """Means of the blocks of each arm and load; empty without a GPU."""
    rows = []
    for key in dict.fromkeys((b.workload, b.concurrency, b.arm) for b in result.blocks if b.gpu):
        here = [b.gpu for b in result.blocks if (b.workload, b.concurrency, b.arm) == key and b.gpu]
        means = {
            n: [g[n] for g in here if n in g]
            for n in ("utilization_ratio", "power_watts", "memory_used_bytes")
        }
        use, power, memory = (sum(v) / len(v) if v else None for v in means.values())
        shown = (
            percent(use),
            "-" if power is None else f"{power:.0f}",
            "-" if memory is None else gib(memory),
        )
        rows.append((key[0], str(key[1]), key[2], *shown))
    return Table(
        ("workload", "concurrency", "arm", "utilization", "power, W", "memory"), tuple(rows)
    )


def _break_even_text() -> tuple[str, ...]:
    return (
        "The acceptance rate at which a token costs the same in both arms, from their step times.",
        "Below it speculation loses at that load.",
    )


def _break_even(result: Result, cells: Sequence[Cell]) -> Table:
    rows = []
    for step in breakeven.step_times(result):
        rates = [c.speculative.acceptance_rate for c in cells if c.concurrency == step.concurrency]
        found = [r for r in rates if r is not None]
        limit = step.break_even_acceptance
        rows.append(
            (
                str(step.concurrency),
                f"{step.baseline_step_seconds * 1000:.1f}",
                f"{step.speculative_step_seconds * 1000:.1f}",
                percent(limit) if limit <= 1 else "never pays",
                percent(sum(found) / len(found)) if found else "-",
            )
        )
    return Table(
        (
            "concurrency",
            "step off, ms",
            "step on, ms",
            "break-even acceptance",
            "measured acceptance",
        ),
        tuple(rows),
    )


def _search_text(searches: Sequence[Search]) -> list[str]:
    if not searches:
        return []
    met = f"99 % of the requests meet {objectives(searches[0])}"
    return [
        f"Searched by guidellm: the most requests at once at which {met}. Every load it tried is in result.json."
    ]


def _searches(searches: Sequence[Search]) -> Table:
    head = (
        "workload",
        "arm",
        "requests at once",
        "requests/s",
        "TTFT P99 ms",
        "TPOT P99 ms",
        "sure",
    )
    rows = []
    for found in searches:
        shown: tuple[str, ...] = ("none", *"----")
        if (best := found.best) is not None:
            enough = (
                "yes"
                if best.is_certain
                else f"no, {best.requests} requests are too few: raise --slo-seconds"
            )
            latencies = (
                "-" if t is None else f"{t * 1000:.1f}"
                for t in (best.ttft_p99_seconds, best.tpot_p99_seconds)
            )
            shown = (str(best.concurrency), f"{best.requests_per_second:.2f}", *latencies, enough)
        rows.append((found.workload, found.arm, *shown))
    return Table(head, tuple(rows))


def _answers_text(result: Result) -> list[str]:
    told = [_check(c) for c in result.checks]
    if not result.answers:
        return told
    return [
        "Greedy answers of both arms, and of each arm streamed and in one piece.",
        "Where the target itself is undecided (near-tie), a difference is numeric.",
        "Divergent answers are ones that the target would not have given.",
        *told,
    ]


def _check(check: Check) -> str:
    return f"Under a JSON Schema, '{check.arm}': {check.status}, {check.message}."


def _answers(answers: Sequence[Answers]) -> Table:
    return Table(
        (
            "workload",
            "what",
            "compared",
            "identical",
            "near-ties",
            "divergent",
            "not scored",
            "differs from itself",
            "part after",
        ),
        tuple(
            (
                a.workload,
                f"{a.arm}: streamed, in one piece" if a.is_streaming else "both arms",
                *(str(n) for n in (a.compared, a.identical, a.near_ties, a.divergent, a.unscored)),
                "-" if a.repeat_differs is None else str(a.repeat_differs),
                percent(a.common_prefix_ratio),
            )
            for a in answers
        ),
    )


def _method(result: Result) -> list[str]:
    machine = result.machine
    gpus = ", ".join(machine.get("gpus") or []) or "no GPU"
    memory = f", {gib(machine['memory_bytes'])}" if "memory_bytes" in machine else ""
    return [
        f"specserve {result.specserve_version}, {result.engine or 'engine unknown'}, {result.created}.",
        f"Machine: {machine.get('cores', '?')} cores{memory}, {gpus}, {machine.get('system', '')}.",
        f"Order: {'; '.join(_order(result))}.",
    ]


def _order(result: Result) -> Iterator[str]:
    """Starts, stops, and how many blocks of which arm lay between them; each block stands in the result."""
    block = re.compile(r"block \d+: (.+) \S+ x\d+")
    for what, labels in itertools.groupby(result.order, lambda label: block.sub(r"of \1", label)):
        count = len(list(labels))
        yield f"{count} block{'s' * (count > 1)} {what}" if what.startswith("of ") else what


def _arms(result: Result) -> Table:
    return Table(
        ("arm", "ready after, s", "KV cache tokens", "configuration"),
        tuple(
            (
                a.name,
                ", ".join(f"{s:.0f}" for s in a.ready_seconds) or "already ran",
                f"{a.kv_cache_tokens:,}" if a.kv_cache_tokens else "-",
                "; ".join(f"{k}={v}" for k, v in a.config.items()),
            )
            for a in result.arms
        ),
    )


def _comparison(results: Sequence[Result]) -> Part:
    found = [{(c.workload, c.concurrency): c for c in judge.cells(r)} for r in results]
    keys = sorted({k for cells in found for k in cells})
    rows = []
    for workload, concurrency in keys:
        here = [cells.get((workload, concurrency)) for cells in found]
        rows.append(
            (
                workload,
                str(concurrency),
                *(f"{c.speedup.value:.2f}x {c.verdict}" if c and c.speedup else "-" for c in here),
            )
        )
    head = ("workload", "concurrency", *(_name(r) for r in results))
    return Part(
        "Side by side",
        ("Speedup of each result in the cells that they share.",),
        Table(head, tuple(rows)),
    )
