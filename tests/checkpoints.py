"""Checkpoints made by code: config.json, tokenizer.json, safetensors with the right shapes. One builder for all tests.

``write(folder, llama())`` writes a small language model; ``eagle``, ``eagle3``, ``medusa``, ``mlp_speculator``,
``dflash`` and ``mtp`` describe heads. Every part can be changed before it is written: ``config``, ``tensors``,
``tokenizer`` and ``files`` are plain dictionaries. ``sparse=True`` writes real shapes of any size as a file with holes.
"""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BITS = {"F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "I64": 64, "I32": 32, "I8": 8, "U8": 8}
Tensor = tuple[str, tuple[int, ...]]


@dataclass
class Checkpoint:
    """A checkpoint that is not written yet."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None
    tokenizer_config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)
    """Bytes of single tensors; all others are zeros."""

    def having(self, **changes: Any) -> Checkpoint:
        """A copy whose config has these keys; a value of None removes the key."""
        other = copy.deepcopy(self)
        other.config.update(changes)
        other.config = {k: v for k, v in other.config.items() if v is not None}
        return other


def llama(
    *,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate_size: int = 128,
    context: int = 2048,
    dtype: str = "BF16",
    tied: bool = False,
    **config: Any,
) -> Checkpoint:
    """A Llama with its tokenizer."""
    head_dim = hidden_size // heads
    body = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": (dtype, (vocab_size, hidden_size))}
    for i in range(layers):
        tensors |= layer(
            f"model.layers.{i}.",
            hidden_size,
            heads * head_dim,
            kv_heads * head_dim,
            intermediate_size,
            dtype,
        )
    tensors["model.norm.weight"] = (dtype, (hidden_size,))
    if not tied:
        tensors["lm_head.weight"] = (dtype, (vocab_size, hidden_size))
    return Checkpoint(body, tensors, tokenizer(min(vocab_size, 320)), tokenizer_config())


def small_llama(**changes: Any) -> Checkpoint:
    """A draft for ``llama()``: the same vocabulary, about a tenth of the size."""
    return llama(
        **{"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 64}
        | changes
    )


def layer(  # noqa: PLR0917
    prefix: str, hidden: int, q: int, kv: int, inner: int, dtype: str, *, fan_in: int | None = None
) -> dict[str, Tensor]:
    """The tensors of one Llama layer; ``fan_in`` widens what attention reads (EAGLE3)."""
    wide = fan_in or hidden
    return {
        prefix + "self_attn.q_proj.weight": (dtype, (q, wide)),
        prefix + "self_attn.k_proj.weight": (dtype, (kv, wide)),
        prefix + "self_attn.v_proj.weight": (dtype, (kv, wide)),
        prefix + "self_attn.o_proj.weight": (dtype, (hidden, q)),
        prefix + "mlp.gate_proj.weight": (dtype, (inner, hidden)),
        prefix + "mlp.up_proj.weight": (dtype, (inner, hidden)),
        prefix + "mlp.down_proj.weight": (dtype, (hidden, inner)),
        prefix + "input_layernorm.weight": (dtype, (hidden,)),
        prefix + "post_attention_layernorm.weight": (dtype, (hidden,)),
    }


def eagle(
    *, hidden_size: int = 64, vocab_size: int = 320, target_hidden: int | None = None, **config: Any
) -> Checkpoint:
    """An EAGLE head as its authors publish it: named like the target, one layer, ``fc`` of twice the width."""
    head = llama(hidden_size=hidden_size, vocab_size=vocab_size, layers=1, **config)
    dtype = "BF16"
    head.tensors = {
        "embed_tokens.weight": (dtype, (vocab_size, hidden_size)),
        "fc.weight": (dtype, (hidden_size, hidden_size + (target_hidden or hidden_size))),
        **layer("layers.0.", hidden_size, hidden_size, hidden_size // 2, 128, dtype),
    }
    head.tokenizer = head.tokenizer_config = None
    return head


def eagle3(
    *,
    hidden_size: int = 64,
    target_hidden: int = 64,
    vocab_size: int = 320,
    draft_vocab_size: int | None = 128,
    aux: int = 3,
    embed: bool = False,
    lm_head: bool = True,
    d2t: list[int] | None = None,
    **config: Any,
) -> Checkpoint:
    """An EAGLE3 head with a pruned vocabulary. ``d2t`` gives target id minus draft id for each draft id."""
    head = llama(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layers=1,
        architectures=["LlamaForCausalLMEagle3"],
    )
    rows = draft_vocab_size or vocab_size
    head.config |= {"draft_vocab_size": draft_vocab_size, "target_hidden_size": target_hidden}
    head.config |= config
    dtype = "BF16"
    head.tensors = {
        "fc.weight": (dtype, (hidden_size, aux * target_hidden)),
        **layer(
            "midlayer.",
            hidden_size,
            hidden_size,
            hidden_size // 2,
            128,
            dtype,
            fan_in=2 * hidden_size,
        ),
        "midlayer.hidden_norm.weight": (dtype, (hidden_size,)),
        "norm.weight": (dtype, (hidden_size,)),
    }
    if embed:
        head.tensors["embed_tokens.weight"] = (dtype, (vocab_size, hidden_size))
    if lm_head:
        head.tensors["lm_head.weight"] = (dtype, (rows, hidden_size))
    if draft_vocab_size is not None:
        offsets = (
            [2 * i - i for i in range(rows)] if d2t is None else d2t
        )  # draft id i is target id 2i
        head.tensors["d2t"] = ("I64", (len(offsets),))
        head.data["d2t"] = struct.pack(f"<{len(offsets)}q", *offsets)
        head.tensors["t2d"] = ("U8", (vocab_size,))
    head.tokenizer = head.tokenizer_config = None
    head.config = {k: v for k, v in head.config.items() if v is not None}
    return head


def speculators(
    head: Checkpoint, *, verifier: str, kind: str = "eagle3", **config: Any
) -> Checkpoint:
    """The same head in the format of the speculators library."""
    other = copy.deepcopy(head)
    inner = {
        k: v
        for k, v in other.config.items()
        if k not in ("architectures", "draft_vocab_size", "target_hidden_size")
    }
    other.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": inner,
        "draft_vocab_size": head.config.get("draft_vocab_size"),
        "target_hidden_size": head.config.get("target_hidden_size"),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        **config,
    }
    return other


def medusa(
    *, hidden_size: int = 64, vocab_size: int = 320, heads: int = 3, **config: Any
) -> Checkpoint:
    """Medusa heads in vLLM's own format."""
    body = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
    }
    body |= {"num_heads": heads, "num_hidden_layers": 1, "torch_dtype": "bfloat16", **config}
    tensors: dict[str, Tensor] = {}
    for i in range(heads):
        tensors[f"blocks.{i}.layers.0.weight"] = ("BF16", (hidden_size, hidden_size))
        tensors[f"lm_heads.{i}.weight"] = ("BF16", (vocab_size, hidden_size))
    return Checkpoint(body, tensors)


