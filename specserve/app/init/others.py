"""Arguments of SGLang, TGI and llama.cpp as vLLM's, where the meaning carries over.

Read in SGLang's ``server_args.py``, TGI's launcher reference and llama.cpp's ``common/arg.cpp``
(2026-11-30). What has no counterpart is left, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from specserve.app.init import template
from specserve.app.init.arguments import is_flag
from specserve.app.init.found import Found
from specserve.app.init.sheet import Sheet

_HOST = {"host": "host", "port": "port"}
_SGLANG: Mapping[str, str] = {
    **_HOST,
    "model-path": "model",
    "model": "model",
    "tokenizer-path": "tokenizer",
    "tp": "tensor-parallel-size",
    "tp-size": "tensor-parallel-size",
    "tensor-parallel-size": "tensor-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "pipeline-parallel-size": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dp-size": "data-parallel-size",
    "data-parallel-size": "data-parallel-size",
    "context-length": "max-model-len",
    "max-running-requests": "max-num-seqs",
    "max-queued-requests": "max-num-queued-reqs",
    "chunked-prefill-size": "max-num-batched-tokens",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv-cache-dtype": "kv-cache-dtype",
    "served-model-name": "served-model-name",
    "api-key": "api-key",
    "revision": "revision",
    "chat-template": "chat-template",
    "random-seed": "seed",
    "nnodes": "nnodes",
    "node-rank": "node-rank",
    "reasoning-parser": "reasoning-parser",
    "tool-call-parser": "tool-call-parser",
    "load-format": "load-format",
    "json-model-override-args": "hf-overrides",
    "page-size": "block-size",
}
_SGLANG_SWITCHES: Mapping[str, str] = {
    "trust-remote-code": "--trust-remote-code",
    "disable-cuda-graph": "--enforce-eager",
    "disable-radix-cache": "--no-enable-prefix-caching",
    "skip-tokenizer-init": "--skip-tokenizer-init",
}
_SGLANG_OTHER_SWITCHES = re.compile(r"(enable|disable|log|show|skip|allow|speculative-token-map)-")
_TGI: Mapping[str, str] = {
    "model-id": "model",
    "revision": "revision",
    "num-shard": "tensor-parallel-size",
    "quantize": "quantization",
    "dtype": "dtype",
    "kv-cache-dtype": "kv-cache-dtype",
    "max-total-tokens": "max-model-len",
    "max-concurrent-requests": "max-num-queued-reqs",
    "max-batch-prefill-tokens": "max-num-batched-tokens",
    "max-batch-size": "max-num-seqs",
    "cuda-memory-fraction": "gpu-memory-utilization",
    "hostname": "host",
    "port": "port",
    "api-key": "api-key",
}
_LLAMA: Mapping[str, str] = {
    **_HOST,
    "m": "model",
    "model": "model",
    "hf": "model",
    "hfr": "model",
    "hf-repo": "model",
    "md": "draft",
    "model-draft": "draft",
    "hfd": "draft",
    "hfrd": "draft",
    "hf-repo-draft": "draft",
    "draft": "tokens",
    "draft-n": "tokens",
    "draft-max": "tokens",
    "spec-draft-n-max": "tokens",
    "c": "context",
    "ctx-size": "context",
    "np": "max-num-seqs",
    "parallel": "max-num-seqs",
    "a": "served-model-name",
    "alias": "served-model-name",
    "api-key": "api-key",
    "chat-template-file": "chat-template",
    "s": "seed",
    "seed": "seed",
}
_HUB_TOKEN = {"hft": "hf-token", "hf-token": "hf-token"}


def as_vllm(found: Found, sheet: Sheet) -> tuple[str, ...]:
    """The arguments that vLLM would be given for the same."""
    match found.server:
        case "sglang":
            return tuple(_sglang(found.words, sheet))
        case "tgi":
            return tuple(_tgi(found, sheet))
        case "llama.cpp":
            return tuple(_llama(found.words, sheet))
        case "vllm":
            return found.words


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with the words that follow them; words before any flag have an empty name."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not is_flag(word):
            yield "", [word]
            continue
        option, equals, given = word.partition("=")
        values: list[str] = []
        if equals:
            values = [given]
        while at < len(words) and not is_flag(words[at]):
            values.append(words[at])
            at += 1
        yield option.lstrip("-").replace("_", "-"), values


def _leave(sheet: Sheet, name: str, values: list[str], why: str) -> None:
    sheet.leave(" ".join([f"--{name}", *values]), why)


def _spec(speculation: dict[str, JsonValue]) -> list[str]:
    return ["--speculative-config", json.dumps(speculation, ensure_ascii=False)]


def _sglang(words: Sequence[str], sheet: Sheet) -> Iterator[str]:
    spec: dict[str, list[str]] = {}
    for name, values in _pairs(words):
        if name.startswith("speculative-"):
            short = name.removeprefix("speculative-")
            if "algorithm".startswith(short):
                # argparse takes abbreviations, and guides write --speculative-algo.
                short = "algorithm"
            spec[short] = values
        elif name in _SGLANG_SWITCHES:
            yield _SGLANG_SWITCHES[name]
        elif name == "tool-call-parser" and values:
            yield from ("--enable-auto-tool-choice", "--tool-call-parser", values[0])
            sheet.say("--tool-call-parser: vLLM has parsers of its own; compare the name")
        elif name == "dist-init-addr" and values:
            yield from ("--master-addr", values[0].rpartition(":")[0] or values[0])
        elif name == "chunked-prefill-size" and values[:1] == ["-1"]:
            yield "--no-enable-chunked-prefill"
        elif name in _SGLANG and values:
            yield f"--{_SGLANG[name]}={values[0]}"
        elif name == "mem-fraction-static":
            _leave(
                sheet,
                name,
                values,
                "SGLang counts weights and cache alone, engine.gpu_memory_utilization everything",
            )
        elif name == "":
            sheet.leave(values[0], "a word that belongs to no flag")
        else:
            _leave(sheet, name, values, "SGLang's own; no counterpart is known")
    yield from _sglang_speculation(spec, sheet)


def _sglang_speculation(spec: dict[str, list[str]], sheet: Sheet) -> list[str]:
    given = {name: values[0] for name, values in spec.items() if values}
    algorithm = template.resolved(given.pop("algorithm", "")).upper()
    if not algorithm:
        for name, value in given.items():
            _leave(
                sheet,
                f"speculative-{name}",
                [value],
                "without an algorithm it does nothing",
            )
        return []
    draft = given.pop("draft-model-path", given.pop("draft-model", None))
    methods = {
        "EAGLE3": "eagle3",
        "NEXTN": "mtp",
        "MTP": "mtp",
        "STANDALONE": "draft_model",
        "NGRAM": "ngram",
        "LOOKAHEAD": "ngram",
        "DFLASH": "dflash",
    }
    method = methods.get(algorithm)
    if algorithm == "EAGLE" and draft is None:
        method = "mtp"
        sheet.say("EAGLE without a draft path runs the target's own MTP layers: method mtp")
    elif algorithm == "EAGLE":
        method = "eagle"
        sheet.say("where the draft is the target's own MTP layer in a folder, the method is mtp")
    if method is None:
        _leave(sheet, "speculative-algorithm", [algorithm], "vLLM has no such method")
        return []
    out: dict[str, JsonValue] = {"method": method}
    if draft is not None and method != "ngram":
        out["model"] = draft
    steps, drafted = given.pop("num-steps", None), given.pop("num-draft-tokens", None)
    branches = given.pop("eagle-topk", "1")
    if steps is not None and method != "ngram":
        out["num_speculative_tokens"] = _whole(steps)
    elif drafted is not None:
        count = _whole(drafted)
        if isinstance(count, int) and method != "ngram":
            # SGLang counts the token that the target gives itself.
            count = max(count - 1, 1)
        out["num_speculative_tokens"] = count
    if branches != "1":
        sheet.leave(
            f"--speculative-eagle-topk {branches}",
            "vLLM drafts one sequence, not a tree",
        )
    quantization = given.pop("draft-model-quantization", None)
    if quantization is not None:
        out["quantization"] = quantization
    revision = given.pop("draft-model-revision", None)
    if revision is not None:
        out["revision"] = revision
    window = given.pop("ngram-max-match-window-size", given.pop("ngram-max-trie-depth", None))
    if window is not None and method == "ngram":
        out["prompt_lookup_max"] = _whole(window)
    for name, value in given.items():
        _leave(sheet, f"speculative-{name}", [value], "vLLM has no such setting")
    return _spec(out)


def _whole(text: str) -> JsonValue:
    if text.isdigit():
        return int(text)
    return text


def _tgi(found: Found, sheet: Sheet) -> Iterator[str]:
    given: dict[str, list[str]] = {}
    for name, value in found.env.items():
        key = name.lower().replace("_", "-")
        if key in _TGI or key in ("speculate", "trust-remote-code"):
            given[key] = [value]
    for name, values in _pairs(found.words):
        given[name] = values
    if "port" not in given:
        given["port"] = ["3000"]
        if found.in_container:
            given["port"] = ["80"]
    for name, values in given.items():
        if name == "speculate" and values:
            yield from _tgi_speculation(values[0], given, sheet)
        elif name == "trust-remote-code":
            yield "--trust-remote-code"
        elif name in _TGI and values:
            yield f"--{_TGI[name]}={values[0]}"
        elif name == "":
            sheet.leave(values[0], "a word that belongs to no flag")
        elif name == "sharded" and values != ["true"]:
            _leave(sheet, name, values, "tensor_parallel_size says it")
        else:
            _leave(sheet, name, values, "TGI's own; no counterpart is known")


def _tgi_speculation(count: str, given: Mapping[str, list[str]], sheet: Sheet) -> list[str]:
    if count == "0":
        return []
    model = " ".join(given.get("model-id", []))
    if "medusa" in model.lower():
        sheet.leave(
            f"the Medusa heads of {model}",
            "vLLM takes target and heads apart: set models.target_model.path to the base model",
        )
        return _spec(
            {
                "method": "medusa",
                "model": model,
                "num_speculative_tokens": _whole(count),
            }
        )
    sheet.say("--speculate without heads in the checkpoint looks n-grams up: method ngram")
    return _spec({"method": "ngram", "num_speculative_tokens": _whole(count)})


def _llama(words: Sequence[str], sheet: Sheet) -> Iterator[str]:
    draft: str | None = None
    tokens: str | None = None
    context: str | None = None
    slots, kind = "1", ""
    for name, values in _pairs(words):
        meaning = {**_LLAMA, **_HUB_TOKEN}.get(name)
        value = "".join(values[:1])
        match meaning:
            case "draft":
                draft = value
            case "tokens":
                tokens = value
            case "context":
                context = value
            case None:
                if name == "spec-type":
                    kind = value
                elif name in (
                    "ngl",
                    "n-gpu-layers",
                    "gpu-layers",
                    "ngld",
                    "gpu-layers-draft",
                ):
                    _leave(sheet, name, values, "vLLM keeps whole models in GPU memory")
                elif name in (
                    "draft-min",
                    "draft-p-min",
                    "draft-n-min",
                    "spec-draft-p-min",
                ):
                    _leave(sheet, name, values, "vLLM drafts as many tokens in every step")
                elif name == "":
                    sheet.leave(value, "a word that belongs to no flag")
                else:
                    sheet.leave(" ".join([f"-{name}", *values]), "llama.cpp's own")
            case _:
                if meaning == "max-num-seqs":
                    slots = value
                if meaning == "model" and (value.endswith(".gguf") or "GGUF" in value):
                    sheet.say(
                        "the target is GGUF, of which vLLM serves few; prefer the original files"
                    )
                yield f"--{meaning}={value}"
    if context is not None and context != "0":
        each = _whole(context)
        if isinstance(each, int) and slots.isdigit() and int(slots) > 1:
            each //= int(slots)
            sheet.say(f"-c {context} is shared by {slots} slots: {each} tokens for each sequence")
        yield f"--max-model-len={each}"
    if draft is None and kind.startswith("ngram"):
        sheet.say(f"--spec-type {kind}: vLLM's lookup works in its own way")
        yield from _spec({"method": "ngram", "num_speculative_tokens": _whole(tokens or "16")})
    elif draft is None and "mtp" in kind:
        yield from _spec({"method": "mtp", "num_speculative_tokens": _whole(tokens or "1")})
    if draft is not None:
        spec: dict[str, JsonValue] = {"method": "draft_model", "model": draft}
        spec["num_speculative_tokens"] = _whole(tokens or "16")
        if tokens is None:
            sheet.say("llama.cpp drafts up to 16 tokens unless told otherwise")
        yield from _spec(spec)
