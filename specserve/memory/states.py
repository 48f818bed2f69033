"""The recurrent state of one sequence, by family: gated delta net, Kimi delta attention, Mamba,
short convolution.

Shapes as in vLLM's model_executor/layers/mamba/mamba_utils.py (read in 0.32, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from specserve.checkpoint.fields import DTYPE_BYTES, Config, first_int
from specserve.memory.deployment import Shape


@dataclass(frozen=True)
class _Layout:
    """One layer's state on one GPU: the window of a convolution, and a recurrent matrix."""

    width: int
    taps: int
    matrix: int
    matrix_bytes: int | None = None
    """The family's own size of a value; None is that of the window."""
    keeps_drafts: bool = True
    """The window keeps draft tokens until they are verified."""


def state_bytes(config: Config, shape: Shape) -> int | None:
    """The recurrent state of one sequence in one layer on one GPU;
    None for a layout not known here.
    """
    layout = next(_layouts(config, shape.tp), None)
    if layout is None:
        return None
    conv = DTYPE_BYTES.get(shape.state_dtypes[0], shape.dtype_bytes)
    stated = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype"))
    value = DTYPE_BYTES.get(shape.state_dtypes[1]) or DTYPE_BYTES.get(stated)
    if value is None and shape.backend == "cpu" and shape.processor.has_avx512_bf16:
        value = 4
    elif value is None:
        value = layout.matrix_bytes or conv
    window = layout.taps - 1 + (shape.num_speculative_tokens if layout.keeps_drafts else 0)
    return layout.width * window * conv + layout.matrix * value


def _layouts(config: Config, tp: int) -> Iterator[_Layout]:
    number = partial(first_int, config)
    heads, keys, key_dim, value_dim, taps = (
        number(f"linear_{name}")
        for name in (
            "num_value_heads",
            "num_key_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel_dim",
        )
    )
    if heads and keys and key_dim and value_dim and taps:  # Qwen3-Next, Qwen3.5
        yield _Layout(
            (2 * key_dim * keys + value_dim * heads) // tp, taps, heads // tp * value_dim * key_dim
        )
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi Linear
        heads, dim = first_int(linear, "num_heads") or 0, first_int(linear, "head_dim") or 0
        yield _Layout(
            3 * heads * dim // tp,
            first_int(linear, "short_conv_kernel_size") or 4,
            heads // tp * dim**2,
            4,
        )
    heads, size = (
        number("mamba_num_heads", "mamba_n_heads"),
        number("ssm_state_size", "mamba_d_state", "state_size"),
    )
    if heads and size:  # Mamba 2
        dim, groups = (
            number("mamba_head_dim", "mamba_d_head") or 64,
            number("n_groups", "mamba_n_groups") or 1,
        )
        groups += 0 if groups % tp == 0 else tp - groups
        yield _Layout(
            (heads * dim + 2 * groups * size) // tp,
            number("conv_kernel", "mamba_d_conv") or 4,
            heads // tp * dim * size,
            4 if config.get("model_type") == "nemotron_h" else None,
        )
    expand, size, hidden = (
        number("mamba_expand"),
        number("mamba_d_state", "state_size"),
        number("hidden_size"),
    )
    if expand and size and hidden:  # Jamba
        inner = expand * hidden // tp
        yield _Layout(inner, number("mamba_d_conv") or 4, inner * size, keeps_drafts=False)
    taps, width = number("conv_L_cache"), number("conv_dim", "hidden_size")
    if taps and width:  # LFM2
        yield _Layout(width // tp, taps, 0)
    heads, dim = number("num_attention_heads"), number("head_dim") or 0
    if isinstance(config.get("attn_type_list"), list) and heads:  # MiniMax-01
        yield _Layout(0, 1, heads // tp * dim**2)
