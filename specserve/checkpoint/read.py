"""From a checkpoint's files to ModelFacts: config, index, headers, small JSON files.

Every size is bounded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import JsonValue

from specserve.checkpoint import mistral
from specserve.checkpoint.access import HubAccess
from specserve.checkpoint.facts import CheckpointRefused, ModelFacts, Source
from specserve.checkpoint.fields import LAYER_LISTS, PER_LAYER, Config
from specserve.checkpoint.folder import LocalFolder
from specserve.checkpoint.quantization import QUANT_FILE, with_quant_file
from specserve.checkpoint.safetensors import Corrupt, TensorFacts, parse_object, read_header
from specserve.findings import Finding
from specserve.units import size

MAX_CONFIG_BYTES = 4 * 1024**2
MAX_INDEX_BYTES = 48 * 1024**2
MAX_TENSORS = 1_000_000
INDEX = "model.safetensors.index.json"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
    "max_position_embeddings",
    "n_embd",
    "n_head",
    "n_layer",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
    "sliding_window",
    "draft_vocab_size",
    "n_predict",
    "num_nextn_predict_layers",
    "block_size",
)
"""Keys of config.json that count something. Some models give a list, one number per layer."""
_LARGEST = 1 << 31
_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("model_type", "torch_dtype", "dtype", "quant_method"),
    list: ("architectures", *LAYER_LISTS),
    dict: (
        "quantization_config",
        "compression_config",
        "rope_scaling",
        "rope_parameters",
        "text_config",
        "llm_config",
        "language_config",
        "thinker_config",
        "vision_config",
        "auto_map",
        "dflash_config",
        "eagle_config",
        "mtp_config",
        "linear_attn_config",
    ),
    bool: ("tie_word_embeddings",),
}
"""Keys of config.json that have one type wherever they occur."""
_IN_WORDS: Mapping[type, str] = {
    str: "text",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}
_NEVER_ZERO = ("vocab_size", "hidden_size")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = ("adapter_", "training_args", "optimizer", "scheduler", "rng_state")


def read(path: str, *, revision: str | None = None, access: HubAccess | None = None) -> ModelFacts:
    """Everything the checks need to know about a checkpoint: a local folder, or a Hub id.

    From the Hub only small files and the headers of the weights are fetched. Raises
    CheckpointRefused.
    """
    return describe(_source(path, revision, access))


def read_config(
    path: str, *, revision: str | None = None, access: HubAccess | None = None
) -> ModelFacts:
    """What config.json alone says of a checkpoint. Raises CheckpointRefused."""
    source = _source(path, revision, access)
    sizes = _listing(source)
    config, problems = _config(source, sizes)
    if problems:
        raise CheckpointRefused(problems)
    return ModelFacts(source.name, config, files=tuple(sizes), sizes=sizes, source=source)


def _source(path: str, revision: str | None, access: HubAccess | None) -> Source:
    from specserve.checkpoint import hub

    folder = Path(path).expanduser()
    if folder.exists() or hub.looks_like_a_folder(path):
        return LocalFolder(path, folder)
    return hub.open_repository(path, revision=revision, access=access or HubAccess.of({}))


def describe(source: Source) -> ModelFacts:
    """ModelFacts of a checkpoint.

    Raises CheckpointRefused with everything that is unreadable, at once.
    """
    where = source.name
    sizes = _listing(source)
    problems: list[Finding] = []

    def small(name: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
        try:
            if name in sizes:
                return read_json(source, sizes, name, limit)
            return {}
        except Corrupt as e:
            problems.append(_corrupt(where, name, str(e)))
            return {}

    config, faults = _config(source, sizes)
    generation, tokenizer = small("generation_config.json"), small("tokenizer_config.json")
    index = small(index_file(sizes), MAX_INDEX_BYTES)
    tensors, total, notes = _weights(source, sizes, index, problems)
    template = _chat_template(source, sizes, tokenizer, small("chat_template.json"))
    problems += faults
    if problems:
        raise CheckpointRefused(problems)
    return ModelFacts(
        path=source.name,
        config=config,
        folder=source.folder,
        revision=source.revision,
        tensors=tensors,
        total_size_bytes=total,
        generation_config=generation,
        tokenizer_config=tokenizer,
        files=tuple(sizes),
        sizes=sizes,
        chat_template=template,
        findings=tuple(notes),
        source=source,
    )


def _config(source: Source, sizes: Mapping[str, int]) -> tuple[Config, list[Finding]]:
    """config.json, or the params.json that stands for it, with ModelOpt's own file; and what is
    wrong with them.
    """
    where, name = source.name, "config.json"
    if name not in sizes and mistral.PARAMS in sizes:
        name = mistral.PARAMS
    if name not in sizes:
        return {}, [_no_config(where, sizes)]
    problems: list[Finding] = []
    read_files: list[Config] = []
    for file in (name, QUANT_FILE):
        content: Config = {}
        try:
            if file in sizes:
                content = read_json(source, sizes, file, MAX_CONFIG_BYTES)
        except Corrupt as e:
            problems.append(_corrupt(where, file, str(e)))
        read_files.append(content)
    config, separate = read_files
    if name == mistral.PARAMS:
        config = mistral.config_of(config)
    config = with_quant_file(config, separate)
    return config, [*problems, *config_faults(f"{where}/{name}", config)]


def index_file(sizes: Mapping[str, int]) -> str:
    """The name of the weights' index: Mistral's own where the usual one is not there."""
    if INDEX not in sizes and mistral.INDEX in sizes:
        return mistral.INDEX
    return INDEX


def overridden(facts: ModelFacts, overrides: Mapping[str, JsonValue]) -> ModelFacts:
    """A checkpoint with vLLM's ``--hf-overrides`` laid over its config. Raises CheckpointRefused
    where they make it one that no model has.
    """
    if not overrides:
        return facts
    changed = facts.overridden_by(overrides)
    found = [
        replace(fault, where="engine.extra_args.hf-overrides", fix="correct the override")
        for fault in config_faults(facts.path, changed.config)
    ]
    if found:
        raise CheckpointRefused(found)
    return changed


def config_faults(place: str, config: Config) -> Iterator[Finding]:
    """Counts that are no counts. What reads the config later may rely on them."""
    fix = f"restore the original {PurePosixPath(place).name}"
    for prefix, section in _sections(config, "", 0):
        for key in _SIZES:
            value = section.get(key)
            if value is not None and not _is_count(key, value):
                message = (
                    f"{prefix}{key} is {str(value)[:60]!r}; it must be a whole "
                    f"number of at least {_least(key)}"
                )
                yield Finding("config-invalid", "error", place, message, fix)
        for kind, keys in _TYPES.items():
            for key in keys:
                value = section.get(key)
                if value is not None and not isinstance(value, kind):
                    message = f"{prefix}{key} is {str(value)[:60]!r}; it must be {_IN_WORDS[kind]}"
                    yield Finding("config-invalid", "error", place, message, fix)


def _sections(config: Config, prefix: str, depth: int) -> Iterator[tuple[str, Config]]:
    yield prefix, config
    for key, value in config.items():
        if isinstance(value, dict) and depth < 3 and key.endswith(("_config", "model", "_scheme")):
            yield from _sections(value, f"{prefix}{key}.", depth + 1)


def _is_count(key: str, value: object) -> bool:
    if isinstance(value, list):
        return key in PER_LAYER and all(
            n is None or (type(n) is int and 0 <= n < _LARGEST) for n in value
        )
    return type(value) is int and _least(key) <= value < _LARGEST


def _least(key: str) -> int:
    if key in _NEVER_ZERO:
        return 1
    return 0


def read_json(source: Source, sizes: Mapping[str, int], name: str, limit: int) -> dict[str, Any]:
    """A JSON object from one file of at most ``limit`` bytes. Raises Corrupt."""
    if sizes[name] > limit:
        raise Corrupt(f"has {size(sizes[name])}; more than {size(limit)} is not read")
    try:
        return parse_object(source.read(name, 0, limit + 1))
    except OSError as e:
        raise Corrupt(f"cannot be read ({e.strerror or e})") from None


def _listing(source: Source) -> Mapping[str, int]:
    where = source.name
    try:
        sizes = source.files()
    except FileNotFoundError:
        raise CheckpointRefused([_absent(where)]) from None
    except NotADirectoryError:
        raise CheckpointRefused([_not_a_folder(where)]) from None
    except OSError as e:
        message = f"the folder cannot be read ({e.strerror})"
        raise CheckpointRefused(
            [Finding("checkpoint-missing", "error", where, message, "give this user access to it")]
        ) from None
    if not sizes:
        message = "the folder holds no files; it must hold config.json and the weights"
        raise CheckpointRefused(
            [
                Finding(
                    "checkpoint-missing",
                    "error",
                    where,
                    message,
                    "correct the path, or download again",
                )
            ]
        )
    return sizes


def hub_id(path: str) -> str | None:
    """The id in the address of a model's page on the Hub; None for any other path.

    >>> (hub_id("https://huggingface.co/Qwen/Qwen3-8B/tree/main"), hub_id("hf://a/b"),
    ...  hub_id("https://x.org/a/b"))
    ('Qwen/Qwen3-8B', 'a/b', None)
    """
    found = re.match(
        r"(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)([\w.-]+/[\w.-]+)", path
    )
    if found:
        return found[1]
    return None


def _absent(where: str) -> Finding:
    if (name := hub_id(where)) is not None:
        message, fix = (
            "is an address on the Hub; the path must be a folder or a Hub id",
            f"write {name}",
        )
    elif "://" in where:
        message = "is a place to copy from; the path must be a folder or a Hub id"
        fix = "set models.store to a folder, then: specserve models pull CONFIG"
    else:
        message = "there is no such folder; the path must be a folder or a Hub id"
        fix = "correct the path, or put the checkpoint there"
    return Finding("checkpoint-missing", "error", where, message, fix)


def _not_a_folder(where: str) -> Finding:
    if where.endswith(".gguf"):
        return _gguf(where)
    return Finding(
        "checkpoint-missing",
        "error",
        where,
        "this is a file; the path must be the folder that holds config.json",
        f"set the path to {PurePosixPath(where).parent}",
    )


def _no_config(where: str, sizes: Mapping[str, int]) -> Finding:
    if any(name.endswith(".gguf") for name in sizes):
        return _gguf(where)
    message = "config.json is missing; without it nothing is known about the model"
    return Finding(
        "config-missing",
        "error",
        where,
        message,
        "download the whole repository again, config.json with it",
    )


def _gguf(where: str) -> Finding:
    return Finding(
        "gguf-weights",
        "error",
        where,
        "the weights are GGUF; only safetensors can be checked and planned",
        "use the safetensors repository that this GGUF was made from",
    )


def _corrupt(where: str, name: str, message: str) -> Finding:
    if message.endswith("(Permission denied)"):
        fix = "give this user access to it"
    else:
        fix = f"download {name} again"
    return Finding("checkpoint-corrupt", "error", f"{where}/{name}", message, fix)


def _weights(
    source: Source, sizes: Mapping[str, int], index: Mapping[str, Any], problems: list[Finding]
) -> tuple[dict[str, TensorFacts] | None, int | None, list[Finding]]:
    names, notes = _weight_files(source.name, sizes, index, problems)
    if not names:
        notes += [] if problems or notes else [_why_no_weights(source.name, sizes)]
        return None, None, notes
    tensors: dict[str, TensorFacts] = {}
    for name, found in zip(names, _headers(source, sizes, names), strict=True):
        if isinstance(found, str):
            problems.append(_corrupt(source.name, name, found))
        else:
            tensors |= found
        if len(tensors) > MAX_TENSORS:
            problems.append(
                _corrupt(source.name, name, f"more than {MAX_TENSORS} tensors in one checkpoint")
            )
            break
    return tensors, sum(t.nbytes for t in tensors.values()), notes


def _headers(
    source: Source, sizes: Mapping[str, int], names: list[str]
) -> Iterator[dict[str, TensorFacts] | str]:
    """The header of each file, or what is wrong with it; several requests at a time where the files
    are remote.
    """

    def one(name: str) -> dict[str, TensorFacts] | str:
        try:
            return read_header(lambda start, n: source.read(name, start, n), sizes[name], name)
        except (Corrupt, OSError) as e:
            return str(e)

    if source.folder is not None or len(names) == 1:
        yield from map(one, names)
        return
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(one, names)


def _weight_files(
    where: str, sizes: Mapping[str, int], index: Mapping[str, Any], problems: list[Finding]
) -> tuple[list[str], list[Finding]]:
    """Names of the safetensors files that make up the model, and what is odd about them."""
    present = [n for n in sizes if n.endswith(".safetensors") and not n.startswith(_NOT_WEIGHTS)]
    weight_map = index.get("weight_map")
    if not index:
        model_files = [n for n in present if not n.startswith("consolidated")]
        return model_files or present, []
    if not isinstance(weight_map, Mapping) or not weight_map:
        problems.append(_corrupt(where, INDEX, "has no weight_map"))
        return [], []
    named = {n if isinstance(n, str) else repr(n) for n in weight_map.values()}
    if outside := sorted(n for n in named if not _is_plain(n)):
        message = (
            "the index names a file outside the checkpoint: "
            f"{outside[0][:200]!r}; names must be plain"
        )
        problems.append(
            Finding(
                "checkpoint-unsafe-path",
                "error",
                f"{where}/{INDEX}",
                message,
                "do not use this copy",
            )
        )
        return [], []
    missing = sorted(n for n in named if n not in sizes)
    if missing:
        notes = [_missing_shards(where, missing)]
    else:
        notes = []
    return sorted(n for n in named if n in sizes), notes


def _is_plain(name: str) -> bool:
    """Whether a name of the index stays inside the folder.

    >>> ([_is_plain(n) for n in ("model-1.safetensors", "../x.safetensors", "/etc/passwd",
    ...  "a\\\\b", "")])
    [True, False, False, False, False]
    """
    return (
        bool(name)
        and "\\" not in name
        and "\0" not in name
        and PurePosixPath(name).name == name != ".."
    )


def _missing_shards(where: str, missing: list[str]) -> Finding:
    if len(missing) > 1:
        more = f" and {len(missing) - 1} more"
    else:
        more = ""
    message = f"the index names {missing[0]}{more}, which is not there; every shard must be present"
    return Finding(
        "weights-missing", "error", where, message, "finish the download of this checkpoint"
    )


def _why_no_weights(where: str, sizes: Mapping[str, int]) -> Finding:
    if any(n.endswith(".gguf") for n in sizes):
        return _gguf(where)
    pickles = [n for n in sizes if n.endswith(PICKLES) and not n.startswith(_NOT_WEIGHTS)]
    if pickles:
        message = (
            f"the weights are pickles ({pickles[0]}); loading one can run "
            "code, and its shapes cannot be read"
        )
        fix = "convert to safetensors, or trust it with --skip pickle-weights"
        return Finding("pickle-weights", "error", where, message, fix)
    message = "there are no weights (*.safetensors); the checkpoint must hold them"
    return Finding(
        "weights-missing", "error", where, message, "finish the download of this checkpoint"
    )


def _chat_template(
    source: Source,
    sizes: Mapping[str, int],
    tokenizer: Mapping[str, Any],
    template_json: Mapping[str, Any],
) -> str | None:
    if 0 < sizes.get("chat_template.jinja", 0) <= MAX_CONFIG_BYTES:
        with contextlib.suppress(OSError):
            return source.read("chat_template.jinja", 0, MAX_CONFIG_BYTES).decode(errors="replace")
    for value in (template_json.get("chat_template"), tokenizer.get("chat_template")):
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return next(_default_templates(value), None)
    return None


def _default_templates(named: list[Any]) -> Iterator[str]:
    for entry in named:
        if (
            isinstance(entry, Mapping)
            and entry.get("name") == "default"
            and isinstance(entry.get("template"), str)
        ):
            yield entry["template"]
