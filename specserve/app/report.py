"""The reports of benchmarks: from result files to pages, a profile, and an exit code."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from specserve.bench import breakeven, document, judge, plots, report, result
from specserve.bench.judge import BenchVerdict
from specserve.bench.result import Result
from specserve.errors import Problem, Unsound


def read(paths: Sequence[Path]) -> list[Result]:
    """Results from files, or from folders that bench wrote. Raises ConfigError."""
    return [result.read(path / "result.json" if path.is_dir() else path) for path in paths]


def write(results: Sequence[Result], out: Path) -> list[tuple[BenchVerdict, ...]]:
    """Judge each result once, and write Markdown, HTML and, for one result, the profile for the
    sidecar.

    The profile is of the second arm.
    """
    title = f"specserve benchmark: {', '.join(dict.fromkeys(r.title for r in results))}"
    judged = [judge.verdicts(r) for r in results]
    pairs = list(itertools.chain.from_iterable(judged))
    sections = report.document(pairs, [plots.svgs(pair) for pair in pairs])
    (out / "report.md").write_text(document.markdown(sections, title), encoding="utf-8")
    (out / "report.html").write_text(document.page(sections, title), encoding="utf-8")
    profile = breakeven.profile(pairs[0])
    if len(results) == 1 and profile.steps:
        text = json.dumps(profile.as_dict(), indent=1)
        (out / "profile.json").write_text(text, encoding="utf-8")
    return judged


def unsound(verdicts: Sequence[BenchVerdict], out: Path) -> Unsound | None:
    """Why a benchmark gives no verdict: nothing is sound, or the arms do not give the same
    answers."""
    cells = [cell for verdict in verdicts for cell in verdict.cells]
    if cells and all(c.verdict == "unsound" for c in cells):
        return Unsound(
            "no cell of this benchmark is sound; no verdict",
            where=str(out),
            fix="see the warnings above",
        )
    for verdict in verdicts:
        if verdict.failed or any(a.divergent for a in verdict.result.answers):
            return Unsound(
                "the arms do not give the same answers; no speedup makes up for that",
                where=str(out),
            )
    return None


def dropped(
    old: Sequence[BenchVerdict], new: Sequence[BenchVerdict], share: float, file: Path
) -> Unsound | None:
    """How the newer result, of this file, is worse by more than this share; None where it isn't."""
    drops = judge.drops(old, new, share)
    if not drops:
        return None
    return Unsound([Problem(drop, str(file)) for drop in drops])
