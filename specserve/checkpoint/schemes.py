"""How each module of a quantized checkpoint is stored: bits and scales, and what is left alone.

A list of exceptions can have thousands of entries, so plain names are looked up and only what is
truly a pattern is matched, and that only against the layer it names. Formats as vLLM 0.32 reads
them (``model_executor/layers/quantization``, read 2026-12-01).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.checkpoint.fields import Config, first_int

if TYPE_CHECKING:
    from pydantic import JsonValue

_WRAPPER = re.compile(r"^(?:model|language_model|backbone|transformer|text_model|thinker)\.")
_LAYER = re.compile(r"layers\\?\.(\d{1,6})(?:\\?\.|\*|$)")
_SYNONYMS = {
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "ffn": "mlp",
    "shared_experts": "shared_expert",
    "attn": "self_attn",
}
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Fused modules in a list of exceptions, and what a checkpoint stores for them."""
_STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj",
            "w3": "gate_up_proj", "w2": "down_proj"}  # fmt: skip
"""An expert's own matrices, and the stack of all experts' that they are part of."""
_EXCEPTIONS = (
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "exclude_modules",
    "llm_int8_skip_modules",
    "exclude",
)
_LONGEST_PATTERN = 300
_MOST_PATTERNS = 4096


@dataclass(frozen=True)
class Scheme:
    """Bits of a packed weight, and how many weights share a 16-bit scale (0: a row shares one)."""

    bits: int
    group: int = 0
    mxfp4: bool = False
    """Blocks and scales of their own names, for experts alone."""


