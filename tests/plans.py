"""Memory plans with figures made up for a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.memory import plan as memory
from specserve.memory.result import CacheCapacity, MemoryPlan

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def plan(*, requests: float = 0.0, **gpu: Any) -> MemoryPlan:
    """A plan for one small model on the CPU backend, with these figures of its one worker in place of the planned."""
    settings = Settings.model_validate({"models": {"target_model": {"path": "target"}}})
    made = memory.plan(settings, ModelFacts("target", MODEL), None, backend="cpu", free_ram_bytes=0)
    capacity = CacheCapacity(gpu.get("kv_cache_tokens", 0), requests)
    return replace(made, gpus=(replace(made.gpus[0], **gpu),), capacity=capacity)
