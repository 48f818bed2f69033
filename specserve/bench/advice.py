"""The first paragraph of a report: what to do, for a person who reads nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.bench import judge
from specserve.bench.judge import Cell
from specserve.bench.result import Answers, Result, Search

LATER = 1.1
"""A first token that comes more than a tenth later is worth a sentence."""


def conclusion(result: Result, cells: Sequence[Cell]) -> list[str]:
    """What to do, in sentences that name the workload, the load and the factor; what forbids it comes first."""
    wrong = {a.workload for a in result.answers if a.divergent}
    out = [_divergent(a) for a in result.answers if a.divergent]
    failed = judge.failed(result)
    out += [f"Do not turn it on: '{c.arm}' fails {c.name}: {c.message}." for c in failed]
    by_workload = [[c for c in cells if c.workload == w] for w in dict.fromkeys(c.workload for c in cells)]
    for here in sorted(by_workload, key=_best, reverse=True):
        if not failed and here[0].workload not in wrong:
            out.append(_advice(here[0].workload, here))
    out += _within(result)
    unsound = [f"{c.workload} at {c.concurrency}: {w}." for c in cells for w in c.warnings]
    if unsound:
        out += ["No verdict where the measurement is not sound:", *unsound]
    if not result.complete:
        out.append("The benchmark was interrupted; this is what had been measured.")
    return out or ["Nothing was measured in both arms."]


def _divergent(found: Answers) -> str:
    wrong = "are not the target's"
    if found.is_streaming:
        wrong = f"of '{found.arm}' are others when they are streamed"
    return f"Do not turn it on for {found.workload}: {found.divergent} of {found.compared} answers {wrong}."


def _best(cells: Sequence[Cell]) -> float:
    """What speaks most for speculation comes first."""
    return max((c.speedup.value for c in cells if c.speedup), default=0.0)


def _later(cells: Sequence[Cell]) -> str:
    """Faster tokens may hide that the first one comes later (vllm-project/vllm#19996)."""
    worst = max((c for c in cells if c.ttft_ratio), key=lambda c: c.ttft_ratio or 0.0, default=None)
    if worst is None or (worst.ttft_ratio or 0.0) <= LATER:
        return ""
    return f" The first token comes {worst.ttft_ratio:.2f}x as late at {worst.concurrency}."


def _advice(workload: str, cells: Sequence[Cell]) -> str:
    known = [c for c in cells if c.speedup]
    faster = [c for c in known if c.verdict == "faster"]
    slower = [c for c in known if c.verdict == "slower"]
    if faster and not slower:
        top = max(c.concurrency for c in faster)
        open_at = ", ".join(str(c.concurrency) for c in cells if c.verdict in ("inconclusive", "unsound"))
        rest = f" (no verdict at {open_at})" if open_at else ""
        seen = f"{_factors(faster)} faster per token{rest}.{_later(faster)}"
        return f"Turn it on for {workload} up to {top} concurrent requests: {seen}"
    if faster:
        limit = max((c.concurrency for c in faster if c.concurrency < min(s.concurrency for s in slower)), default=None)
        if limit is not None:
            on = [c for c in faster if c.concurrency <= limit]
            return (
                f"Turn it on for {workload} up to {limit} concurrent requests ({_factors(on)}); "
                f"from {min(s.concurrency for s in slower)} on leave it off ({_factors(slower)}). "
                f"In the config: speculative_decoding.max_batch_size: {limit}.{_later(on)}"
            )
    if slower:
        seen = f"{_factors(slower)} (below 1 is slower)"
        return f"Leave it off for {workload}: {seen}. In the config: speculative_decoding.enabled: false."
    if known and all(c.verdict == "no difference" for c in known):
        return f"It makes no difference for {workload} ({_factors(known)})."
    if known:
        return f"Undecided for {workload} ({_factors(known)}), noise hides the effect: raise --repeat or --prompts."
    return f"No verdict for {workload}."


def _factors(cells: Sequence[Cell]) -> str:
    values = sorted(c.speedup.value for c in cells if c.speedup)
    return f"{values[0]:.2f}x" if len(values) == 1 else f"{values[0]:.2f}x to {values[-1]:.2f}x"


def _within(result: Result) -> list[str]:
    """One sentence a workload: the highest load of each arm within the objectives."""
    out = []
    for workload in dict.fromkeys(s.workload for s in result.searches):
        here = [s for s in result.searches if s.workload == workload]
        loads = "; ".join(f"{s.arm} {_load(s)}" for s in sorted(here, key=lambda s: s.arm != result.arms[0].name))
        out.append(f"Within {objectives(here[0])}, {workload}: {loads}.")
    return out


def _load(search: Search) -> str:
    if (best := search.best) is None:
        return "not even one request at once"
    least = "" if search.stop_reason == "converged" else "at least "
    return f"{least}{best.concurrency} requests at once ({best.requests_per_second:.1f}/s)"


def objectives(search: Search) -> str:
    """The objectives of a search, in words."""
    names = (f"{n.replace('_', ' ').upper()} {1000 * s:g} ms" for n, s in search.objectives.items())
    return " and ".join(names)
