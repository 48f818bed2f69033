"""What ``--help`` adds to a command: two lines to type, and the page that says more.

Every example is read by the program itself in a test: a line that could not be typed fails it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """The end of one command's help."""

    examples: tuple[str, str]
    page: str
    """In ``docs/``."""

    def epilog(self, pages: str | None) -> str:
        """As click prints it; ``\\b`` keeps lines. ``pages`` is where the documentation is
        published; None: in the sources alone."""
        link = f"docs/{self.page}"
        if pages is not None:
            link = f"{pages.rstrip('/')}/{self.page.removesuffix('.md')}/"
        lines = "\n".join(f"  {example}" for example in self.examples)
        return f"\b\nExamples:\n{lines}\n\nMore: {link}"


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Before the launch": ("init", "check", "plan", "gpus"),
    "Serving": ("launch", "verify", "status", "sidecar", "probe", "alerts", "doctor"),
    "Measuring and batches": ("bench", "report", "trace", "batch"),
    "Files and shell": ("models", "config", "completion"),
}
"""Heading -> commands, in the order in which a user meets them. What is in none comes last."""

PROGRAM = Shown(
    ("specserve init --from serve.sh --out config.yaml", "specserve check config.yaml"),
    "cli.md",
)
SHOWN: Mapping[str, Shown] = {
    "init": Shown(
        (
            "specserve init --from docker-compose.yml --out config.yaml",
            "specserve init --target Qwen/Qwen3-32B --draft Qwen/Qwen3-0.6B --gpu 'H100 80GB'",
        ),
        "init.md",
    ),
    "check": Shown(
        (
            "specserve check config.yaml",
            "specserve check config.yaml --engine 0.29 --format json",
        ),
        "checks.md",
    ),
    "plan": Shown(
        (
            "specserve plan config.yaml --grid",
            "specserve plan config.yaml --worth --set hardware.gpu_name='A100 80GB'",
        ),
        "memory.md",
    ),
    "gpus": Shown(("specserve gpus", "specserve gpus A100 'h100 nvl' 4090"), "memory.md"),
    "launch": Shown(
        ("specserve launch config.yaml --dry-run", "specserve launch config.yaml"),
        "supervision.md",
    ),
    "verify": Shown(
        (
            "specserve verify --url http://127.0.0.1:8000",
            "specserve verify config.yaml --launch --junit verify.xml",
        ),
        "supervision.md",
    ),
    "status": Shown(
        (
            "specserve status --engine-url http://127.0.0.1:8000",
            "specserve status --watch",
        ),
        "sidecar.md",
    ),
    "sidecar": Shown(
        (
            "specserve sidecar --engine-url http://127.0.0.1:8000",
            "specserve sidecar config.yaml --set sidecar.port=9500",
        ),
        "sidecar.md",
    ),
    "doctor": Shown(
        (
            "specserve doctor --url http://127.0.0.1:8000",
            "specserve doctor config.yaml --log engine.log",
        ),
        "doctor.md",
    ),
    "probe": Shown(
        ("specserve probe ready", "specserve probe live --url http://127.0.0.1:9400 --timeout 1"),
        "sidecar.md",
    ),
    "alerts": Shown(
        ("specserve alerts list", "specserve alerts rules > specserve.rules.yaml"), "alerts.md"
    ),
    "alerts list": Shown(
        ("specserve alerts list", "specserve alerts list config.yaml --format json"),
        "alerts.md",
    ),
    "alerts rules": Shown(
        (
            "specserve alerts rules > specserve.rules.yaml",
            "specserve alerts rules config.yaml",
        ),
        "alerts.md",
    ),
    "alerts inhibit": Shown(
        ("specserve alerts inhibit", "specserve alerts inhibit >> alertmanager.yml"), "alerts.md"
    ),
    "alerts metrics": Shown(
        ("specserve alerts metrics", "specserve alerts metrics --format json"), "metrics.md"
    ),
    "alerts lint": Shown(
        (
            "specserve alerts lint my.rules.yaml",
            "specserve alerts lint my.rules.yaml --url http://127.0.0.1:8000",
        ),
        "alerts.md",
    ),
    "bench": Shown(
        (
            "specserve bench config.yaml --out results",
            "specserve bench config.yaml --workload code-edit --concurrency 1,4,16",
        ),
        "benchmark.md",
    ),
    "batch": Shown(
        (
            "specserve batch config.yaml requests.jsonl answers.jsonl",
            "specserve batch --url http://127.0.0.1:8000 prompts.txt answers.jsonl --resume",
        ),
        "batch.md",
    ),
    "report": Shown(
        ("specserve report results", "specserve report before after --max-drop 5"),
        "benchmark.md",
    ),
    "trace": Shown(
        (
            "specserve trace redact requests.jsonl shared.jsonl",
            "specserve bench config.yaml --trace shared.jsonl",
        ),
        "benchmark.md",
    ),
    "trace redact": Shown(
        (
            "specserve trace redact requests.jsonl shared.jsonl",
            "specserve trace redact requests.jsonl shared.jsonl --keep-text",
        ),
        "benchmark.md",
    ),
    "models": Shown(
        ("specserve models pull config.yaml", "specserve models lock config.yaml"), "models.md"
    ),
    "models lock": Shown(
        (
            "specserve models lock config.yaml",
            "specserve models lock config.yaml --format json",
        ),
        "models.md",
    ),
    "models verify": Shown(
        (
            "specserve models verify config.yaml",
            "specserve models verify config.yaml --set models.target_model.path=/mnt/target",
        ),
        "models.md",
    ),
    "models pull": Shown(
        (
            "specserve models pull config.yaml",
            "specserve models pull config.yaml --set models.store=/data/models",
        ),
        "models.md",
    ),
    "config": Shown(
        (
            "specserve config show config.yaml --changed",
            "specserve config schema > specserve.schema.json",
        ),
        "config.md",
    ),
    "config show": Shown(
        (
            "specserve config show config.yaml --changed",
            "specserve config show config.yaml --set server.port=9000 --format json",
        ),
        "config.md",
    ),
    "config schema": Shown(
        ("specserve config schema", "specserve config schema > specserve.schema.json"),
        "config.md",
    ),
    "completion": Shown(
        ("specserve completion bash --install", "specserve completion fish"), "cli.md"
    ),
}
"""Command -> the end of its help."""
