"""The result of a benchmark: what was measured, in one versioned JSON file. Nothing here judges.

Version history of the file (a new optional field is no new version):
1  first version
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from specserve.errors import ConfigError
from specserve.files import read_small, write_whole

VERSION: Literal[1] = 1
MAX_RESULT_BYTES = 256 * 1024**2
"""A request takes about 300 bytes of a result."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Sample(_Record):
    """One request."""

    prompt_id: str = Field(description="Prompt, unique in its workload.")
    ok: bool = Field(description="Whether the request succeeded.")
    ttft_seconds: float | None = Field(None, description="Request sent to first non-empty chunk.")
    e2e_seconds: float | None = Field(None, description="Request sent to last chunk.")
    output_tokens: int | None = Field(None, description="Tokens as the server counted them.")
    itl_seconds: list[float] = Field(default_factory=list, description="Gaps between chunks.")
    text: str | None = Field(None, description="The answer; kept for greedy workloads only.")
    error: str | None = Field(None, description="Why it failed.")
    late_seconds: float | None = Field(
        None, description="Replays only: sent this much later than it was recorded."
    )

    @property
    def tpot_seconds(self) -> float | None:
        """(latency - TTFT) / (output tokens - 1); None for at most one token."""
        tokens = self.output_tokens or 0
        if not self.ok or self.e2e_seconds is None or self.ttft_seconds is None or tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (tokens - 1)


class Speculation(_Record):
    """Deltas of the engine's counters over one block."""

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    accepted_per_position: list[float] = Field(
        default_factory=list, description="Accepted at position i, 0-based."
    )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None when nothing was drafted."""
        if not self.draft_tokens:
            return None
        return self.accepted_tokens / self.draft_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens / drafts; None when nothing was drafted."""
        if not self.drafts:
            return None
        return 1 + self.accepted_tokens / self.drafts

    @property
    def acceptance_per_position(self) -> list[float]:
        """Accepted at position i / drafts, 0-based; empty when nothing was drafted."""
        if not self.drafts:
            return []
        return [accepted / self.drafts for accepted in self.accepted_per_position]


class Block(_Record):
    """One arm under one load, measured once."""

    index: int = Field(description="Position in time, from 0.")
    arm: str
    workload: str
    concurrency: int
    started_seconds: float = Field(description="Since the start of the benchmark.")
    duration_seconds: float
    samples: list[Sample]
    speculation: Speculation | None = Field(
        None, description="None where nothing was drafted or it is unknown."
    )
    prefix_cache_hit_ratio: float | None = None
    foreign_tokens: float | None = Field(
        None,
        description="Tokens made for somebody else meanwhile; above 0, acceptance and prefix hits "
        "are unknown. None where the counters could not be read.",
    )
    gpu: dict[str, float] | None = Field(
        None,
        description="Means over the block: utilization_ratio, power_watts, memory_used_bytes; "
        "None without a GPU.",
    )


class Arm(_Record):
    """One configuration under test."""

    name: str
    config: dict[str, JsonValue] = Field(
        default_factory=dict, description="Resolved configuration, secrets masked."
    )
    url: str | None = Field(None, description="Set when a server that already ran was measured.")
    ready_seconds: list[float] = Field(
        default_factory=list, description="Time to ready of each start."
    )
    kv_cache_tokens: int | None = None


class Answers(_Record):
    """Greedy answers of an arm against the baseline's, or streamed against in one piece."""

    workload: str
    arm: str | None = Field(None, description="Whose answers.")
    is_streaming: bool = Field(
        False, description="Compared with its own in one piece, not with the baseline's."
    )
    compared: int
    identical: int
    near_ties: int = Field(description="First difference where the target itself was undecided.")
    divergent: int = Field(description="Answers that the target would not have given.")
    unscored: int = Field(0, description="Different answers that could not be scored.")
    repeat_differs: int | None = Field(
        None, description="Answers that differ between two runs of the baseline itself."
    )
    common_prefix_ratio: float | None = Field(
        None,
        description="Median share of the baseline's text, in characters, after which different "
        "answers part.",
    )
    examples: list[dict[str, JsonValue]] = Field(default_factory=list)


class BenchMachine(_Record):
    """What decides speed."""

    system: str = ""
    python: str | None = None
    processor: str | None = None
    cores: int | None = Field(None, description="Physical ones.")
    memory_bytes: int | None = None
    gpus: list[str] = Field(default_factory=list, description="Names; empty without a GPU.")


class BenchCheck(_Record):
    """One check of ``specserve verify``, made on an arm."""

    arm: str
    name: str
    status: Literal["PASS", "FAIL", "SKIP"]
    message: str


