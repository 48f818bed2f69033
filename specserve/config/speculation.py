"""``speculative_decoding``: whether, how, and how far to speculate.

Per-method keys carry vLLM's names.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, JsonValue, WithJsonSchema

from specserve.config.base import Positive, Ratio, Section

Method = Literal[
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "mlp_speculator",
    "ngram",
    "ngram_gpu",
    "suffix",
    "dflash",
    "dspark",
]
METHODS: tuple[str, ...] = get_args(Method)
FORMER_MTP = frozenset(
    {
        "bailing_hybrid_mtp",
        "bailing_hybrid_v3_mtp",
        "deepseek_mtp",
        "dots3_note_mtp",
        "ernie_mtp",
        "exaone4_5_mtp",
        "exaone_moe_mtp",
        "gemma4_mtp",
        "glm4_moe_lite_mtp",
        "glm4_moe_mtp",
        "glm5_next_mtp",
        "glm_ocr_mtp",
        "hy_v3_mtp",
        "hy_v4_mtp",
        "inkling_mtp",
        "kimi_k3_mtp",
        "longcat_flash_mtp",
        "mimo_mtp",
        "mimo_v2_mtp",
        "minimax_m3_mtp",
        "nemotron_h_mtp",
        "pangu_ultra_moe_mtp",
        "qwen3_5_mtp",
        "qwen3_next_mtp",
        "qwen4_exp_mtp",
        "step3p5_mtp",
    }
)
"""Older names of method ``mtp``, one per family of models: ``MTPModelTypes`` of vLLM 0.32
(``config/speculative.py``), which turns each of them into ``mtp`` with a warning.
"""


def _method(value: JsonValue) -> JsonValue:
    if isinstance(value, str) and value in FORMER_MTP:
        return "mtp"
    return value


WrittenMethod = Annotated[
    Method,
    BeforeValidator(_method),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(METHODS)},
                {"type": "string", "pattern": f"^({'|'.join(sorted(FORMER_MTP))})$"},
            ]
        }
    ),
]
"""A method as a file may write it."""
NEEDS_DRAFT = frozenset({"draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash"})
"""Methods whose proposer is a checkpoint of its own. mtp and dspark may carry theirs inside the
target.
"""
ScheduleRow = tuple[int, int, int]
"""First batch size, last batch size, tokens per draft."""
WIDEST_STEP = 4096
"""End of the last row of a schedule when ``engine.max_num_seqs`` is unset.

vLLM clips rows to its own limit and carries the last row on (``v1/spec_decode/dynamic/utils.py``),
and no default of its reaches this.
"""
DEFAULT_TOKENS = 5
"""Tokens per draft where neither the config nor a checkpoint names a number."""
SUFFIX_DEPTH = 24
"""vLLM's default of ``suffix_decoding_max_tree_depth``, and with it of the tokens per draft."""
WITHOUT_DRAFT = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods that look drafts up in text that is already there."""
CONTROLLABLE = frozenset({"ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"})
"""Methods whose drafts the live control can shorten (vLLM 0.32); the others draft one length only.
"""
SAME_DTYPE = {"half": "float16", "float": "float32"}
"""Second names of data types, with the first."""
ONLY_FOR = {
    "prompt_lookup_min": {"ngram", "ngram_gpu"},
    "prompt_lookup_max": {"ngram", "ngram_gpu"},
    "suffix_decoding_max_tree_depth": {"suffix"},
    "suffix_decoding_max_cached_requests": {"suffix"},
    "suffix_decoding_max_spec_factor": {"suffix"},
    "suffix_decoding_min_token_prob": {"suffix"},
    "use_heterogeneous_vocab": {"draft_model"},
}
"""Per-method keys and the methods that read them; under any other method they would be ignored in
silence.
"""


class SpeculativeDecoding(Section):
    """How drafts are made and when they are not."""

    enabled: bool = Field(True, description="false serves the target alone, from the same file.")
    method: WrittenMethod | None = Field(
        None,
        description=(
            "vLLM's method; null is what the draft's own config names, draft_model for a whole "
            "language model. vLLM's older names of "
            "mtp (deepseek_mtp, qwen3_next_mtp, ...) are taken as mtp."
        ),
    )
    num_speculative_tokens: Positive | None = Field(
        None,
        description=(
            "Tokens per draft; null is what the checkpoint gives (MTP modules, the block of DSpark "
            "and DFlash, heads), the tree's depth (24) for suffix, else 5."
        ),
    )
    max_batch_size: Positive | None = Field(
        None, description="Largest step batch that still speculates."
    )
    schedule: list[tuple[int, int, int]] | None = Field(
        None,
        description=(
            "Rows [first batch size, last batch size, tokens per draft]; replaces max_batch_size."
        ),
    )
    control: Literal["fixed", "schedule", "live"] | None = Field(
        None,
        description=(
            "What sets the tokens per draft while serving: fixed, the schedule, or live, which "
            "measures inside the engine. null is schedule where one is set, else fixed."
        ),
    )
    prompt_lookup_min: Positive | None = Field(
        None, description="ngram: shortest match that is looked up."
    )
    prompt_lookup_max: Positive | None = Field(
        None, description="ngram: longest match that is looked up."
    )
    suffix_decoding_max_tree_depth: Positive | None = Field(
        None, description="suffix: depth of the suffix trees."
    )
    suffix_decoding_max_cached_requests: int | None = Field(
        None, ge=0, description="suffix: requests kept in the global tree."
    )
    suffix_decoding_max_spec_factor: float | None = Field(
        None, gt=0, description="suffix: draft length per matched token."
    )
    suffix_decoding_min_token_prob: Ratio | None = Field(
        None, description="suffix: least estimated probability of a drafted token."
    )
    use_heterogeneous_vocab: bool | None = Field(
        None, description="draft_model: allow a draft with another vocabulary."
    )
    min_vocab_overlap_ratio: Ratio = Field(
        0.5, description="With use_heterogeneous_vocab: refuse below this shared part."
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = Field(
        None, description="How the draft picks its tokens."
    )
    rejection_sample_method: Literal["standard", "block"] | None = Field(
        None, description="How drafts are verified."
    )
    parallel_drafting: bool | None = Field(
        None, description="Draft all tokens in one forward pass (P-EAGLE and alike)."
    )
    disable_padded_drafter_batch: bool | None = Field(
        None, description="Draft only for the sequences that need it."
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] | None = Field(
        None,
        description=(
            "What the answer to each request says of its own drafts; where this vLLM has it, and "
            "only while speculating."
        ),
    )
    extra_config: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further keys of vLLM's SpeculativeConfig, passed through.",
    )
