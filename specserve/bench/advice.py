"""The first paragraph of a report: what to do, for a person who reads nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.bench.judge import BenchCell, BenchVerdict
from specserve.bench.result import Answers, Result, Search
from specserve.config.speculation import DEFAULT_TOKENS, WIDEST_STEP

LATER = 1.1
"""A first token that comes more than a tenth later is worth a sentence."""
MORE = "add blocks with --resume and a higher --repeat"


def conclusion(verdict: BenchVerdict) -> list[str]:
    """What to do, in sentences with the workload, the load and the factor; what forbids it comes
    first."""
    result = verdict.result
    wrong = [a for a in result.answers if a.divergent]
    out = [_divergent(a) for a in wrong]
    out += [f"Do not turn it on: '{c.arm}' fails {c.name}: {c.message}." for c in verdict.failed]
    if not verdict.failed:
        by_workload: dict[str, list[BenchCell]] = {}
        for cell in verdict.cells:
            by_workload.setdefault(cell.workload, []).append(cell)
        for answers in wrong:
            by_workload.pop(answers.workload, None)
        for here in sorted(by_workload.values(), key=_best, reverse=True):
            out.append(_advice(here, _tokens(result)))
    out += _within(result)
    unsound = [f"{c.workload} at {c.concurrency}: {w}." for c in verdict.cells for w in c.warnings]
    if unsound:
        out += ["No verdict where the measurement is not sound:", *unsound]
    if not result.complete:
        out.append("The benchmark was interrupted; this is what had been measured.")
    return out or ["Nothing was measured in both arms."]


def _divergent(found: Answers) -> str:
    wrong = "are not the target's"
    if found.is_streaming:
        wrong = f"of '{found.arm}' change when they are streamed"
    seen = f"{found.divergent} of {found.compared} answers {wrong}"
    return f"Do not turn it on for {found.workload}: {seen}."


def _best(cells: Sequence[BenchCell]) -> float:
    """What speaks most for speculation comes first."""
    return max((c.speedup.value for c in cells if c.speedup), default=0.0)


def _later(cells: Sequence[BenchCell]) -> str:
    """Faster tokens may hide that the first one comes later (vllm-project/vllm#19996)."""
    ratio, load = max((c.ttft_ratio or 0.0, -c.concurrency) for c in cells)
    if ratio <= LATER:
        return ""
    return f" Time to first token is {ratio:.2f}x as long with {_requests(-load)}."


def _requests(load: int) -> str:
    """A load in words.

    >>> _requests(1), _requests(16)
    ('one request at a time', '16 concurrent requests')
    """
    if load == 1:
        return "one request at a time"
    return f"{load} concurrent requests"


def _tokens(result: Result) -> int:
    """Tokens per draft of the arm that speculates."""
    configured = result.arms[-1].config.get("speculative_decoding.num_speculative_tokens")
    if isinstance(configured, int):
        return configured
    return DEFAULT_TOKENS


def _advice(cells: Sequence[BenchCell], tokens: int) -> str:
    """What to do for one workload."""
    workload = cells[0].workload
    known = [c for c in cells if c.speedup]
    faster = [c for c in known if c.verdict == "faster"]
    slower = [c for c in known if c.verdict == "slower"]
    if faster and slower:
        return _by_load(workload, faster, slower, tokens)
    if faster:
        on = f"Turn it on for {workload}{_up_to(max(c.concurrency for c in faster))}"
        seen = f"{_factors(faster)} faster per token{_open(cells)}"
        return f"{on}: {seen}.{_later(faster)}"
    if slower:
        off = f"Leave it off for {workload}: {_factors(slower)} (below 1 is slower)"
        return f"{off}. In the config: speculative_decoding.enabled: false."
    if not known:
        return f"No verdict for {workload}."
    if all(c.verdict == "no difference" for c in known):
        return f"It makes no difference for {workload} ({_factors(known)})."
    undecided = f"Undecided for {workload} ({_factors(known)}), noise hides the effect"
    return f"{undecided}: {MORE}, or raise --prompts."


def _up_to(load: int) -> str:
    if load == 1:
        return ", for single requests only"
    return f" up to {load} concurrent requests"


def _open(cells: Sequence[BenchCell]) -> str:
    """At which loads there is no verdict."""
    loads = [str(c.concurrency) for c in cells if c.verdict in ("inconclusive", "unsound")]
    if not loads:
        return ""
    return f" (no verdict at {', '.join(loads)})"


def _by_load(
    workload: str, faster: Sequence[BenchCell], slower: Sequence[BenchCell], tokens: int
) -> str:
    """Faster at some loads, slower at others: one limit that parts them is a line for the
    config."""
    on, off = sorted(c.concurrency for c in faster), sorted(c.concurrency for c in slower)
    gain, loss, later = _factors(faster), _factors(slower), _later(faster)
    if on[-1] < off[0]:
        return (
            f"Turn it on for {workload}{_up_to(on[-1])} ({gain}); "
            f"leave it off from {off[0]} ({loss}). "
            f"In the config: speculative_decoding.max_batch_size: {on[-1]}.{later}"
        )
    if off[-1] < on[0]:
        schedule = f"[[1, {on[0] - 1}, 0], [{on[0]}, {WIDEST_STEP}, {tokens}]]"
        return (
            f"Turn it on for {workload} from {on[0]} concurrent requests ({gain}); "
            f"leave it off up to {off[-1]} ({loss}). "
            f"In the config: speculative_decoding.schedule: {schedule}.{later}"
        )
    return (
        f"No single limit for {workload}: faster at {_words(on)} concurrent requests ({gain}), "
        f"slower at {_words(off)} ({loss}). Before deciding, {MORE}; if it stays so, "
        f"speculative_decoding.schedule turns it on by batch size.{later}"
    )


def _words(loads: Sequence[int]) -> str:
    return " and ".join(map(str, loads))


def _factors(cells: Sequence[BenchCell]) -> str:
    """The speedups of these cells, from the least to the greatest."""
    values = sorted(c.speedup.value for c in cells if c.speedup)
    shown = dict.fromkeys(f"{value:.2f}x" for value in (values[0], values[-1]))
    return " to ".join(shown)


def _within(result: Result) -> list[str]:
    """One sentence a workload: the highest load of each arm within the objectives."""
    out = []
    for workload in dict.fromkeys(s.workload for s in result.searches):
        here = [s for s in result.searches if s.workload == workload]
        here.sort(key=lambda s: s.arm != result.arms[0].name)
        loads = "; ".join(f"{s.arm} {_load(s)}" for s in here)
        out.append(f"Within {objectives(here[0])}, {workload}: {loads}.")
    return out


def _load(search: Search) -> str:
    best = search.best
    if best is None:
        return "not even one request at a time"
    load = f"{_requests(best.concurrency)} ({best.requests_per_second:.1f}/s)"
    if search.stop_reason == "converged":
        return load
    return f"at least {load}"


def objectives(search: Search) -> str:
    """The objectives of a search, in words."""
    names = (f"{n.replace('_', ' ').upper()} {1000 * s:g} ms" for n, s in search.objectives.items())
    return " and ".join(names)
