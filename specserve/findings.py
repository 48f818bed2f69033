"""What a check found, in the one shape that every check returns, and every code with its cause and
remedy.

``docs/checks.md`` is the table of codes; a test keeps both in step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specserve.errors import Change, Problem

if TYPE_CHECKING:
    from pydantic import JsonValue

Severity = Literal["error", "warning", "info"]
Judgement = Literal["fits", "does not fit", "unknown"]
"""``unknown`` is neither of the others: what was not looked at has not passed."""
Subject = Literal["pair", "engine", "memory"]
"""What is judged apart: the checkpoints, what the engine supports, the GPUs' memory."""


@dataclass(frozen=True)
class Finding:
    """One statement about a configuration.

    ``code`` is a stable kebab-case name (documented, usable with ``--skip``); ``where`` is a config
    key or a file; ``fix`` is something to type, None where nothing needs doing.
    """

    code: str
    severity: Severity
    where: str
    message: str
    fix: str | None = None
    changes: tuple[Change, ...] = ()
    """The edits of the config file that ``fix`` speaks of, of its first proposal where it has
    several; empty where it proposes no edit, or leaves the value to the reader."""

    def as_problem(self) -> Problem:
        """The same as a problem of an error that refuses."""
        return Problem(
            self.message, self.where or None, fix=self.fix, code=self.code, changes=self.changes
        )

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        return {
            "code": self.code,
            "severity": self.severity,
            "where": self.where,
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Verdicts:
    """Fits, does not fit, or cannot say: for each subject apart."""

    pair: Judgement
    engine: Judgement
    memory: Judgement

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        return {"pair": self.pair, "engine": self.engine, "memory": self.memory}


PAIR_CODES: Mapping[str, tuple[str, str]] = {
    # reading
    "checkpoint-missing": (
        "The path is neither a readable folder nor a Hub repository.",
        "Correct the path.",
    ),
    "config-missing": ("config.json is not there.", "Download the whole repository."),
    "config-invalid": (
        "A value in config.json has the wrong type.",
        "Restore the original config.json.",
    ),
    "checkpoint-corrupt": (
        (
            "A JSON file or a safetensors header is broken, truncated, too large, or "
            "contradicts the file's size."
        ),
        "Download the named file again.",
    ),
    "checkpoint-unsafe-path": (
        "The index names a file outside the checkpoint's folder.",
        "Do not use this copy; get the checkpoint from its publisher.",
    ),
    "weights-missing": (
        (
            "No weights, or not every shard that the index names. `check` and `plan` judge a "
            "folder without any by its config, as information."
        ),
        "Finish the download.",
    ),
    "pickle-weights": (
        (
            "The weights are pickles (.bin, .pt, .pth): loading one can run code and its "
            "shapes cannot be read."
        ),
        (
            "Convert to safetensors; `--skip pickle-weights` trusts the file and leaves "
            "shapes unchecked."
        ),
    ),
    "gguf-weights": (
        "The weights are GGUF, which is not read.",
        "Use the safetensors repository it was made from.",
    ),
    "hub-access": (
        "The Hub wants a token, or refuses the one it got.",
        "Set models.hub_token_file; ask for access.",
    ),
    "hub-revision": ("The revision does not exist on the Hub.", "Correct the revision."),
    "hub-unreachable": (
        "The Hub cannot be reached, or offline mode is on, and the cache lacks the model.",
        "Download the model where there is a network, or give a folder.",
    ),
    "hub-modelscope": (
        "The engine takes its models from ModelScope, and its cache lacks the model: not checked.",
        "Download the model into ModelScope's cache, or give a folder.",
    ),
    # vocabulary
    "tokenizer-missing": (
        "A model has no tokenizer file; vocabularies were not compared.",
        "Copy its tokenizer.json.",
    ),
    "tokenizer-corrupt": ("A tokenizer file cannot be parsed.", "Download it again."),
    "tokenizer-unreadable": (
        "The tokenizer needs a library that is not installed; vocabularies were not compared.",
        "pip install 'specserve[vocab]'",
    ),
    "vocab-size": ("vocab_size differs; vLLM refuses the pair.", "Use a draft of the same family."),
    "vocab-size-padding": (
        (
            "The tokenizers match, the embeddings are padded to different sizes; vLLM "
            "refuses the pair."
        ),
        (
            "Use a draft with the same padding, or use_heterogeneous_vocab: true. Editing "
            "vocab_size does not help."
        ),
    ),
    "vocab-tokens": (
        "Some ids mean different tokens. Output stays right but drafts are noise.",
        "Use a draft of the target's family, or use_heterogeneous_vocab: true.",
    ),
    "vocab-added-tokens": (
        "Only added or reserved tokens differ; the draft cannot propose those.",
        "Measure acceptance on chat and tool calls.",
    ),
    "tokenizer-rules": (
        (
            "Equal maps, other normalizer, pre-tokenizer or merges: the draft saw text split "
            "differently."
        ),
        "Use the draft that was made for this target.",
    ),
    "special-tokens": (
        "Begin or end tokens differ: the draft ends its turns differently.",
        "Use a draft tuned with the target's chat format.",
    ),
    "chat-template": (
        "The chat templates differ.",
        "Measure acceptance through /v1/chat/completions.",
    ),
    "vocab-overlap": (
        (
            "With use_heterogeneous_vocab: few shared tokens. Warning under 90 %, error "
            "under min_vocab_overlap_ratio."
        ),
        "Use a draft of a closer family.",
    ),
    "vocab-no-fallback": (
        "With use_heterogeneous_vocab: a tokenizer has neither unk_token nor eos_token to map to.",
        "Add eos_token to tokenizer_config.json.",
    ),
    # heads
    "head-as-model": (
        "A draft head is configured as method draft_model.",
        "Set the method that the head is for.",
    ),
    "head-as-target": (
        "A draft head is configured as the model to serve.",
        "Serve the model that it was trained for, with the head as its draft.",
    ),
    "model-as-head": (
        "A whole language model is configured as a head.",
        "Set method: draft_model.",
    ),
    "head-kind": (
        "A head of one method is configured as another's.",
        "Set the method that the head is for.",
    ),
    "head-config": (
        "The head's config.json lacks what vLLM needs, or names what it cannot load.",
        "Export it again.",
    ),
    "head-verifier": (
        "The head says it was trained for another target.",
        "Use the head of this very target, or measure acceptance.",
    ),
    "head-hidden-size": (
        "The head expects hidden states of another width.",
        "Use a head for this target.",
    ),
    "head-fc": (
        "fc does not read as many values as the target's layers give.",
        "Use a head for this target.",
    ),
    "head-aux-layers": (
        "The head reads layers that the target does not have.",
        "Use a head for this target.",
    ),
    "head-embedding": (
        "The head has no embedding and cannot share the target's.",
        "Use a head that ships it.",
    ),
    "head-tensor-missing": (
        "The head lacks a tensor it cannot do without.",
        "Convert or download it again.",
    ),
    "head-vocab-size": (
        "The head's vocabulary is not the target's.",
        "Use a head for this target.",
    ),
    "head-vocab-rows": (
        "lm_head or embedding rows are not what the head's config says.",
        "Restore its config.json.",
    ),
    "head-reach": (
        "A pruned vocabulary: the share of the target's tokens that the head can draft.",
        "Nothing; `check --sample FILE` counts a text.",
    ),
    "head-sample": (
        "The share of a sample's tokens that the head can draft; a warning below 90 %.",
        "Use a head with a larger vocabulary.",
    ),
    "head-d2t": (
        (
            "A pruned vocabulary without a d2t table, or with one that is not one-to-one or "
            "leaves the target's ids."
        ),
        "Convert the head again.",
    ),
    "head-block-size": (
        "More tokens per draft than the head's block was trained for.",
        "Lower the number.",
    ),
    "head-too-few": ("More tokens per draft than there are heads.", "Lower the number."),
    "mask-token-missing": (
        "parallel_drafting without a mask token in the draft's config.",
        "Turn it off.",
    ),
    "mtp-modules-missing": (
        "Method mtp and no MTP modules in the config.",
        "Choose another method.",
    ),
    "mtp-weights-missing": (
        "The config names MTP modules, the weights have none.",
        "Use the original checkpoint.",
    ),
    "mtp-multiple": (
        "The number of tokens is neither below nor a multiple of the modules.",
        "Use a listed number.",
    ),
    "mtp-module-reuse": (
        "One MTP module runs several times; acceptance falls by position.",
        "Measure with fewer.",
    ),
    # one checkpoint
    "vocab-rows": (
        "Embedding or lm_head rows differ from vocab_size (an edited config).",
        "Restore config.json.",
    ),
    "layers-missing": ("Layers that the config names have no tensors.", "Finish the download."),
    "tp-divisible": (
        "Heads or intermediate size cannot be shared by so many GPUs.",
        "Set the number in the fix.",
    ),
    "quantization-mismatch": ("quantization contradicts the checkpoint.", "Remove the key."),
    "model-type-unknown": (
        "Neither the installed vLLM nor Transformers knows the model_type.",
        "Install a newer vLLM.",
    ),
    "remote-code": (
        "A checkpoint needs its own Python code. One switch allows it for both models.",
        "Read the code, pin both revisions, set trust_remote_code: true.",
    ),
    "remote-code-unpinned": (
        "Code is trusted and its revision may change.",
        "Pin the revision in the fix.",
    ),
    "revision-unpinned": ("A Hub model without a pinned commit.", "Pin the revision in the fix."),
    # both
    "draft-is-target": ("Draft and target are the same files.", "Choose a smaller model."),
    "own-draft": (
        (
            "The draft is the target in another precision: judged by the bytes that it reads; a "
            "warning where it pays only above 90 % acceptance, or never."
        ),
        "Measure before rolling out.",
    ),
    "size-ratio": (
        (
            "Draft weights above 1/4 of the target's: too slow to help. Or below 1/50, of another "
            "family or tokenizer: perhaps too weak to be accepted."
        ),
        "Measure before rolling out.",
    ),
    "draft-context": (
        "The draft's context is shorter than what is served.",
        "Lower engine.max_model_len, or measure.",
    ),
    "draft-max-model-len": (
        "draft_model.max_model_len is above what draft or target allow.",
        "Lower it.",
    ),
    "context-too-long": ("engine.max_model_len is above what the target allows.", "Lower it."),
    "draft-mrope": (
        "The draft is multimodal with M-RoPE, which cannot draft.",
        "Use a text-only draft.",
    ),
    "dtype-unsupported": (
        "A model type that vLLM does not run in float16.",
        "Set dtype: bfloat16.",
    ),
    "draft-dtype": ("The draft runs in the target's dtype, not its own.", "Nothing to do."),
    "draft-quantization": ("Target and draft are quantized differently.", "Nothing to do."),
    # sampling
    "sampling-rejected": (
        (
            "generation_config.json sets min_p or logit_bias; with speculation the engine "
            "rejects every such request."
        ),
        "Set engine.extra_args.generation-config: vllm.",
    ),
    "sampling-temperature": (
        "A high default temperature with greedy drafting.",
        "Measure at this temperature.",
    ),
    # integrity
    "sha256-mismatch": ("A file is not the one that models.*.sha256 names.", "Download it again."),
    "sha256-unusable": ("models.*.sha256 cannot be applied.", "Give a map from file to hash."),
    "lock-mismatch": (
        "Files differ from the manifest of `specserve models lock`.",
        "Download again, or lock anew.",
    ),
    "lock-unhashed": (
        (
            "Revision, names and sizes match the manifest beside the config; hashes take "
            "longer and were left out."
        ),
        "specserve models verify CONFIG",
    ),
}

ENGINE_CODES: Mapping[str, tuple[str, str]] = {
    "engine-broken": ("The installed vLLM cannot be imported.", "Follow the named cause."),
    "engine-not-asked": (
        "The installed vLLM did not answer in time; nothing is checked against it.",
        "Run it again.",
    ),
    "engine-assumed": (
        "No vLLM is installed here and none is stated, or the stated one is newer than all known.",
        "Set engine.version, or give --engine.",
    ),
    "engine-unknown": (
        "The stated vLLM is older than every known one; only its memory can be judged.",
        "State a known version; `--skip engine-unknown` goes on.",
    ),
    "engine-not-this": (
        "Another vLLM than the stated one is installed here; launch refuses that.",
        "Install the stated version, or correct engine.version.",
    ),
    "argument-conflict": ("A vLLM flag is said twice: by a key and by extra_args.", "Keep one."),
    "flag-unsupported": (
        "The installed vLLM has no such flag.",
        "Remove it, or install the version that has it.",
    ),
    "key-unsupported": (
        "The installed vLLM's SpeculativeConfig has no such key.",
        "Remove it, or upgrade vLLM.",
    ),
    "architecture-unsupported": (
        "The installed vLLM cannot load this architecture.",
        "Install a newer vLLM.",
    ),
    "architecture-fallback": (
        "Only Transformers' own code can load it, more slowly.",
        "Measure it.",
    ),
    "method-unsupported": (
        "The installed vLLM has no such method.",
        "Upgrade vLLM, or choose another method.",
    ),
    "method-mismatch": (
        "vLLM would run another method than the one configured.",
        "Set the method in the fix.",
    ),
    "model-runner": (
        (
            "The model runner in force does not know the method; as information, which one "
            "runs and why."
        ),
        "Unset VLLM_USE_V2_MODEL_RUNNER, or choose another method.",
    ),
    "arctic-inference-missing": ("Method suffix needs a package.", "pip install arctic-inference"),
    "synthetic-acceptance": ("A mode for measurements that makes wrong text.", "Remove it."),
    "step-budget": (
        "A full step leaves too few tokens to prompts.",
        "Raise max_num_batched_tokens.",
    ),
    "shared-memory": (
        "Shared memory (/dev/shm) is too small for several workers.",
        "Give the container more.",
    ),
    "kubernetes-service-variable": (
        "Kubernetes set a VLLM_ variable for a Service.",
        "Set enableServiceLinks: false.",
    ),
    "api-key-unknown": ("VLLM_API_KEY is set and not the server.api_key.", "Do what the fix says."),
    "profile-unusable": (
        "sidecar.benchmark_profile cannot be read.",
        "Run specserve bench, or remove the key.",
    ),
    "engine-changed": (
        "A benchmark profile or memory figures are from another vLLM than this.",
        "Measure again.",
    ),
    "environment-unknown": ("vLLM does not read this variable.", "Unset it."),
    # the machine
    "driver-too-old": (
        "The NVIDIA driver is too old for the CUDA that the installed torch is built with.",
        "Install the driver that the finding names.",
    ),
    "gpus-unequal": (
        "One model is split over GPUs of different kinds or sizes.",
        "Choose equal ones with CUDA_VISIBLE_DEVICES.",
    ),
    "gpu-dtype": ("The GPU has no bfloat16.", "Set models.target_model.dtype: float16."),
    "gpu-quantization": (
        "The GPU is older than what vLLM demands for this quantization.",
        "Use another checkpoint or a newer GPU.",
    ),
    "gpu-quantization-emulated": (
        "The GPU does not compute in the type of the weights; it saves memory only.",
        "Nothing to do.",
    ),
    "cache-not-writable": (
        (
            "A cache of compiled kernels or, where something must be downloaded, the Hub's "
            "cannot be written."
        ),
        "Give another folder with engine.env.",
    ),
    "cache-space": ("There is little room for compiled kernels.", "Free some space."),
    "download-space": (
        "What must be downloaded is larger than the room for it.",
        "Set engine.env.HF_HOME to a folder with room.",
    ),
    "user-without-name": (
        "The user id is not in /etc/passwd, and torch before 2.13 needs its name.",
        "Set engine.env.USER.",
    ),
    "checkpoint-unreadable": (
        "A file of the checkpoint may not be read.",
        "Change its permissions, or download it again.",
    ),
    "checkpoint-lfs-pointer": (
        "A file is a Git LFS pointer in place of the file itself.",
        "Run git lfs pull in the folder.",
    ),
    "checkpoint-empty-file": ("A file with weights is empty.", "Download it again."),
}

MEMORY_CODES: Mapping[str, tuple[str, str]] = {
    "does-not-fit": (
        "Weights, one sequence and overhead exceed a GPU's budget.",
        "Do what the fix says.",
    ),
    "other-processes": (
        "Other processes hold memory of the GPU.",
        "Stop them, or lower the utilization.",
    ),
    "low-concurrency": (
        "The KV cache holds few requests of the full context.",
        "Lower engine.max_model_len.",
    ),
    "logits-buffer-large": (
        "Draft logits need memory that profiling does not see.",
        "Lower engine.max_num_seqs.",
    ),
    "memory-tight": (
        "Little memory is left outside the budget.",
        "Lower engine.gpu_memory_utilization.",
    ),
    "size-unknown": (
        (
            "A size of the checkpoint is not known, so nobody can say whether it fits. An error "
            "where GPUs are here or described; `launch` refuses only where it sees a GPU."
        ),
        "Download the weights, or skip this code.",
    ),
    "vram-assumed": ("A number of the plan is an assumption.", "Nothing to do."),
    "vram-not-checked": (
        (
            "No GPU was found and none is described, or its name is not understood or not one "
            "board; memory was not checked."
        ),
        "Set hardware.gpu_name (`specserve gpus` lists names), or hardware.gpu_memory_gib.",
    ),
}

CODES: Mapping[str, tuple[str, str]] = {**PAIR_CODES, **ENGINE_CODES, **MEMORY_CODES}
"""Every code but the ``known-bad-*`` ones, which come from ``engine/known_bad.yaml``."""


def subject_of(code: str) -> Subject:
    """What a code is about. Known defects are the engine's.

    >>> subject_of("vocab-tokens"), subject_of("known-bad-lora"), subject_of("does-not-fit")
    ('pair', 'engine', 'memory')
    """
    if code in PAIR_CODES:
        return "pair"
    if code in MEMORY_CODES:
        return "memory"
    return "engine"
