"""``models``: which checkpoints are served, and how each is laid out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specserve.config.base import FilePath, Positive, Secret, Section

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
Sha256 = str | dict[str, str]


class TargetModel(Section):
    """The served model."""

    path: FilePath = Field(min_length=1, description="Folder with the checkpoint, or a Hub id.")
    revision: str | None = Field(
        None, description="Hub commit, tag or branch. Pin a commit in production."
    )
    dtype: Dtype = Field(
        "auto", description="Data type of weights and activations; auto takes the checkpoint's."
    )
    quantization: str | None = Field(
        None, description="vLLM's quantization method; null reads it from the checkpoint."
    )
    tensor_parallel_size: Positive = Field(1, description="GPUs that share each layer (TP).")
    pipeline_parallel_size: Positive = Field(
        1, description="Groups of GPUs that hold consecutive layers (PP)."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that the checkpoint ships. Applies to the draft too."
    )
    sha256: Sha256 | None = Field(
        None, description="Expected SHA-256: of the single weights file, or a map file -> hash."
    )


class DraftModel(Section):
    """The draft model, or the draft head of eagle, eagle3, mtp, medusa and the like."""

    path: FilePath = Field(
        min_length=1, description="Folder with the draft checkpoint, or a Hub id."
    )
    revision: str | None = Field(
        None, description="Hub commit, tag or branch. Pin a commit in production."
    )
    dtype: Dtype | None = Field(
        None,
        description="Only the target's value is possible: vLLM gives the draft the target's dtype.",
    )
    quantization: str | None = Field(
        None, description="Quantization method of the draft's own weights."
    )
    tensor_parallel_size: Positive | None = Field(
        None, description="TP of the draft; null is the target's."
    )
    max_model_len: Positive | None = Field(
        None, description="Longest context the draft is asked to continue."
    )
    kv_cache_dtype: str | None = Field(
        None, description="KV cache type of the draft; null is the target's."
    )
    attention_backend: str | None = Field(None, description="vLLM attention backend of the draft.")
    moe_backend: str | None = Field(None, description="vLLM MoE backend of the draft.")
    sha256: Sha256 | None = Field(
        None, description="Expected SHA-256: of the single weights file, or a map file -> hash."
    )


class Models(Section):
    """Target, draft, and where they come from."""

    target_model: TargetModel = Field(description="The served model.")
    draft_model: DraftModel | None = Field(
        None, description="The proposer; absent for ngram, suffix and mtp."
    )
    store: FilePath | None = Field(
        None, description="Folder that `specserve models pull` fills; null is the Hub cache."
    )
    hub_token: Secret | None = Field(None, description="Hub token; prefer hub_token_file.")
    hub_token_file: FilePath | None = Field(None, description="File that holds the Hub token.")

    @property
    def token(self) -> str | None:
        """The Hub token in clear."""
        if self.hub_token is not None:
            return self.hub_token.get_secret_value()
        return None