def mlp_speculator(
    *, emb_dim: int = 64, vocab_size: int = 320, n_predict: int = 3, **config: Any
) -> Checkpoint:
    """An MLP speculator."""
    body = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": emb_dim,
    }
    body |= {
        "inner_dim": 32,
        "n_predict": n_predict,
        "vocab_size": vocab_size,
        "top_k_tokens_per_head": [5] * n_predict,
    }
    body |= {"torch_dtype": "bfloat16", **config}
    tensors: dict[str, Tensor] = {
        f"speculator.head.{i}.weight": ("BF16", (vocab_size, 32)) for i in range(n_predict)
    }
    tensors |= {f"speculator.emb.{i}.weight": ("BF16", (vocab_size, 32)) for i in range(n_predict)}
    return Checkpoint(body, tensors)


def dflash(
    *, hidden_size: int = 64, vocab_size: int = 320, block_size: int = 8, **config: Any
) -> Checkpoint:
    """A DFlash head of one Qwen3 layer that reads two layers of the target."""
    head = llama(hidden_size=hidden_size, vocab_size=vocab_size, layers=1)
    head.config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
    }
    head.config |= {"dflash_config": {"mask_token_id": 319, "target_layer_ids": [1, 5]}, **config}
    head.tensors = {
        "fc.weight": ("BF16", (hidden_size, 2 * hidden_size)),
        "hidden_norm.weight": ("BF16", (hidden_size,)),
        "norm.weight": ("BF16", (hidden_size,)),
        **layer("layers.0.", hidden_size, hidden_size, hidden_size // 2, 128, "BF16"),
    }
    head.tokenizer = head.tokenizer_config = None
    return head


def with_mtp(*, modules: int = 1, with_weights: bool = True, **config: Any) -> Checkpoint:
    """A target that carries MTP modules as layers behind its own (GLM-4's layout)."""
    model = llama(
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        num_nextn_predict_layers=modules,
        **config,
    )
    for i in range(modules if with_weights else 0):
        model.tensors |= layer(f"model.layers.{8 + i}.", 64, 64, 32, 128, "BF16")
        model.tensors[f"model.layers.{8 + i}.eh_proj.weight"] = ("BF16", (64, 128))
    return model


def tokenizer(
    size: int = 320, *, swap: tuple[int, int] | None = None, added: dict[str, int] | None = None
) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json of ``size`` tokens: 3 specials, 256 bytes, then merges of letters.

    ``swap`` exchanges the ids of two tokens; ``added`` puts further special tokens in place of the last ones.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for symbol in _byte_alphabet():
        vocab[symbol] = len(vocab)
    merges = []
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = ((a, b) for a in ("Ġ", *letters) for b in letters)
    reserved = added or {}
    while len(vocab) < size - len(reserved):
        a, b = next(pairs)
        merges.append([a, b])
        vocab[a + b] = len(vocab)
    if swap:
        names = {i: t for t, i in vocab.items()}
        vocab[names[swap[0]]], vocab[names[swap[1]]] = swap[1], swap[0]
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, **reserved}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for t, i in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