@dataclass(frozen=True)
class _Patterns:
    """Names of modules, in every spelling of an exceptions list."""

    names: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    """Names without a dot: any part of a path may be one."""
    by_layer: Mapping[int | None, tuple[re.Pattern[str], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: Iterator[str]) -> _Patterns:
        names: set[str] = set()
        words: set[str] = set()
        odd: dict[int | None, list[re.Pattern[str]]] = {}
        for n, text in enumerate(dict.fromkeys(texts)):
            if text.startswith("re:") or re.search(r"[*?\[]", text.removesuffix("*")):
                layer = _LAYER.search(text)
                at = int(layer[1]) if layer else None
                if n < _MOST_PATTERNS and (pattern := _compiled(text)) is not None:
                    odd.setdefault(at, []).append(pattern)
                continue
            name = text.removesuffix("*").removesuffix(".")
            for one in _spellings(canonical(name)):
                names.add(one)
                if "." not in one:
                    words.add(one)
        by_layer = {at: tuple(found) for at, found in odd.items()}
        return cls(frozenset(names), frozenset(words), by_layer)

    def have(self, module: str, raw: str) -> bool:
        """Whether a module, or what holds it, is named. ``raw`` is its name as tensors have it."""
        if any(part in self.names for part in _ancestors(module)):
            return True
        if any(part in self.words for part in module.split(".")):
            return True
        if not self.by_layer:
            return False
        layer = _LAYER.search(module)
        own = self.by_layer.get(int(layer[1]), ()) if layer else ()
        patterns = (*own, *self.by_layer.get(None, ()))
        variants = _variants(module, raw)
        return any(pattern.match(name) for pattern in patterns for name in variants)


@dataclass(frozen=True)
class Quantization:
    """The whole answer of a checkpoint: which module is stored how."""

    usual: Scheme | None
    """Of every linear layer that nothing else is said about; None leaves it in 16 bits."""
    left_alone: _Patterns = field(default_factory=_Patterns)
    named: Mapping[str, Scheme] = field(default_factory=dict)
    """Modules with a scheme of their own (mixed precision), by canonical name."""
    groups: tuple[tuple[_Patterns, Scheme], ...] = ()
    """Targets of compressed-tensors' groups, first match first; without, the usual one."""
    experts: Scheme | None = None
    """Routed experts, where they have another precision than the rest."""
    experts_only: bool = False

    def scheme(self, name: str, *, expert: bool = False) -> Scheme | None:
        """How a linear layer's weight is stored; None: as it was, in 16 bits.

        ``name`` is the tensor's, without ``.weight``.
        """
        module = canonical(name)
        for part in _ancestors_from_start(module):
            if (found := self.named.get(part)) is not None:
                return found
        if expert and self.experts is not None:
            return self.experts
        if self.experts_only and not expert:
            return None
        if self.left_alone.have(module, name):
            return None
        for targets, scheme in self.groups:
            if targets.have(module, name):
                return scheme
        return self.usual


def of_section(section: Config, config: Config | None = None) -> Quantization:
    """From the quantization section of a checkpoint (see ``quantization_section``).

    >>> made = of_section({"quant_method": "modelopt", "quant_algo": "NVFP4",
    ...   "ignore": ["model.layers.3.self_attn*", "lm_head"]})
    >>> made.scheme("model.layers.3.self_attn.o_proj"), made.scheme("model.layers.4.mlp.up_proj")
    (None, Scheme(bits=4, group=32, mxfp4=False))
    """
    if not section:
        return Quantization(None)
    method = str(section.get("quant_method") or "").lower()
    patterns = _Patterns.of(exceptions(section))
    named = _named(section.get("quantized_layers"))
    usual = _scheme(section, method)
    experts = None
    if config is not None and _experts_in_fp4(section, config, method):
        experts = Scheme(4, 64)
    if named:
        if method != "fp8":  # modules that are not named are left alone
            return Quantization(None, named=named)
        return Quantization(_scheme({"weight_block_size": True}, "fp8"), named=named)
    if method in {"mxfp4", "gpt_oss_mxfp4"}:
        return Quantization(Scheme(4, 64, mxfp4=True), patterns, experts_only=True)
    if method in {"experts_int8", "moe_wna16"}:
        return Quantization(usual, patterns, experts_only=True)
    groups = tuple(_groups(section.get("config_groups"), usual))
    if not groups:
        return Quantization(usual, patterns, experts=experts)
    of_all = [scheme for targets, scheme in groups if not targets.names and not targets.by_layer]
    of_some = tuple(g for g in groups if g[0].names or g[0].by_layer)
    return Quantization(next(iter(of_all), None), patterns, groups=of_some, experts=experts)


def exceptions(section: Config) -> Iterator[str]:
    """What the quantization leaves alone, as it is written."""
    for key in _EXCEPTIONS:
        listed = section.get(key)
        if isinstance(listed, list):
            yield from (text for text in listed if isinstance(text, str))
    dynamic = section.get("dynamic")
    if isinstance(dynamic, Mapping):  # GPTQModel: "-:" leaves alone what the pattern names
        yield from (f"re:{key[2:]}" for key in dynamic if key.startswith("-:"))


def canonical(name: str) -> str:
    """A module's name without what families wrap around it, one spelling for all.

    >>> canonical("model.language_model.layers.2.block_sparse_moe.experts.7.w1.weight")
    'layers.2.mlp.experts.gate_up_proj'
    >>> canonical("backbone.layers.0.mixer.in_proj"), canonical("head")
    ('layers.0.mixer.in_proj', 'lm_head')
    """
    name = name.removesuffix(".weight")
    while found := _WRAPPER.match(name):
        name = name[found.end() :]
    if name in {"head", "output"}:
        return "lm_head"
    parts = [_SYNONYMS.get(part, part) for part in name.split(".")]
    if "experts" in parts:
        at = parts.index("experts") + 1
        parts = [p for i, p in enumerate(parts) if i != at or not p.isdigit()]
        parts[at:] = [_STACKED.get(part, part) for part in parts[at:]]
    return ".".join(parts)


def _spellings(name: str) -> Iterator[str]:
    """The module; for a fused one, what a checkpoint stores for it."""
    stem, _, leaf = name.rpartition(".")
    yield name
    if not stem.endswith("experts"):
        yield from (f"{stem}.{part}" for part in _PARTS.get(leaf, ()))


def _ancestors(module: str) -> Iterator[str]:
    """The module's path, what holds it, and the ends of both: "mlp.gate" for any layer's."""
    parts = module.split(".")
    for start, first in enumerate(parts):
        if start and first == "layers":  # layer 0 of an MTP module is not the model's
            continue
        for end in range(start + 2, len(parts) + 1):
            yield ".".join(parts[start:end])


def _ancestors_from_start(module: str) -> Iterator[str]:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


def _variants(module: str, raw: str) -> list[str]:
    """Names under which a pattern may mean a module."""
    names = [raw, module, f"model.{module}", f"language_model.model.{module}",
             f"model.language_model.{module}"]  # fmt: skip
    if ".experts." in module:
        stem, _, leaf = module.rpartition(".experts.")
        one = next((k for k, v in _STACKED.items() if v == leaf), leaf)
        names += [f"{stem}.experts.0.{one}", f"model.{stem}.experts.0.{one}"]
    return names


def _compiled(text: str) -> re.Pattern[str] | None:
    if len(text) > _LONGEST_PATTERN:
        return None
    if text.startswith("re:"):
        source = text[3:]
    else:
        source = fnmatch.translate(text)
    try:
        return re.compile(source)
    except re.error:
        return None


def _named(listed: JsonValue) -> dict[str, Scheme]:
    """``quantized_layers`` of mixed precision, by canonical name."""
    found: dict[str, Scheme] = {}
    if isinstance(listed, Mapping):
        for name, how in listed.items():
            if isinstance(how, Mapping):
                found[canonical(name)] = of_algorithm(how.get("quant_algo"), how)
    return found


def of_algorithm(name: JsonValue, section: Config) -> Scheme:
    """One of ModelOpt's algorithms.

    >>> of_algorithm("W4A16_NVFP4", {"group_size": 16}), of_algorithm("FP8", {})
    (Scheme(bits=4, group=32, mxfp4=False), Scheme(bits=8, group=0, mxfp4=False))
    """
    text = str(name or "").lower()
    if "mxfp4" in text:
        return Scheme(4, 64)
    if "fp4" in text:  # one fp8 scale for 16 weights weighs as a 16-bit one for 32
        return Scheme(4, 32)
    if "mxfp8" in text:
        return Scheme(8, 64)
    if text.startswith("w4") or "int4" in text or "awq" in text:
        return Scheme(4, first_int(section, "group_size") or 128)
    if "pb" in text:  # blocks of 128 x 128 with a float32 scale
        return Scheme(8, 8192)
    return Scheme(8)


def _scheme(section: Config, method: str) -> Scheme:
    algorithm = section.get("quant_algo")
    if algorithm and str(algorithm).upper() != "MIXED_PRECISION":
        return of_algorithm(algorithm, section)
    quark = section.get("global_quant_config")
    if isinstance(quark, Mapping) and isinstance(weight := quark.get("weight"), Mapping):
        return of_algorithm(weight.get("dtype"), weight)
    bits = first_int(section, "num_bits", "bits", "w_bit")
    if bits is not None:
        return _grouped(section, bits)
    if "fp4" in method:
        return of_algorithm(method, section)
    if section.get("load_in_4bit"):
        return Scheme(4, 32)
    if method in {"awq", "gptq", "auto-round"}:
        return Scheme(4, first_int(section, "group_size") or 128)
    if "mxfp8" in method:
        return Scheme(8, 64)
    return Scheme(8, 8192 if section.get("weight_block_size") else 0)


def _grouped(section: Config, bits: int) -> Scheme:
    group = first_int(section, "group_size") or 0
    if section.get("type") == "float" and bits == 4:  # 8-bit scales, NVFP4's for 16 weights
        return Scheme(bits, 2 * (group or 16))
    return Scheme(bits, group)


def _groups(groups: JsonValue, usual: Scheme) -> Iterator[tuple[_Patterns, Scheme]]:
    """compressed-tensors: what each group is for (nothing: every linear layer), and its scheme."""
    if not isinstance(groups, Mapping):
        return
    for group in groups.values():
        if not isinstance(group, Mapping):
            continue
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            continue
        bits = first_int(weights, "num_bits")
        scheme = usual
        if bits is not None:
            scheme = _grouped(weights, bits)
        targets = group.get("targets")
        names = [t for t in targets if isinstance(t, str)] if isinstance(targets, list) else []
        if "Linear" in names:
            names = []
        yield _Patterns.of(iter(names)), scheme


def _experts_in_fp4(section: Config, config: Config, method: str) -> bool:
    """MXFP4 experts beside an FP8 rest: the config says so, or DeepSeek V4 leaves it out."""
    stated = config.get("expert_dtype", section.get("expert_dtype"))
    if stated is None and str(config.get("model_type")).startswith("deepseek_v4"):
        return method in {"fp8", "deepseek_v4_fp8"}
    return "fp4" in str(stated)
