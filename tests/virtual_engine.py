"""An engine made of numbers: counters that grow in virtual time, written as vLLM's exposition of several versions.

Names and labels were read in vLLM's sources: 0.8 (``vllm/engine/metrics.py`` for V0), and 0.8 to 0.32
(``vllm/v1/metrics/loggers.py``): 0.9.2 to 0.11 report renamed things under both names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
TOKENS = (1.0, 10.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0)
HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "iteration": "iteration_tokens_total",
    "prompt": "request_prompt_tokens",
    "generation": "request_generation_tokens",
}
BOUNDS = dict.fromkeys(HISTOGRAMS, SECONDS) | {"prompt": TOKENS, "generation": TOKENS}
OLD_CACHE = {
    "kv_usage": ("gpu_cache_usage_perc",),
    "prefix_cache_queries": ("gpu_prefix_cache_queries",),
    "prefix_cache_hits": ("gpu_prefix_cache_hits",),
    "itl": ("time_per_output_token_seconds",),
    "tpot": (),
}
NOW = {"kv_usage": ("kv_cache_usage_perc",)}
STYLES: dict[str, dict[str, tuple[str, ...]]] = {
    "0.8-v0": {
        **OLD_CACHE,
        "spec_decode_num_drafts": (),
        "prefix_cache_queries": (),
        "prefix_cache_hits": (),
    },
    "0.8": OLD_CACHE,
    "0.10": {
        "kv_usage": ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        "prefix_cache_queries": ("gpu_prefix_cache_queries", "prefix_cache_queries"),
        "prefix_cache_hits": ("gpu_prefix_cache_hits", "prefix_cache_hits"),
        "itl": ("time_per_output_token_seconds",),
        "tpot": (),
    },
    "0.11": {**NOW, "itl": ("time_per_output_token_seconds", "inter_token_latency_seconds")},
    "0.13": NOW,
    "0.20": NOW,
    "0.32": NOW,
}
"""Version -> our name -> names on the wire, where they differ from `HISTOGRAMS` and the counter's own name."""


@dataclass
class VirtualEngine:
    """One engine core. Add to its counters, then ask for its text."""

    positions: int = 3
    """Tokens per draft; 0 does not speculate."""
    engine: str = "0"
    model: str = "target"
    running: float = 0
    waiting: float = 0
    kv_usage: float = 0.0
    awake: int | None = None
    """Sleep state; None does not report it."""
    counters: dict[str, float] = field(default_factory=dict)
    per_position: list[float] = field(default_factory=list)
    finished: dict[str, float] = field(
        default_factory=lambda: {"stop": 0.0, "length": 0.0, "abort": 0.0}
    )
    histograms: dict[str, list[float]] = field(default_factory=dict)
    """Name -> observations in each bucket, the infinite one last."""
    sums: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """All counters from zero, as after a restart."""
        names = (
            "generation_tokens",
            "prompt_tokens",
            "num_preemptions",
            "prefix_cache_queries",
            "prefix_cache_hits",
        )
        spec = (
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
        )
        self.counters = dict.fromkeys((*names, *(spec if self.positions else ())), 0.0)
        self.per_position = [0.0] * self.positions
        self.finished = dict.fromkeys(self.finished, 0.0)
        self.histograms = {h: [0.0] * (len(BOUNDS[h]) + 1) for h in HISTOGRAMS}
        self.sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def observe(self, name: str, value: float, times: float = 1) -> None:
        """Count observations of a histogram."""
        bounds = BOUNDS[name]
        index = next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))
        self.histograms[name][index] += times
        self.sums[name] += value * times

    def work(
        self,
        *,
        drafts: float = 0,
        rates: tuple[float, ...] = (),
        requests: float = 0,
        plain: float = 0,
    ) -> None:
        """Some drafts with unconditional acceptance rates by position, further plain tokens, finished requests."""
        accepted = [drafts * rate for rate in rates]
        c = self.counters
        if self.positions:
            c["spec_decode_num_drafts"] += drafts
            c["spec_decode_num_draft_tokens"] += drafts * self.positions
            c["spec_decode_num_accepted_tokens"] += sum(accepted)
            for position, count in enumerate(accepted):
                self.per_position[position] += count
        c["generation_tokens"] += drafts + sum(accepted) + plain
        self.observe("iteration", 0.001, drafts + plain)
        self.finished["stop"] += requests

    def text(
        self,
        style: str = "0.32",
        *,
        start: float | None = 1000.0,
        http: dict[str, int] | None = None,
    ) -> str:
        """The exposition. ``start`` is the process start time; None leaves it out, as with several API servers."""
        names = STYLES[style]
        labels = f'model_name="{self.model}"' + (
            "" if style == "0.8-v0" else f',engine="{self.engine}"'
        )
        lines = [
            f"vllm:num_requests_running{{{labels}}} {self.running}",
            f"vllm:num_requests_waiting{{{labels}}} {self.waiting}",
            *(f"vllm:{name}{{{labels}}} {self.kv_usage}" for name in names["kv_usage"]),
        ]
        for name, value in self.counters.items():
            for wire in names.get(name, (name,)):
                lines += [
                    f"vllm:{wire}_total{{{labels}}} {value}",
                    f"vllm:{wire}_created{{{labels}}} 1.7e9",
                ]
        for i, value in enumerate(self.per_position if style != "0.8-v0" else ()):
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {value}'
            )
        if self.awake is not None:
            lines.append(f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {self.awake}')
        for reason, value in self.finished.items():
            lines.append(
                f'vllm:request_success_total{{finished_reason="{reason}",{labels}}} {value}'
            )
        for name in self.histograms:
            for wire in names.get(name, (HISTOGRAMS[name],)):
                lines += self._histogram(wire, name, labels)
        for status, count in (http or {}).items():
            lines.append(
                f'http_requests_total{{handler="/v1/completions",method="POST",status="{status}"}} {count}'
            )
        if start is not None:
            lines.append(f"process_start_time_seconds {start}")
        return "\n".join(lines) + "\n"

    def _histogram(self, wire: str, name: str, labels: str) -> list[str]:
        total, lines = 0.0, []
        for bound, count in zip(
            (*map(str, BOUNDS[name]), "+Inf"), self.histograms[name], strict=True
        ):
            total += count
            lines.append(f'vllm:{wire}_bucket{{{labels},le="{bound}"}} {total}')
        return [
            *lines,
            f"vllm:{wire}_count{{{labels}}} {total}",
            f"vllm:{wire}_sum{{{labels}}} {self.sums[name]}",
        ]
