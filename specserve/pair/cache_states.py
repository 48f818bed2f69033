"""The recurrent state of one sequence, by family: gated delta net, Kimi delta attention, Mamba, short convolution.

Shapes as in vLLM's model_executor/layers/mamba/mamba_utils.py (read in 0.32, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specserve.pair.fields import DTYPE_BYTES, Config, first_int
from specserve.pair.shape import Shape


def state_bytes(config: Config, shape: Shape, tp: int) -> int | None:
    """The recurrent state of one sequence in one layer on one GPU; None for a layout not known here."""
    conv = DTYPE_BYTES.get(shape.state_dtypes[0], shape.dtype_bytes)
    stated = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype"))
    ssm = DTYPE_BYTES.get(shape.state_dtypes[1]) or DTYPE_BYTES.get(stated)
    if ssm is None and shape.backend == "cpu":
        ssm = 4  # the accelerated kernels of the CPU backend keep float32 states
    state = _State(tp, conv, ssm, shape.num_speculative_tokens)
    for layout in (_delta_net, _kimi_delta, _mamba2, _mamba1, _short_convolution, _lightning):
        found = layout(config, state)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class _State:
    """What a state's size depends on besides the model."""

    tp: int
    conv: int
    """Bytes of a value of the convolution's window."""
    ssm: int | None
    """Bytes of a value of the recurrent matrix; None is the family's default."""
    drafted: int
    """Tokens per draft: the window keeps them until they are verified."""


def _delta_net(config: Config, state: _State) -> int | None:
    """Qwen3-Next, Qwen3.5: gated delta net."""
    names = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
             "linear_conv_kernel_dim")  # fmt: skip
    heads, keys, key_dim, value_dim, taps = (first_int(config, name) for name in names)
    if not heads or not keys or not key_dim or not value_dim or not taps:
        return None
    window = (2 * key_dim * keys + value_dim * heads) // state.tp * (taps - 1 + state.drafted)
    return window * state.conv + heads // state.tp * value_dim * key_dim * (state.ssm or state.conv)


def _kimi_delta(config: Config, state: _State) -> int | None:
    """Kimi Linear: float32 unless told otherwise."""
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        return None
    heads, dim = first_int(linear, "num_heads"), first_int(linear, "head_dim")
    if not heads or not dim:
        return None
    taps = (first_int(linear, "short_conv_kernel_size") or 4) - 1 + state.drafted
    return 3 * heads * dim // state.tp * taps * state.conv + heads // state.tp * dim * dim * (state.ssm or 4)


def _mamba2(config: Config, state: _State) -> int | None:
    heads = first_int(config, "mamba_num_heads", "mamba_n_heads")
    size = first_int(config, "ssm_state_size", "mamba_d_state", "state_size")
    if not heads or not size:
        return None
    dim = first_int(config, "mamba_head_dim", "mamba_d_head") or 64
    groups = first_int(config, "n_groups", "mamba_n_groups") or 1
    groups += 0 if groups % state.tp == 0 else state.tp - groups
    taps = (first_int(config, "conv_kernel", "mamba_d_conv") or 4) - 1 + state.drafted
    temporal = state.ssm or (4 if config.get("model_type") == "nemotron_h" else state.conv)
    window = (heads * dim + 2 * groups * size) // state.tp * taps * state.conv
    return window + heads // state.tp * dim * size * temporal


def _mamba1(config: Config, state: _State) -> int | None:
    """Jamba."""
    expand, size = first_int(config, "mamba_expand"), first_int(config, "mamba_d_state", "state_size")
    hidden = first_int(config, "hidden_size")
    if not expand or not size or not hidden:
        return None
    inner = expand * hidden // state.tp
    return inner * ((first_int(config, "mamba_d_conv") or 4) - 1) * state.conv + inner * size * (
        state.ssm or state.conv
    )


def _short_convolution(config: Config, state: _State) -> int | None:
    """LFM2."""
    taps, width = first_int(config, "conv_L_cache"), first_int(config, "conv_dim", "hidden_size")
    return width // state.tp * (taps - 1 + state.drafted) * state.conv if taps and width else None


def _lightning(config: Config, state: _State) -> int | None:
    """MiniMax-01: float32 matrices of head_dim squared."""
    if not isinstance(config.get("attn_type_list"), list):
        return None
    heads, dim = first_int(config, "num_attention_heads"), first_int(config, "head_dim")
    return heads // state.tp * dim * dim * 4 if heads and dim else None