def tokenizer_config(**changes: Any) -> dict[str, Any]:
    """What goes with ``tokenizer``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    } | changes


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(spare)) for b in range(256)]


def write(folder: Path, checkpoint: Checkpoint, *, shards: int = 1, sparse: bool = False) -> Path:
    """Write it and return the folder. ``shards`` > 1 splits the weights and adds the index."""
    folder.mkdir(parents=True, exist_ok=True)
    _json(folder / "config.json", checkpoint.config)
    for name, body in (
        ("tokenizer.json", checkpoint.tokenizer),
        ("tokenizer_config.json", checkpoint.tokenizer_config),
        ("generation_config.json", checkpoint.generation_config),
    ):
        if body is not None:
            _json(folder / name, body)
    names = list(checkpoint.tensors)
    if shards == 1 and names:
        write_safetensors(
            folder / "model.safetensors", checkpoint.tensors, checkpoint.data, sparse=sparse
        )
    elif names:
        _write_shards(folder, checkpoint, names, shards, sparse=sparse)
    for name, data in checkpoint.files.items():
        (folder / name).write_bytes(data)
    return folder


def _write_shards(
    folder: Path, checkpoint: Checkpoint, names: list[str], shards: int, *, sparse: bool
) -> None:
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: checkpoint.tensors[n] for n in names[i::shards]}
        write_safetensors(folder / file, part, checkpoint.data, sparse=sparse)
        weight_map |= dict.fromkeys(part, file)
    total = sum(nbytes(t) for t in checkpoint.tensors.values())
    _json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_safetensors(
    path: Path,
    tensors: dict[str, Tensor],
    data: dict[str, bytes] | None = None,
    *,
    sparse: bool = False,
) -> None:
    """One safetensors file. Data are zeros, or a hole with ``sparse``, where ``data`` gives none."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + nbytes(tensor)
        header[name] = {"dtype": tensor[0], "shape": list(tensor[1]), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        start = f.tell()
        f.truncate(start + offset) if sparse else f.write(bytes(offset))
        for name, body in (data or {}).items():
            if name in header:
                f.seek(start + header[name]["data_offsets"][0])
                f.write(body)


def nbytes(tensor: Tensor) -> int:
    """Bytes of one tensor."""
    n = BITS[tensor[0]]
    for side in tensor[1]:
        n *= side
    return n // 8


def _json(path: Path, body: Any) -> None:
    path.write_text(json.dumps(body), encoding="utf-8")
