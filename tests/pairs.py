"""Pairs of checkpoints and what the checks must say about each. Used by the unit tests and by the differential test.

``expect`` is the exact set of codes that are errors or warnings. ``near`` names the code whose near miss a pair is:
as close as possible, and that code must not be said.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import checkpoints as make
from tests.checkpoints import Checkpoint, llama, small_llama


@dataclass(frozen=True)
class Pair:
    """One pair under one configuration."""

    name: str
    draft: Checkpoint | None = None
    target: Checkpoint | None = None
    method: str | None = "draft_model"
    k: int = 3
    expect: frozenset[str] = frozenset()
    near: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    after: Callable[[Path], None] = lambda _folder: None
    """Damage done to the written folder, which holds ``target`` and ``draft``."""
    shards: int = 1

    def write(self, folder: Path) -> dict[str, Any]:
        """Write both checkpoints below a folder; the config as nested dictionaries."""
        make.write(folder / "target", self.target or llama(), shards=self.shards)
        models: dict[str, Any] = {"target_model": {"path": str(folder / "target")}}
        if self.draft is not None:
            make.write(folder / "draft", self.draft, shards=self.shards)
            models["draft_model"] = {"path": str(folder / "draft")}
        self.after(folder)
        spec = {
            "enabled": self.method is not None,
            "method": self.method,
            "num_speculative_tokens": self.k,
        }
        config: dict[str, Any] = {"models": models, "speculative_decoding": spec}
        for key, value in self.settings.items():
            *path, last = key.split(".")
            here = config
            for part in path:
                here = here.setdefault(part, {})
            here[last] = value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
        return config


def says(*codes: str) -> frozenset[str]:
    """The codes a pair must get."""
    return frozenset(codes)


def edited(checkpoint: Checkpoint, **parts: Any) -> Checkpoint:
    """A copy with other parts (``tokenizer=...``, ``tensors=...``)."""
    other = copy.deepcopy(checkpoint)
    for name, value in parts.items():
        setattr(other, name, value)
    return other


def without(checkpoint: Checkpoint, *names: str) -> Checkpoint:
    """A copy without the tensors whose name contains one of these."""
    return edited(
        checkpoint,
        tensors={n: t for n, t in checkpoint.tensors.items() if not any(p in n for p in names)},
    )


def tensor(checkpoint: Checkpoint, name: str, *shape: int, dtype: str = "BF16") -> Checkpoint:
    """A copy with one tensor of this shape."""
    return edited(checkpoint, tensors={**checkpoint.tensors, name: (dtype, shape)})


def _prefix_space(on: bool) -> Checkpoint:
    tokenizer = make.tokenizer()
    tokenizer["pre_tokenizer"]["add_prefix_space"] = on
    return edited(small_llama(), tokenizer=tokenizer)


def _renamed(share: float) -> dict[str, Any]:
    """A tokenizer of which this share of the tokens is written otherwise."""
    tokenizer = make.tokenizer()
    vocab = tokenizer["model"]["vocab"]
    names = list(vocab)
    for name in names[len(names) - int(share * len(names)) :]:
        vocab[f"{name}~"] = vocab.pop(name)
    tokenizer["model"]["merges"] = []
    return tokenizer


def _file(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def _remove(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def _truncate(name: str, by: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-by] if by else path.read_bytes())

    return cut


def _index(name: str) -> Callable[[Path], None]:
    def point(folder: Path) -> None:
        path = folder / "target" / "model.safetensors.index.json"
        body = json.loads(path.read_text())
        body["weight_map"][next(iter(body["weight_map"]))] = name
        path.write_text(json.dumps(body))

    return point


def _copy_target(folder: Path) -> None:
    shutil.rmtree(folder / "draft")
    shutil.copytree(folder / "target", folder / "draft")


def _pickled(folder: Path) -> None:
    (folder / "target/model.safetensors").rename(folder / "target/pytorch_model.bin")


def _gguf(folder: Path) -> None:
    (folder / "target/model.safetensors").rename(folder / "target/model.gguf")


DRAFT = small_llama()
WIDE = llama(hidden_size=128, heads=8, layers=8)
Q4 = {"quant_method": "gptq", "bits": 4}
CODE = {"AutoConfig": "configuration_my.MyConfig"}
MY_CODE = b"from transformers import LlamaConfig\n\n\nclass MyConfig(LlamaConfig):\n    model_type = 'my-llama'\n"


def reading() -> Iterator[Pair]:
    """What is on disk."""
    yield Pair("fits", DRAFT)
    yield Pair("no-speculation", None, method=None, near="checkpoint-missing")
    yield Pair(
        "no-folder",
        DRAFT,
        after=lambda f: shutil.rmtree(f / "target"),
        expect=says("checkpoint-missing"),
    )
    yield Pair(
        "no-config", DRAFT, after=_remove("target/config.json"), expect=says("config-missing")
    )
    yield Pair(
        "only-config-and-weights",
        DRAFT,
        near="config-missing",
        after=_remove("draft/tokenizer_config.json"),
    )
    yield Pair(
        "heads-in-words", small_llama(num_attention_heads="two"), expect=says("config-invalid")
    )
    yield Pair("heads-per-layer", small_llama(num_key_value_heads=2), near="config-invalid")
    yield Pair(
        "truncated",
        DRAFT,
        after=_truncate("target/model.safetensors", 1),
        expect=says("checkpoint-corrupt"),
    )
    yield Pair(
        "rewritten",
        DRAFT,
        after=_truncate("target/model.safetensors", 0),
        near="checkpoint-corrupt",
    )
    yield Pair(
        "config-not-json",
        DRAFT,
        after=_file("target/config.json", b"{"),
        expect=says("checkpoint-corrupt"),
    )
    yield Pair(
        "index-escapes",
        DRAFT,
        shards=2,
        after=_index("../../etc/passwd"),
        expect=says("checkpoint-unsafe-path"),
    )
    yield Pair("sharded", DRAFT, shards=3, near="checkpoint-unsafe-path")
    yield Pair(
        "shard-missing", DRAFT, shards=2, after=_remove("target/model-00002-of-00002.safetensors"),
        expect=says("weights-missing"),
    )  # fmt: skip
    yield Pair(
        "dummy-weights", edited(DRAFT, tensors={}), llama(), near="weights-missing",
        settings={"engine.extra_args": {"load-format": "dummy"}},
    )  # fmt: skip
    yield Pair("no-weights", edited(DRAFT, tensors={}), expect=says("weights-missing"))
    yield Pair("pickles", DRAFT, after=_pickled, expect=says("pickle-weights"))
    yield Pair(
        "pickles-beside",
        DRAFT,
        after=_file("target/pytorch_model.bin", b"x"),
        near="pickle-weights",
    )
    yield Pair("gguf", DRAFT, after=_gguf, expect=says("gguf-weights"))
    yield Pair("gguf-beside", DRAFT, after=_file("target/model.gguf", b"x"), near="gguf-weights")
    yield Pair(
        "draft-problem-behind-target", small_llama(num_hidden_layers=3),
        after=lambda f: shutil.rmtree(f / "target"), expect=says("checkpoint-missing", "layers-missing"),
    )  # fmt: skip


def vocabularies() -> Iterator[Pair]:
    """Which id means what."""
    swapped = make.tokenizer(swap=(280, 300))
    yield Pair("ids-swapped", edited(DRAFT, tokenizer=swapped), expect=says("vocab-tokens"))
    yield Pair(
        "both-swapped",
        edited(DRAFT, tokenizer=swapped),
        edited(llama(), tokenizer=swapped),
        near="vocab-tokens",
    )
    padded = small_llama(vocab_size=384)
    yield Pair("padding", padded, expect=says("vocab-size-padding"))
    yield Pair("same-padding", padded, llama(vocab_size=384), near="vocab-size-padding")
    yield Pair(
        "padding-allowed",
        padded,
        near="vocab-size",
        settings={"speculative_decoding.use_heterogeneous_vocab": True},
    )
    smaller = edited(small_llama(vocab_size=300), tokenizer=_renamed(0.2))
    yield Pair("other-family", smaller, expect=says("vocab-size", "vocab-tokens"))
    tool = make.tokenizer(added={"<|tool|>": 319})
    fewer = edited(llama(), tokenizer=make.tokenizer(319))
    yield Pair(
        "tool-token", edited(DRAFT, tokenizer=tool), fewer, expect=says("vocab-added-tokens")
    )
    yield Pair(
        "both-tool",
        edited(DRAFT, tokenizer=tool),
        edited(llama(), tokenizer=tool),
        near="vocab-added-tokens",
    )
    yield Pair("prefix-space", _prefix_space(True), expect=says("tokenizer-rules"))
    yield Pair("no-prefix-space", _prefix_space(False), near="tokenizer-rules")
    ends = edited(
        DRAFT.having(eos_token_id=1), tokenizer_config=make.tokenizer_config(eos_token="<s>")
    )
    yield Pair("other-end", ends, expect=says("special-tokens"))
    chat = edited(llama(), generation_config={"eos_token_id": [2, 3]})
    yield Pair("fewer-ends", DRAFT, chat, expect=says("special-tokens"))
    yield Pair(
        "more-ends",
        edited(DRAFT, generation_config={"eos_token_id": [2, 1]}),
        near="special-tokens",
    )
    chatml = edited(DRAFT, tokenizer_config=make.tokenizer_config(chat_template="{{ messages }}"))
    yield Pair("other-template", chatml, expect=says("chat-template"))
    same = make.tokenizer_config()["chat_template"] + "\n"
    yield Pair(
        "same-template",
        edited(DRAFT, tokenizer_config=make.tokenizer_config(chat_template=same)),
        near="chat-template",
    )
    hetero = {"speculative_decoding.use_heterogeneous_vocab": True}
    for name, share, expect in (
        ("overlap-low", 0.6, "vocab-overlap"),
        ("overlap-fair", 0.2, "vocab-overlap"),
        ("overlap-good", 0.05, None),
    ):
        draft = edited(DRAFT, tokenizer=_renamed(share))
        yield Pair(
            name,
            draft,
            settings=hetero,
            expect=says(expect) if expect else says(),
            near=None if expect else "vocab-overlap",
        )
    bare = make.tokenizer_config(unk_token=None, eos_token=None)
    yield Pair(
        "no-fallback",
        edited(DRAFT, tokenizer_config=bare),
        settings=hetero,
        expect=says("vocab-no-fallback"),
    )
    unk = make.tokenizer_config(eos_token=None)
    yield Pair(
        "unk-is-enough",
        edited(DRAFT, tokenizer_config=unk),
        settings=hetero,
        near="vocab-no-fallback",
    )
    yield Pair("no-tokenizer", edited(DRAFT, tokenizer=None), expect=says("tokenizer-missing"))
    yield Pair("eagle-without-tokenizer", make.eagle(), method="eagle", near="tokenizer-missing")
    yield Pair(
        "tokenizer-cut",
        DRAFT,
        after=_truncate("draft/tokenizer.json", 5),
        expect=says("tokenizer-corrupt"),
    )
    yield Pair(
        "tokenizer-whole",
        DRAFT,
        after=_truncate("draft/tokenizer.json", 0),
        near="tokenizer-corrupt",
    )


def heads() -> Iterator[Pair]:
    """EAGLE and EAGLE3."""
    yield Pair("eagle", make.eagle(), method="eagle", near="head-fc")
    yield Pair(
        "eagle-no-embedding",
        without(make.eagle(), "embed_tokens"),
        method="eagle",
        near="head-embedding",
    )
    yield Pair(
        "eagle-other-width",
        make.eagle(hidden_size=32),
        method="eagle",
        expect=says("head-hidden-size"),
    )
    yield Pair(
        "eagle-narrow-fc",
        tensor(make.eagle(), "fc.weight", 64, 64),
        method="eagle",
        expect=says("head-fc"),
    )
    yield Pair(
        "eagle-no-fc",
        without(make.eagle(architectures=["EagleLlamaForCausalLM"]), "fc."),
        method="eagle",
        expect=says("head-tensor-missing"),
    )
    yield Pair("eagle3-pruned", make.eagle3(), method="eagle3", near="head-d2t")
    yield Pair(
        "eagle3-full", make.eagle3(draft_vocab_size=None), method="eagle3", near="head-vocab-rows"
    )
    yield Pair(
        "eagle3-shares-all",
        make.eagle3(draft_vocab_size=None, lm_head=False),
        method="eagle3",
        near="head-tensor-missing",
    )
    yield Pair(
        "eagle3-own-width",
        make.eagle3(hidden_size=32, embed=True),
        method="eagle3",
        near="head-hidden-size",
    )
    yield Pair(
        "eagle3-for-other",
        make.eagle3(target_hidden=96),
        method="eagle3",
        expect=says("head-hidden-size"),
    )
    yield Pair(
        "eagle3-no-embedding",
        make.eagle3(hidden_size=32),
        method="eagle3",
        expect=says("head-embedding"),
    )
    yield Pair("eagle3-two-layers", make.eagle3(aux=2), method="eagle3", expect=says("head-fc"))
    two = make.eagle3(aux=2, eagle_aux_hidden_state_layer_ids=[2, 6])
    yield Pair("eagle3-names-two", two, method="eagle3", near="head-aux-layers")
    far = make.eagle3(eagle_aux_hidden_state_layer_ids=[2, 6, 31])
    yield Pair("eagle3-far-layer", far, method="eagle3", expect=says("head-aux-layers"))
    yield Pair(
        "eagle3-shallow-target",
        make.eagle3(),
        llama(layers=4),
        method="eagle3",
        expect=says("head-aux-layers"),
    )
    yield Pair(
        "eagle3-no-d2t", without(make.eagle3(), "d2t"), method="eagle3", expect=says("head-d2t")
    )
    ids = list(range(128))
    yield Pair(
        "eagle3-d2t-outside",
        make.eagle3(d2t=[*ids[:-1], 300]),
        method="eagle3",
        expect=says("head-d2t"),
    )
    yield Pair(
        "eagle3-d2t-twice",
        make.eagle3(d2t=[0, -1, *ids[2:]]),
        method="eagle3",
        expect=says("head-d2t"),
    )
    yield Pair(
        "eagle3-d2t-short", make.eagle3(d2t=ids[:100]), method="eagle3", expect=says("head-d2t")
    )
    yield Pair(
        "eagle3-no-lm-head",
        make.eagle3(lm_head=False),
        method="eagle3",
        expect=says("head-tensor-missing"),
    )
    yield Pair(
        "eagle3-lm-head-rows",
        tensor(make.eagle3(), "lm_head.weight", 100, 64),
        method="eagle3",
        expect=says("head-vocab-rows"),
    )
    yield Pair(
        "eagle3-other-vocab",
        make.eagle3(vocab_size=352),
        method="eagle3",
        expect=says("head-vocab-size"),
    )
    yield Pair("head-as-model", make.eagle3(), expect=says("head-as-model"))
    yield Pair("small-model", small_llama(layers=1), near="head-as-model")
    alone = make.speculators(make.eagle3(), verifier="meta/target")
    yield Pair("head-as-target", None, alone, method=None, expect=says("head-as-target"))
    yield Pair("model-as-target", None, llama(), method=None, near="head-as-target")
    yield Pair("model-as-head", DRAFT, method="eagle3", expect=says("model-as-head"))
    yield Pair("eagle3-as-head", make.eagle3(), method="eagle3", near="model-as-head")
    yield Pair("eagle3-as-eagle", make.eagle3(), method="eagle", expect=says("head-kind"))
    yield Pair("eagle3-as-eagle3", make.eagle3(), method="eagle3", near="head-kind")
    spec = make.speculators(make.eagle3(), verifier="meta/target")
    yield Pair("speculators", spec, method="eagle3", near="head-verifier")
    yield Pair(
        "speculators-other",
        make.speculators(make.eagle3(), verifier="meta/Llama-3"),
        method="eagle3",
        expect=says("head-verifier"),
    )
    card = b"---\nlicense: mit\nbase_model:\n- meta/Llama-3\n---\n# A head\n"
    yield Pair(
        "card-other",
        edited(make.eagle3(), files={"README.md": card}),
        method="eagle3",
        expect=says("head-verifier"),
    )
    card = b"---\nbase_model: 'meta/target'\n---\nbase_model: meta/Llama-3\n"
    yield Pair(
        "card",
        edited(make.eagle3(), files={"README.md": card}),
        method="eagle3",
        near="head-verifier",
    )
    yield Pair(
        "speculators-bare",
        spec.having(transformer_layer_config=None),
        method="eagle3",
        expect=says("head-config"),
    )
    yield Pair("speculators-known", spec, method="eagle3", near="head-config")


def other_heads() -> Iterator[Pair]:
    """Medusa, MLP speculator, DFlash, MTP, parallel drafting."""
    yield Pair("medusa", make.medusa(), method="medusa", near="head-too-few")
    yield Pair("medusa-too-far", make.medusa(), method="medusa", k=4, expect=says("head-too-few"))
    yield Pair(
        "medusa-other-width",
        make.medusa(hidden_size=32),
        method="medusa",
        expect=says("head-hidden-size"),
    )
    yield Pair(
        "medusa-other-vocab",
        make.medusa(vocab_size=330),
        method="medusa",
        expect=says("head-vocab-size"),
    )
    yield Pair(
        "medusa-same-vocab", make.medusa(vocab_size=320), method="medusa", near="head-vocab-size"
    )
    yield Pair(
        "medusa-no-map",
        make.medusa(truncated_vocab_size=100),
        method="medusa",
        expect=says("head-tensor-missing"),
    )
    yield Pair("mlp", make.mlp_speculator(), method="mlp_speculator", near="head-too-few")
    yield Pair(
        "mlp-too-far",
        make.mlp_speculator(),
        method="mlp_speculator",
        k=5,
        expect=says("head-too-few"),
    )
    yield Pair(
        "mlp-odd",
        make.mlp_speculator(top_k_tokens_per_head=[5]),
        method="mlp_speculator",
        expect=says("head-config"),
    )
    yield Pair("dflash", make.dflash(), method="dflash", k=7, near="head-block-size")
    yield Pair(
        "dflash-too-far", make.dflash(), method="dflash", k=8, expect=says("head-block-size")
    )
    unmasked = make.dflash(dflash_config={"target_layer_ids": [1, 5]})
    yield Pair("dflash-no-mask", unmasked, method="dflash", expect=says("head-config"))
    deep = make.dflash(dflash_config={"mask_token_id": 319, "target_layer_ids": [1, 50]})
    yield Pair("dflash-deep", deep, method="dflash", expect=says("head-aux-layers"))
    at_once = {"speculative_decoding.parallel_drafting": True}
    yield Pair("parallel", DRAFT, settings=at_once, expect=says("mask-token-missing"))
    yield Pair(
        "parallel-with-mask",
        DRAFT.having(pard_token=319),
        settings=at_once,
        near="mask-token-missing",
    )
    yield Pair("mtp", None, make.with_mtp(), method="mtp", k=1, near="mtp-modules-missing")
    yield Pair(
        "mtp-reused", None, make.with_mtp(), method="mtp", k=2, expect=says("mtp-module-reuse")
    )
    yield Pair(
        "mtp-plain-target", None, llama(), method="mtp", k=1, expect=says("mtp-modules-missing")
    )
    yield Pair(
        "mtp-dropped",
        None,
        make.with_mtp(with_weights=False),
        method="mtp",
        k=1,
        expect=says("mtp-weights-missing"),
    )
    yield Pair(
        "mtp-kept", None, make.with_mtp(modules=2), method="mtp", k=2, near="mtp-weights-missing"
    )
    yield Pair(
        "mtp-odd", None, make.with_mtp(modules=2), method="mtp", k=3, expect=says("mtp-multiple")
    )
    yield Pair(
        "mtp-even",
        None,
        make.with_mtp(modules=2),
        method="mtp",
        k=4,
        near="mtp-multiple",
        expect=says("mtp-module-reuse"),
    )
    yield Pair(
        "mtp-once", None, make.with_mtp(modules=2), method="mtp", k=2, near="mtp-module-reuse"
    )
    yield Pair("ngram", None, method="ngram", near="mtp-modules-missing")


def shapes() -> Iterator[Pair]:
    """Config against headers, against the layout, against one another."""
    rows = edited(small_llama(vocab_size=312).having(vocab_size=320), tokenizer=make.tokenizer())
    yield Pair("edited-vocab", rows, expect=says("vocab-rows"))
    yield Pair("tied", small_llama(tied=True), near="vocab-rows")
    yield Pair("edited-layers", small_llama(num_hidden_layers=3), expect=says("layers-missing"))
    yield Pair("all-layers", small_llama(layers=3), near="layers-missing")
    tp = {"models.target_model.tensor_parallel_size": 4}
    yield Pair("tp-draft-heads", DRAFT, settings=tp, expect=says("tp-divisible"))
    yield Pair("tp-fits", small_llama(heads=4, kv_heads=2), settings=tp, near="tp-divisible")
    yield Pair(
        "tp-kv-heads",
        small_llama(heads=4, kv_heads=4),
        llama(heads=12, kv_heads=3, hidden_size=96),
        settings=tp,
        expect=says("tp-divisible"),
    )
    q = {"models.draft_model.quantization": "awq"}
    yield Pair(
        "quantization",
        DRAFT.having(quantization_config=Q4),
        settings=q,
        expect=says("quantization-mismatch"),
    )
    q = {"models.draft_model.quantization": "gptq_marlin"}
    yield Pair(
        "quantization-kernel",
        DRAFT.having(quantization_config=Q4),
        settings=q,
        near="quantization-mismatch",
    )
    trust = {"models.target_model.trust_remote_code": True}
    bare = DRAFT.having(auto_map=CODE, model_type="my-llama")
    custom = edited(bare, files={"configuration_my.py": MY_CODE})
    yield Pair("own-code", custom, expect=says("remote-code"))
    yield Pair("own-code-trusted", custom, settings=trust, near="remote-code")
    yield Pair("own-code-absent", bare, settings=trust, expect=says("remote-code"))
    yield Pair("needless-code", DRAFT.having(auto_map=CODE), near="remote-code")
    yield Pair(
        "unknown-type", DRAFT.having(model_type="my-llama"), expect=says("model-type-unknown")
    )
    yield Pair("known-type", DRAFT.having(model_type="llama"), near="model-type-unknown")
    yield Pair("itself", DRAFT, after=_copy_target, expect=says("draft-is-target"))
    yield Pair(
        "same-shape",
        llama(torch_dtype="float32"),
        near="draft-is-target",
        expect=says("size-ratio"),
    )
    yield Pair(
        "tiny-draft",
        small_llama(layers=1),
        llama(hidden_size=256, layers=32, intermediate_size=1024),
        near="size-ratio",
    )
    yield Pair(
        "tiny-draft-of-another-family",
        small_llama(layers=1).having(model_type="qwen3"),
        llama(hidden_size=256, layers=32, intermediate_size=1024),
        expect=says("size-ratio"),
    )
    yield Pair("fair-draft", DRAFT, llama(layers=4), near="size-ratio")
    yield Pair("short-draft", small_llama(context=512), expect=says("draft-context"))
    yield Pair(
        "short-service",
        small_llama(context=512),
        settings={"engine.max_model_len": 512},
        near="draft-context",
    )
    yield Pair(
        "short-head",
        make.eagle3(max_position_embeddings=512),
        method="eagle3",
        expect=says("draft-context"),
    )
    yield Pair(
        "draft-limit",
        DRAFT,
        settings={"models.draft_model.max_model_len": 4096},
        expect=says("draft-max-model-len"),
    )
    yield Pair(
        "draft-limit-legal",
        DRAFT,
        settings={"models.draft_model.max_model_len": 1024},
        near="draft-max-model-len",
    )
    yield Pair(
        "too-long",
        DRAFT,
        settings={"engine.max_model_len": 4096},
        expect=says("context-too-long", "draft-context"),
    )
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    yield Pair(
        "scaled-rope",
        small_llama(rope_parameters=linear),
        llama(rope_parameters=linear),
        settings={"engine.max_model_len": 4096},
        near="context-too-long",
    )
    mrope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    yield Pair("mrope", small_llama(rope_parameters=mrope), expect=says("draft-mrope"))
    yield Pair("mrope-target", DRAFT, llama(rope_parameters=mrope), near="draft-mrope")

    half = {"models.target_model.dtype": "float16"}
    gemma = llama(
        architectures=["Gemma2ForCausalLM"], model_type="gemma2", query_pre_attn_scalar=16
    )
    yield Pair(
        "gemma-half", None, gemma, method="ngram", settings=half, expect=says("dtype-unsupported")
    )
    yield Pair("gemma", None, gemma, method="ngram", near="dtype-unsupported")
    yield Pair("half", DRAFT, settings=half, near="dtype-unsupported")


def defaults() -> Iterator[Pair]:
    """generation_config.json and hashes."""
    min_p = edited(llama(), generation_config={"min_p": 0.05})
    yield Pair("min-p", DRAFT, min_p, expect=says("sampling-rejected"))
    yield Pair("min-p-alone", None, min_p, method=None, near="sampling-rejected")
    ignore = {"engine.extra_args": {"generation-config": "vllm"}}
    yield Pair("min-p-ignored", DRAFT, min_p, settings=ignore, near="sampling-rejected")
    hot = edited(llama(), generation_config={"temperature": 1.0, "do_sample": True})
    yield Pair("hot", DRAFT, hot, expect=says("sampling-temperature"))
    yield Pair("hot-lookup", None, hot, method="ngram", near="sampling-temperature")
    yield Pair(
        "warm",
        DRAFT,
        edited(llama(), generation_config={"temperature": 0.6}),
        near="sampling-temperature",
    )
    wrong = {"models.draft_model.sha256": "0" * 64}
    yield Pair("hash", DRAFT, settings=wrong, expect=says("sha256-mismatch"))
    yield Pair("hash-of-shards", DRAFT, shards=2, settings=wrong, expect=says("sha256-unusable"))
    yield Pair(
        "hash-outside",
        DRAFT,
        settings={"models.draft_model.sha256": {"../x": "0" * 64}},
        expect=says("sha256-unusable"),
    )
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    yield Pair(
        "hash-right",
        DRAFT,
        after=_file("draft/empty", b""),
        settings={"models.draft_model.sha256": {"empty": empty}},
        near="sha256-mismatch",
    )
    yield Pair(
        "hash-usable",
        DRAFT,
        after=_file("draft/empty", b""),
        settings={"models.draft_model.sha256": {"empty": empty.upper()}},
        near="sha256-unusable",
    )


PAIRS = [*reading(), *vocabularies(), *heads(), *other_heads(), *shapes(), *defaults()]
