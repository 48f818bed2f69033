"""What of the user's own flags and variables may be shown to others: in logs and on ``/status``.

A name cannot tell that a value is no secret (``SIGNING_SALT``, ``HTTP_HEADERS``, ``auth`` inside
JSON), so only values of names known to be harmless are shown there, and numbers. On the user's own
terminal (``launch --dry-run``, ``config show``) values stay, but for names that say they are
secrets (:func:`specserve.log.masked`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from pydantic import JsonValue

from specserve.log import hides

HIDDEN = "***"

_VARIABLES = re.compile(
    r"(VLLM|OMP|KMP|MKL|NCCL|RCCL|CUDA|ROCM|HIP|HSA|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|GLOO|UCX"
    r"|RAY|FLASHINFER|CUBLAS|CUDNN|MALLOC|TCMALLOC|TRANSFORMERS|SAFETENSORS"
    r"|NVIDIA_VISIBLE|GOMP|ONEDNN)_\w+"
    r"|HF_HUB_(OFFLINE|ENABLE_\w+|DISABLE_\w+|CACHE)|HF_HOME|HF_ENDPOINT|HF_DATASETS_OFFLINE"
    r"|TOKENIZERS_PARALLELISM|LD_PRELOAD|LD_LIBRARY_PATH|XDG_CACHE_HOME|TMPDIR|HOME|USER|PATH"
    r"|PYTHON(UNBUFFERED|HASHSEED|FAULTHANDLER|PATH)|TZ|LANG|LC_ALL|PROMETHEUS_MULTIPROC_DIR"
)
"""Variables of the engine and of what it runs on."""
_FLAG_WORDS = """
    model served-model-name host port ssl-certfile ssl-keyfile ssl-ca-certs revision code-revision
    tokenizer tokenizer-revision tokenizer-mode dtype quantization kv-cache-dtype load-format
    config-format runner convert task max-model-len distributed-executor-backend master-addr
    data-parallel-address data-parallel-backend data-parallel-rpc-port attention-backend
    moe-backend linear-backend all2all-backend compilation-config optimization-level
    structured-outputs-config reasoning-config kv-transfer-config kv-events-config
    ec-transfer-config speculative-config hf-overrides hf-config-path limit-mm-per-prompt
    mm-processor-kwargs mm-encoder-tp-mode rope-scaling reasoning-parser tool-call-parser
    tool-parser-plugin
    reasoning-parser-plugin chat-template chat-template-content-format default-chat-template-kwargs
    response-role generation-config override-generation-config guided-decoding-backend
    scheduling-policy scheduler-cls worker-cls worker-extension-cls middleware logits-processors
    lora-dtype lora-modules max-loras download-dir pooler-config uvicorn-log-level log-config-file
    disable-access-log-for-endpoints prefix-caching-hash-algo mamba-cache-mode mamba-cache-dtype
    mamba-ssm-cache-dtype block-size device swap-space cpu-offload-gb attention-config
    per-request-spec-decode-metrics collect-detailed-traces performance-mode model-impl
    logprobs-mode show-hidden-metrics-for-version allowed-local-media-path
"""
_FLAGS = frozenset(_FLAG_WORDS.split())
"""Flags of vLLM whose texts say how it runs, not who may use it."""
_KEY_WORDS = """
    method model draft revision quantization dtype mode backend level type rope_type kv_connector
    kv_role kv_buffer_device kv_parallel_size rejection_sample_method draft_sample_method
    attention_backend cudagraph_mode custom_ops architectures model_type publisher topic image
    audio video reasoning_parser temperature enable_thinking truncation_side prefill_backend
    moe_backend sampling_backend splitting_ops pass_config speculative_token_tree
