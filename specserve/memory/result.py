"""A memory plan as data: every GPU's sum, what its pool holds, and every term with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specserve.findings import Judgement
from specserve.gpu.devices import DeviceProcess
from specserve.memory.deployment import Backend, Shape
from specserve.memory.kv_cache import CachePlan
from specserve.memory.overhead import Overhead

Confidence = Literal["measured", "modelled", "assumed"]


@dataclass(frozen=True)
class Term:
    """One line of the sum."""

    name: str
    bytes: int
    formula: str
    source: str


@dataclass(frozen=True)
class Calibration:
    """What one start measured, for plans of the same deployment."""

    key: str
    weights_bytes: int
    """Target and draft, on one GPU."""
    overhead_bytes: int
    """Budget - weights - KV cache: activation, non-torch and whatever else the engine took."""
    cuda_graph_bytes: int | None = None
    engine: str | None = None
    """The version that it was measured with, for people: the key holds it too."""


@dataclass(frozen=True)
class GpuPlan:
    """One GPU's sum; on the CPU backend, one worker's memory."""

    index: int
    """The device's number, or a plain count on what-if hardware."""
    total_bytes: int | None
    """What CUDA hands out; None when no GPU is known. On the CPU backend: free memory."""
    budget_bytes: int | None
    target_weights_bytes: int
    draft_weights_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    non_torch_bytes: int
    kv_cache_bytes: int | None
    kv_cache_tokens: int | None
    other_bytes: int = 0
    """In use by other processes."""
    processes: tuple[DeviceProcess, ...] = ()
    """They, where NVML tells."""
    stage: int = 0
    """Pipeline stage."""
    graphs_in_budget: bool = True
    """Whether the graphs come out of the budget (since 0.21) or on top of it."""
    outside_bytes: int = 0
    """What the start needs outside the budget."""

    @property
    def fixed_bytes(self) -> int:
        """What comes out of the budget before the KV cache."""
        if self.graphs_in_budget:
            graphs = self.cuda_graph_bytes
        else:
            graphs = 0
        return self.weights_bytes + self.activation_bytes + self.non_torch_bytes + graphs

    @property
    def weights_bytes(self) -> int:
        """Target and draft: what the engine logs as "Model loading took"."""
        return self.target_weights_bytes + self.draft_weights_bytes

    def as_dict(self) -> dict[str, int | None]:
        """The JSON contract."""
        return {
            "index": self.index,
            "total_bytes": self.total_bytes,
            "budget_bytes": self.budget_bytes,
            "target_weights_bytes": self.target_weights_bytes,
            "draft_weights_bytes": self.draft_weights_bytes,
            "activation_bytes": self.activation_bytes,
            "cuda_graph_bytes": self.cuda_graph_bytes,
            "non_torch_bytes": self.non_torch_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "kv_cache_tokens": self.kv_cache_tokens,
            "other_bytes": self.other_bytes,
        }


@dataclass(frozen=True)
class CacheCapacity:
    """What the pool holds."""

    kv_cache_tokens: int
    """As the engine's log counts them."""
    requests: float
    """Requests of max_model_len tokens at once."""


UnknownPart = Literal["target weights", "draft weights", "KV cache"]


@dataclass(frozen=True)
class UnknownSize:
    """A size of the checkpoint that nobody knows: no plan says "fits" without it."""

    part: UnknownPart
    why: str


Refusal = Literal["memory", "other-processes", "headroom", "gpu-count", "split"]


@dataclass(frozen=True)
class MemoryPlan:
    """The whole deployment's memory."""

    backend: Backend
    gpus: tuple[GpuPlan, ...]
    shape: Shape
    kv_bytes_per_token: int
    capacity: CacheCapacity
    without_draft: CacheCapacity
    largest_max_model_len: int
    """The longest single request that the pool holds, at most the model's own limit."""
    request_bytes: int
    """One request of max_model_len on one GPU, in whole blocks."""
    late_bytes: int
    """Draft logits that no profiling run sees: allocated by the first full step, outside the
    budget.
    """
    terms: tuple[Term, ...]
    confidence: Confidence
    assumed: tuple[str, ...]
    target_format: str
    """How the target's weights lie in memory."""
    draft_format: str | None
    """How the draft's weights are stored; None without a draft of its own."""
    gpu_name: str | None
    gpus_found: int | None
    """None when none is known."""
    refusal: Refusal | None
    draft_kv_bytes_per_token: int = 0
    """The proposer's part of ``kv_bytes_per_token``."""
    unknown: tuple[UnknownSize, ...] = ()
    """Sizes that are not known; they are left out of every sum, which is then a lower bound."""
    possible_tp: int | None = None
    """Where TP is refused: the largest below it that the model and the GPUs there are can have, if
    any.
    """

    @property
    def fits(self) -> bool | None:
        """Whether the engine would start and hold one request;
        None when there is no GPU to plan for, or a size is unknown.

        What exceeds the budget without its unknown parts does not fit.
        """
        if self.refusal is not None:
            return False
        if self.unknown or self.gpus_found is None:
            return None
        return True

    @property
    def judgement(self) -> Judgement:
        """The verdict on memory."""
        match self.fits:
            case None:
                return "unknown"
            case True:
                return "fits"
            case False:
                return "does not fit"

    def knows(self, part: UnknownPart) -> bool:
        """Whether a part's size is known."""
        return all(size.part != part for size in self.unknown)

    @property
    def max_model_len(self) -> int:
        """The context planned for."""
        return self.shape.max_model_len

    @property
    def method(self) -> str | None:
        """The speculative method; None without speculation."""
        return self.shape.method

    @property
    def proposer(self) -> str | None:
        """What proposes, in words: the draft, or a method that has no weights;
        None without speculation.
        """
        if self.shape.drafts_with_a_model:
            return "the draft"
        return self.method

    @property
    def tightest(self) -> GpuPlan:
        """The GPU that decides: the one with the least KV cache."""
        return min(self.gpus, key=lambda g: g.kv_cache_bytes or 0)

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract: bytes as integers."""
        alone, said = self.without_draft, self.fits is not None
        missing: dict[str, None] = {}
        if not self.knows("target weights"):
            missing["target_weights_bytes"] = None
        if not self.knows("draft weights"):
            missing["draft_weights_bytes"] = None
        if self.unknown:
            missing |= {"kv_cache_bytes": None, "kv_cache_tokens": None}
        return {
            "fits": self.fits,
            "backend": self.backend,
            "gpu_name": self.gpu_name,
            "gpus": [g.as_dict() | missing for g in self.gpus],
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "max_concurrency": {
                "tokens": self.max_model_len,
                "requests": round(self.capacity.requests, 2) if said else None,
            },
            "without_draft": {
                "kv_cache_tokens": alone.kv_cache_tokens if said else None,
                "requests": round(alone.requests, 2) if said else None,
            },
            "largest_max_model_len": self.largest_max_model_len if said else None,
            "draft_kv_bytes_per_token": self.draft_kv_bytes_per_token,
            "unknown": [vars(size) for size in self.unknown],
            "terms": [vars(t) for t in self.terms if t.source != "unknown"],
            "confidence": self.confidence,
            "assumed": list(self.assumed),
        }


@dataclass(frozen=True)
class Stage:
    """What every GPU of a pipeline stage holds, before any budget."""

    target: int
    draft: int
    overhead: Overhead
    cache: CachePlan
