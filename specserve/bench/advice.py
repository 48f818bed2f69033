"""The first paragraph of a report: what to do, for a person who reads nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.bench import judge
from specserve.bench.judge import Cell
from specserve.bench.result import Answers, Result, Search
from specserve.config.speculation import SpeculativeDecoding
from specserve.engine.command.args import WIDEST_STEP

LATER = 1.1
"""A first token that comes more than a tenth later is worth a sentence."""
MORE = "add blocks with --resume and a higher --repeat"


def conclusion(result: Result, cells: Sequence[Cell]) -> list[str]:
    """What to do, in sentences that name the workload, the load and the factor; what forbids it comes first."""
    wrong = {a.workload for a in result.answers if a.divergent}
    out = [_divergent(a) for a in result.answers if a.divergent]
    failed = judge.failed(result)
    out += [f"Do not turn it on: '{c.arm}' fails {c.name}: {c.message}." for c in failed]
    by_workload = [
        [c for c in cells if c.workload == w] for w in dict.fromkeys(c.workload for c in cells)
    ]
    for here in sorted(by_workload, key=_best, reverse=True):
        if not failed and here[0].workload not in wrong:
            out.append(_advice(here[0].workload, here, _tokens(result)))
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


def _tokens(result: Result) -> int:
    """Tokens per draft of the arm that speculates."""
    configured = result.arms[-1].config.get("speculative_decoding.num_speculative_tokens")
    return int(configured or SpeculativeDecoding().num_speculative_tokens)


def _advice(workload: str, cells: Sequence[Cell], tokens: int) -> str:
    known = [c for c in cells if c.speedup]
    faster = [c for c in known if c.verdict == "faster"]
    slower = [c for c in known if c.verdict == "slower"]
    if faster and not slower:
        top = max(c.concurrency for c in faster)
        open_at = ", ".join(
            str(c.concurrency) for c in cells if c.verdict in ("inconclusive", "unsound")
        )
        rest = f" (no verdict at {open_at})" if open_at else ""
        seen = f"{_factors(faster)} faster per token{rest}.{_later(faster)}"
        return f"Turn it on for {workload} up to {top} concurrent requests: {seen}"
    if faster:
        return _by_load(workload, faster, slower, tokens)
    if slower:
        seen = f"{_factors(slower)} (below 1 is slower)"
        return f"Leave it off for {workload}: {seen}. In the config: speculative_decoding.enabled: false."
    if known and all(c.verdict == "no difference" for c in known):
        return f"It makes no difference for {workload} ({_factors(known)})."
    if known:
        return f"Undecided for {workload} ({_factors(known)}), noise hides the effect: {MORE}, or raise --prompts."
    return f"No verdict for {workload}."


def _by_load(workload: str, faster: Sequence[Cell], slower: Sequence[Cell], tokens: int) -> str:
    """Faster at some loads, slower at others: one limit that parts them is a line for the config."""
    on, off = sorted(c.concurrency for c in faster), sorted(c.concurrency for c in slower)
    if on[-1] < off[0]:
        return (
            f"Turn it on for {workload} up to {on[-1]} concurrent requests ({_factors(faster)}); "
            f"from {off[0]} on leave it off ({_factors(slower)}). "
            f"In the config: speculative_decoding.max_batch_size: {on[-1]}.{_later(faster)}"
        )
    if off[-1] < on[0]:
        return (
            f"Turn it on for {workload} from {on[0]} concurrent requests on ({_factors(faster)}); "
            f"up to {off[-1]} leave it off ({_factors(slower)}). In the config: speculative_decoding.schedule: "
            f"[[1, {on[0] - 1}, 0], [{on[0]}, {WIDEST_STEP}, {tokens}]].{_later(faster)}"
        )
    return (
        f"No one limit for {workload}: faster at {_words(on)} concurrent requests ({_factors(faster)}), slower at "
        f"{_words(off)} ({_factors(slower)}). Before deciding, {MORE}; if it stays so, "
        f"speculative_decoding.schedule turns it on by batch size.{_later(faster)}"
    )


def _words(loads: Sequence[int]) -> str:
    return " and ".join(map(str, loads))


def _factors(cells: Sequence[Cell]) -> str:
    values = sorted(c.speedup.value for c in cells if c.speedup)
    return f"{values[0]:.2f}x" if len(values) == 1 else f"{values[0]:.2f}x to {values[-1]:.2f}x"


def _within(result: Result) -> list[str]:
    """One sentence a workload: the highest load of each arm within the objectives."""
    out = []
    for workload in dict.fromkeys(s.workload for s in result.searches):
        here = [s for s in result.searches if s.workload == workload]
        loads = "; ".join(
            f"{s.arm} {_load(s)}" for s in sorted(here, key=lambda s: s.arm != result.arms[0].name)
        )
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
