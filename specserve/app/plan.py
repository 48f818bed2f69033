"""Everything a memory plan needs: checkpoints, devices, the engine's version, earlier figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.checkpoint import facts
from specserve.checkpoint import read as checkpoint
from specserve.checkpoint.access import access
from specserve.checkpoint.read import MAX_INDEX_BYTES, index_file, read_json
from specserve.checkpoint.safetensors import Corrupt
from specserve.engine.installed.chosen import Chosen, choose
from specserve.engine.installed.introspect import Installed, installed
from specserve.gpu import devices as gpu
from specserve.memory import calibration, text
from specserve.memory import plan as memory
from specserve.memory.deployment import Backend, Processor, default_length
from specserve.memory.result import MemoryPlan

if TYPE_CHECKING:
    from specserve.config.load import Loaded
    from specserve.config.schema import Settings


@dataclass(frozen=True)
class Planning:
    """The inputs of :func:`specserve.memory.plan.plan`, read once."""

    settings: Settings
    config: Path
    target: facts.ModelFacts
    draft: facts.ModelFacts | None
    devices: tuple[gpu.Device, ...] | None
    engine: Installed
    backend: Backend
    free_ram_bytes: int | None
    processor: Processor

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        *,
        environ: Mapping[str, str],
        target: facts.ModelFacts | None = None,
        draft: facts.ModelFacts | None = None,
        chosen: Chosen | None = None,
    ) -> Planning:
        """Read metadata of both checkpoints, and look for GPUs where the config names none.

        A caller that has read the checkpoints already gives both, and one that has chosen a vLLM
        gives that. Raises ConfigError for an unknown ``engine.version``.
        """
        settings = loaded.settings
        hardware, env = settings.hardware, settings.engine.env
        if target is None:
            target, draft = read_models(settings, environ)
        if draft is not None:
            draft = with_index_total(draft)
        chosen = chosen or choose(settings, here=installed())
        engine = chosen.engine
        devices = free = None
        backend: Backend = "gpu"
        if not hardware.gpu_name and not hardware.gpu_memory_gib:
            selection = env.get("CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
            devices = gpu.of_engine(gpu.devices(), selection)
            if engine.on_cpu or "VLLM_CPU_KVCACHE_SPACE" in env:
                backend, free = "cpu", _free_ram()
        target = with_index_total(target)
        processor = _processor()
        return cls(settings, loaded.path, target, draft, devices, engine, backend, free, processor)

    @property
    def sees_hardware(self) -> bool:
        """Whether this machine has what the engine computes on."""
        return bool(self.devices) or self.backend == "cpu"

    @property
    def key(self) -> str:
        """What a calibration must match."""
        name = self.settings.hardware.gpu_name
        if self.devices:
            name = self.devices[0].name
        return calibration.key(self.settings, self.engine.version, name)

    def plan(
        self, settings: Settings | None = None, *, draft: bool = True, measured: bool = True
    ) -> MemoryPlan:
        """The plan, for these settings or for changed ones, with the draft or without.

        What an earlier start ``measured`` does not hold for other models or GPUs.
        """
        figures = None
        if measured:
            figures = calibration.load(self.config, key=self.key)
        proposer = None
        if draft:
            proposer = self.draft
        return memory.plan(
            settings or self.settings,
            self.target,
            proposer,
            devices=self.devices,
            engine_version=self.engine.version,
            backend=self.backend,
            free_ram_bytes=self.free_ram_bytes,
            processor=self.processor,
            calibration=figures,
        )

    def grid(self, made: MemoryPlan) -> list[text.Cell]:
        """The what-if table around a plan.

        Empty where no row could tell: the memory is not known, or GPUs or TP are wrong.
        """
        if made.fits is None or made.refusal in ("gpu-count", "split"):
            return []

        def again(length: int, draft: bool, part: float) -> MemoryPlan:
            settings = self.settings
            engine = settings.engine.model_copy(
                update={"max_model_len": length, "gpu_memory_utilization": part}
            )
            spec = settings.speculative_decoding
            spec = spec.model_copy(update={"enabled": spec.enabled and draft})
            changed = {"engine": engine, "speculative_decoding": spec}
            return self.plan(settings.model_copy(update=changed), draft=draft)

        limit = default_length(self.target, made.shape.accounting)
        used = self.settings.engine.gpu_memory_utilization
        shares = {used}
        if made.backend != "cpu":
            shares |= {round(min(0.95, max(0.1, used + d)), 2) for d in (-0.1, -0.05, 0.05)}
        return text.grid(again, made.max_model_len, limit, shares, draft=made.method is not None)


def read_models(
    settings: Settings, environ: Mapping[str, str]
) -> tuple[facts.ModelFacts, facts.ModelFacts | None]:
    """Target, and the draft where a second checkpoint is loaded."""
    models = settings.models
    reached = access(settings, environ)
    target = checkpoint.overridden(
        checkpoint.read(
            models.target_model.path, revision=models.target_model.revision, access=reached
        ),
        settings.engine.flags.mapping("hf-overrides"),
    )
    if models.draft_model is None or not settings.uses_draft_model:
        return target, None
    return target, checkpoint.read(
        models.draft_model.path, revision=models.draft_model.revision, access=reached
    )


def with_index_total(model: facts.ModelFacts) -> facts.ModelFacts:
    """With the bytes that the index states, where not all shards are at hand to be added up."""
    name = index_file(model.sizes)
    if model.source is None or name not in model.sizes:
        return model
    if model.tensors is not None and not any(f.code == "weights-missing" for f in model.findings):
        return model
    try:
        index = read_json(model.source, model.sizes, name, MAX_INDEX_BYTES)
    except Corrupt:
        return model
    metadata, size = index.get("metadata"), None
    if isinstance(metadata, Mapping) and isinstance(metadata.get("total_size"), int | float):
        size = int(metadata["total_size"])
    return replace(model, tensors=None, total_size_bytes=size)


def _free_ram() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _processor() -> Processor:
    """What this machine's processor can do; nothing where nobody tells."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        flags = ""
    return Processor("avx512_bf16" in flags, "amx_tile" in flags)