class LoadProbe(_Record):
    """One load that a search tried."""

    concurrency: int
    requests: int
    met_ratio: float = Field(
        description="Share of the requests that met every objective; a failed one did not."
    )
    is_met: bool = Field(
        description="Whether that share is at least 0.99, so that each objective's P99 is met."
    )
    is_certain: bool = Field(description="Whether its 95 % interval lies on one side of 0.99.")
    requests_per_second: float
    ttft_p99_seconds: float | None = None
    tpot_p99_seconds: float | None = None


class Search(_Record):
    """The highest load of one arm within latency objectives, found by guidellm."""

    arm: str
    workload: str
    objectives: dict[str, float] = Field(
        description="Name (ttft_p99, tpot_p99, e2e_p99) -> seconds."
    )
    probes: list[LoadProbe]
    concurrency: int | None = Field(
        description="Requests in flight; None when not even one meets them."
    )
    stop_reason: str | None = Field(None, description="Why the search ended, in guidellm's word.")

    @property
    def best(self) -> LoadProbe | None:
        """The probe of the highest load that met the objectives."""
        return next((p for p in self.probes if p.concurrency == self.concurrency), None)


class Result(_Record):
    """One benchmark."""

    version: Literal[1] = VERSION
    specserve_version: str
    engine: str | None = Field(None, description="Distribution and version, e.g. vllm 0.33.0.")
    created: str = Field(description="UTC, ISO 8601.")
    machine: BenchMachine = Field(default_factory=BenchMachine)
    title: str = ""
    arms: list[Arm] = Field(min_length=1)
    together: bool = Field(False, description="Whether both arms ran all the time, side by side.")
    workloads: dict[str, str] = Field(
        default_factory=dict, description="Name -> SHA-256 of all that was sent."
    )
    blocks: list[Block]
    order: list[str] = Field(
        default_factory=list, description="What happened, in order: starts, stops, blocks."
    )
    answers: list[Answers] = Field(default_factory=list)
    checks: list[BenchCheck] = Field(default_factory=list)
    searches: list[Search] = Field(default_factory=list)
    complete: bool = Field(
        True, description="False when it was interrupted; what was measured is all here."
    )


_SHAPES = ("models.", "engine.", "speculative_decoding.", "server.max_concurrent_requests")
"""Keys of the configuration that bear on what is measured."""


def differences(old: Result, new: Result) -> list[tuple[str, str, str]]:
    """Rows (what, then, now) by which two results are of different benchmarks.

    Then no block of one belongs to the other. Not compared: the blocks themselves.
    """
    then, now = _identity(old), _identity(new)
    rows = []
    for key in sorted(then.keys() | now.keys()):
        was, is_now = then.get(key, "not set"), now.get(key, "not set")
        if was != is_now:
            rows.append((key, f"then {was}", f"now {is_now}"))
    return rows


def _identity(of: Result) -> dict[str, JsonValue]:
    together = "not given"
    if of.together:
        together = "given"
    found: dict[str, JsonValue] = {
        "arms": ", ".join(a.name for a in of.arms),
        "engine": of.engine,
        "gpus": list(of.machine.gpus),
        "--together": together,
    }
    found |= {f"prompts of {name}": digest[:12] for name, digest in of.workloads.items()}
    for arm in of.model_dump(mode="json")["arms"]:
        found |= {
            f"{arm['name']}: {k}": v for k, v in arm["config"].items() if k.startswith(_SHAPES)
        }
        found[f"{arm['name']}: url"] = arm["url"]
    return found


def _number(text: str) -> int | float:
    """A number that arithmetic can bear: NaN, Infinity and what nothing measures are refused."""
    if not abs(float(text)) < 1e20:
        raise _Unmeasured(f"it holds the number {text[:20]}; must be what was measured")
    if text.lstrip("-").isdigit():
        return int(text)
    return float(text)


class _Unmeasured(ValueError):
    """A number that nothing measures."""


def read(path: Path) -> Result:
    """Read a result file. Raises ConfigError when it is not one."""
    try:
        text = read_small(path, limit=MAX_RESULT_BYTES)
        found = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
        return Result.model_validate(found)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, ValidationError, RecursionError) as error:
        reason = "it is not JSON"
        if isinstance(error, _Unmeasured):
            reason = str(error)
        elif isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(
            f"is not a benchmark result of version {VERSION}: {reason}",
            where=str(path),
            fix="give a result.json that bench wrote",
        ) from None


def write(result: Result, path: Path) -> None:
    """Write a result file; a reader sees the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, result.model_dump_json(indent=1))