"""
_JSON_KEYS = frozenset(_KEY_WORDS.split())
"""Keys inside JSON whose texts are harmless as well."""
_PLAIN_NUMBER = re.compile(r"[+-]?\d*\.?\d+(e[+-]?\d+)?[kKmMgG]?", re.ASCII)
_SHORT = 6
"""Characters below which a text cannot be replaced in a log without spoiling it."""


def shown_variable(name: str, value: str) -> str:
    """A variable's value as others may see it.

    >>> shown_variable("VLLM_USE_V1", "1"), shown_variable("DB_PASSPHRASE", "x1")
    ('1', '***')
    """
    if hides(name, value):
        return HIDDEN
    if _is_plain(value) or (_VARIABLES.fullmatch(name) and not _has_login(value)):
        return value
    return HIDDEN


def shown_flag(name: str, value: JsonValue) -> JsonValue:
    """A flag's value as others may see it; ``name`` without leading dashes.

    >>> shown_flag("kv-transfer-config", {"kv_connector": "Nixl", "auth": "x"})
    {'kv_connector': 'Nixl', 'auth': '***'}
    """
    top = name.partition(".")[0].replace("_", "-")
    inner = name.rpartition(".")[2].replace("-", "_")
    if hides(name, value):
        return HIDDEN
    known = top in _FLAGS and (top == name.replace("_", "-") or inner in _JSON_KEYS)
    return _shown(value, known=known)


def _shown(value: JsonValue, *, known: bool) -> JsonValue:
    if isinstance(value, dict):
        shown = {key: _shown(item, known=key in _JSON_KEYS) for key, item in value.items()}
        hidden: dict[str, JsonValue] = {
            key: HIDDEN for key, item in value.items() if hides(key, item)
        }
        return shown | hidden
    if isinstance(value, list):
        return [_shown(item, known=known) for item in value]
    if isinstance(value, str) and not _is_plain(value) and (not known or _has_login(value)):
        return HIDDEN
    return value


def _is_plain(text: str) -> bool:
    """A number, a truth value, or nothing: it tells nobody anything."""
    return (
        not text
        or _PLAIN_NUMBER.fullmatch(text) is not None
        or text.lower() in ("true", "false", "yes", "no", "on", "off", "auto", "none", "null")
    )


def _has_login(text: str) -> bool:
    """Whether a text is, or holds, a URL in which a login or a secret may stand."""
    if "://" not in text:
        return False
    return "@" in text or _says_more_than_a_host(text)


def _says_more_than_a_host(url: str) -> bool:
    """Whether a URL has a path or a query; a login before the host is known by its shape."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    return bool(parts.query) or len(parts.path.strip("/")) > 0


def hidden_texts(environment: Mapping[str, str], flags: Mapping[str, JsonValue]) -> Iterator[str]:
    """The texts that must not come out in a log, of variables and flags that are not known to be
    harmless.

    Paths and short words are left alone: replacing them would spoil every line they stand in.
    """
    for name, value in environment.items():
        if shown_variable(name, value) == HIDDEN:
            yield from _worth_hiding(value, secret=hides(name, value))
    for name, item in flags.items():
        yield from _hidden(item, shown_flag(name, item), secret=hides(name, item))


def _hidden(value: JsonValue, shown: JsonValue, *, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            inner: JsonValue = HIDDEN
            if isinstance(shown, dict):
                inner = shown[key]
            yield from _hidden(item, inner, secret=secret or hides(key, item))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(shown, list):
                yield from _hidden(item, shown[i], secret=secret)
            else:
                yield from _hidden(item, HIDDEN, secret=secret)
    elif isinstance(value, str) and shown == HIDDEN:
        yield from _worth_hiding(value, secret=secret)


def _worth_hiding(value: str, *, secret: bool) -> Iterator[str]:
    is_address = "://" in value and not _says_more_than_a_host(value)
    is_path = value.startswith(("/", "./", "~/")) and " " not in value
    if secret or (len(value) >= _SHORT and not (is_path or is_address or _is_plain(value))):
        yield value
        # Headers come as name=value or name: value, and are printed one by one.
        for _, _, part in re.findall(r"([\w-]+)(=|: )([^,\s]+(?: [^,\s=]+)*)", value):
            if len(part) >= _SHORT:
                yield part
