"""The highest load within latency objectives: what guidellm is to search for, and what it found.

guidellm (an extra, or any command of that name on the PATH) doubles the concurrency until
objectives are missed, then bisects: its ``goodput`` profile, read in guidellm 0.8.1 on 2026-11-30.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.bench.result import LoadProbe, Search
from specserve.bench.workload import Request, Workload
from specserve.errors import ConfigError, Unsound

ATTAINMENT = 0.99
"""Share of requests that must meet every objective: then the P99 of each of them is met."""
ROWS = 5000
"""guidellm ends a probe when its prompts are used up, so they are repeated."""
_NAMES = {"ttft_p99": "ttft_ms", "tpot_p99": "tpot_ms", "e2e_p99": "e2el_ms"}
_SECONDS = {"ms": 0.001, "s": 1.0}


def parse(text: str) -> dict[str, float]:
    """Objectives by name, in seconds.

    >>> parse("ttft_p99=200ms, tpot_p99=0.03s")
    {'ttft_p99': 0.2, 'tpot_p99': 0.03}
    """
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w+)\s*=\s*(\d+(?:\.\d+)?)(ms|s)", part.strip())
        if match is None or match[1] not in _NAMES or float(match[2]) == 0:
            raise ConfigError(
                f"'{part.strip()}' is not an objective; "
                f"must be one of {', '.join(_NAMES)} with a time in ms or s",
                where="--slo",
                fix="--slo ttft_p99=200ms,tpot_p99=30ms",
            )
        found[match[1]] = float(match[2]) * _SECONDS[match[3]]
    return found


def prepare(
    folder: Path,
    workload: Workload,
    objectives: Mapping[str, float],
    probe_seconds: float,
    *,
    target: str,
    model: str,
    api_key: str | None,
) -> Path:
    """Write prompts and scenario into ``folder``; return the scenario's path."""
    prompts = folder / "prompts.jsonl"
    rows = itertools.islice(itertools.cycle(workload.requests), max(ROWS, len(workload.requests)))
    prompts.write_text("".join(_row(r) + "\n" for r in rows), encoding="utf-8")
    path = "/v1/completions"
    if workload.requests[0].messages is not None:
        path = "/v1/chat/completions"
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": target,
            "model": model,
            "api_key": api_key,
            "request_format": path,
            "max_tokens": max(r.max_tokens for r in workload.requests),
            "http2": False,
            "extras": {"body": {"temperature": workload.temperature, "top_p": workload.top_p}},
        },
        "profile": {"kind": "goodput", "target_attainment": ATTAINMENT, "initial_streams": 1},
        "constraints": [{"kind": "max_duration", "seconds": probe_seconds}],
        "data": [{"kind": "json_file", "path": str(prompts)}],
        "metrics": {
            "kind": "generative",
            "sample_size": 0,
            "slo": {_NAMES[name]: seconds * 1000 for name, seconds in objectives.items()},
        },
        "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
    }
    scenario = folder / "scenario.json"
    scenario.write_text(json.dumps({"spec": spec}), encoding="utf-8")
    return scenario


def _row(request: Request) -> str:
    if request.messages is None:
        return json.dumps({"prompt": request.prompt})
    return json.dumps({"messages": request.messages})


def read(folder: Path, arm: str, workload: str, objectives: Mapping[str, float]) -> Search:
    """What the search found. Raises Unsound when the report is not one that is known here."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        conclusion = report["conclusions"][0]
        probes = [
            _probe(p, b["metrics"])
            for p, b in zip(conclusion["probes"], report["benchmarks"], strict=True)
        ]
        return Search(
            arm=arm,
            workload=workload,
            objectives=dict(objectives),
            probes=probes,
            concurrency=conclusion["best_passing_streams"],
            stop_reason=conclusion["stop_reason"],
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise Unsound(
            f"guidellm's report cannot be read: {type(error).__name__}: {error}",
            where="--slo",
            fix="pip install 'guidellm~=0.8.1'",
        ) from None


def _probe(probe: Mapping[str, Any], metrics: Mapping[str, Any]) -> LoadProbe:
    def p99(name: str) -> float | None:
        found = metrics[name]["successful"]
        if not found or not found["count"]:
            return None
        p99_ms: float = found["percentiles"]["p99"]
        return p99_ms / 1000

    return LoadProbe(
        concurrency=probe["streams"],
        requests=probe["determined_requests"],
        met_ratio=probe["attainment"],
        is_met=probe["passed"],
        is_certain=probe["resolved"],
        requests_per_second=metrics["requests_per_second"]["successful"]["mean"],
        ttft_p99_seconds=p99("time_to_first_token_ms"),
        tpot_p99_seconds=p99("inter_token_latency_ms"),
    )
