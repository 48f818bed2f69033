"""What keys say about one another: rules that no single key can state."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from specserve.config import legacy
from specserve.config.base import lines_of
from specserve.config.document import KeyPath, dotted
from specserve.config.schema import Settings
from specserve.config.speculation import (
    CONTROLLABLE,
    NEEDS_DRAFT,
    ONLY_FOR,
    SAME_DTYPE,
    WITHOUT_DRAFT,
)
from specserve.errors import Change

_SPEC = "speculative_decoding"


SHORTEST = 4
"""Characters that a key must have; a shorter one would be replaced in every line of a log."""


@dataclass(frozen=True)
class Complaint:
    """One rule that is broken, at one key."""

    path: KeyPath
    message: str
    fix: str | None = None
    is_warning: bool = False
    changes: tuple[Change, ...] = ()
    """The edits that ``fix`` speaks of, of its first proposal where it has several."""


def _edit(
    change: Change, more: str = "", *, warns: bool = False
) -> tuple[str, bool, tuple[Change, ...]]:
    """The last fields of a complaint that one edit of the config mends."""
    return f"{change}{more}", warns, (change,)


def check(settings: Settings) -> Iterator[Complaint]:
    """Every broken rule."""
    yield from _server(settings)
    yield from _engine(settings)
    yield from _nodes(settings)
    yield from _receivers(settings)
    yield from _secrets(settings)
    if settings.speculative_decoding.enabled:
        yield from _method(settings)
        yield from _draft(settings)
        yield from _schedule(settings)
        yield from _control(settings)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _server(settings: Settings) -> Iterator[Complaint]:
    server = settings.server
    if (
        not _is_loopback(server.host)
        and server.api_key is None
        and not server.allow_unauthenticated
    ):
        yield Complaint(
            ("server", "host"),
            (
                f"'server.host' is {server.host!r} and no API key is set; anyone who "
                "reaches the port could use the model"
            ),
            (
                "set server.api_key_file, or server.allow_unauthenticated: true where something in "
                "front authenticates"
            ),
        )
    if (server.tls.cert_file is None) != (server.tls.key_file is None):
        if server.tls.key_file is None:
            missing = "key_file"
        else:
            missing = "cert_file"
        yield Complaint(
            ("server", "tls"), f"'server.tls.{missing}' is missing; TLS needs certificate and key"
        )
    yield from _sidecar(settings)
    if settings.sidecar.enabled and settings.sidecar.port == server.port:
        yield Complaint(
            ("server", "port"),
            f"'server.port' is {server.port}, and so is 'sidecar.port'; must be two ports",
            "set sidecar.port to another port",
        )


def _sidecar(settings: Settings) -> Iterator[Complaint]:
    sidecar = settings.sidecar
    if settings.engine.restart_when_stalled and not sidecar.enabled:
        yield Complaint(
            ("engine", "restart_when_stalled"),
            "'engine.restart_when_stalled' is on and 'sidecar.enabled' is off; it is the sidecar "
            "that proves a hang",
            "set sidecar.enabled: true",
        )
    if sidecar.enabled and not _is_loopback(sidecar.host) and sidecar.token is None:
        yield Complaint(
            ("sidecar", "host"),
            (
                f"'sidecar.host' is {sidecar.host!r} and no token is set; anyone who reaches port "
                f"{sidecar.port} can read metrics, alerts and the engine's command"
            ),
            "set sidecar.token_file, or let only Prometheus and the probes reach the port",
            is_warning=True,
        )


def _engine(settings: Settings) -> Iterator[Complaint]:
    engine = settings.engine
    for key, sentence in legacy.in_extra_args(engine.flags):
        yield Complaint(("engine", "extra_args", key), sentence)
    if (
        engine.max_num_seqs
        and engine.max_num_batched_tokens
        and engine.max_num_batched_tokens < engine.max_num_seqs
    ):
        yield Complaint(
            ("engine", "max_num_batched_tokens"),
            f"'max_num_batched_tokens' is {engine.max_num_batched_tokens}; must be at least "
            f"max_num_seqs "
            f"({engine.max_num_seqs})",
        )


def _nodes(settings: Settings) -> Iterator[Complaint]:
    engine = settings.engine
    if engine.node_rank >= engine.node_count:
        yield Complaint(
            ("engine", "node_rank"),
            (
                f"'node_rank' is {engine.node_rank}; must be less than "
                f"node_count ({engine.node_count})"
            ),
        )
    gpus = settings.all_gpus
    if gpus % engine.node_count:
        yield Complaint(
            ("engine", "node_count"),
            (
                f"{engine.node_count} nodes cannot share {gpus} GPUs evenly "
                "(tensor x pipeline x data parallel size)"
            ),
        )
    elif engine.node_count > 1:
        local = engine.flags.number("data-parallel-size-local")
        ranks = max(1, settings.gpus_per_node // settings.copy_gpus)
        if local is not None and local != ranks:
            yield Complaint(
                ("engine", "extra_args"),
                f"'data-parallel-size-local' is {local}, but each of {engine.node_count} nodes "
                f"runs {ranks} (data-parallel-size / node_count); leave it out",
            )
    if engine.node_count > 1 and engine.leader_address is None:
        yield Complaint(
            ("engine", "leader_address"),
            "'leader_address' is missing; several nodes must know where node 0 is",
        )


def _receivers(settings: Settings) -> Iterator[Complaint]:
    for i, receiver in enumerate(settings.alerts.notify):
        url = receiver.url
        if isinstance(url, SecretStr):
            url = url.get_secret_value()
        if url is None:
            yield Complaint(("alerts", "notify", i), "a slack receiver has no URL; set 'url_file'")
        elif url and not _is_url(url):
            yield Complaint(
                ("alerts", "notify", i, "url"),
                f"the URL of receiver {i + 1} ({receiver.type}) is not valid; "
                "must be http(s)://HOST[:PORT]/..., with no part of the host empty",
                "e.g. http://alertmanager.monitoring.svc:9093",
            )


def _is_url(text: str) -> bool:
    """As far as the text can tell."""
    try:
        parts = urlsplit(text)
        labels = (parts.hostname or "").removesuffix(".").split(".")
        known = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # a port that is no number or too large, half an IPv6 address
        return False
    return known and all(re.fullmatch(r"\S{1,63}", label) for label in labels)


def secrets(section: BaseModel, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every secret in clear, with the key that it came from."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        here = (*path, f"{name}_file" if getattr(section, f"{name}_file", None) else name)
        for i, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, SecretStr) and name == "api_key":
                yield from ((here, key) for key in lines_of(item) or ("",))
            elif isinstance(item, SecretStr):
                yield here, item.get_secret_value()
            elif isinstance(item, BaseModel):
                yield from secrets(item, (*here, i) if isinstance(value, list) else here)


def _secrets(settings: Settings) -> Iterator[Complaint]:
    for path, secret in secrets(settings):
        name = str(path[-1]).removesuffix("_file")
        if not secret:
            yield Complaint(
                path,
                f"'{dotted(path)}' is empty; must hold the secret",
                "set the variable that it comes from, or write null for none",
            )
        if name in ("api_key", "token") and 0 < len(secret) < SHORTEST:
            yield Complaint(
                path,
                f"'{name}' has {len(secret)} characters; anyone could guess it, and logs cannot "
                "hide it",
                "make one with: openssl rand -hex 32",
                is_warning=True,
            )
        if name in ("api_key", "hub_token", "bearer_token", "token") and not (
            secret.isascii() and secret.isprintable()
        ):
            yield Complaint(
                path,
                (
                    f"'{name}' has a character that no HTTP header may carry; must "
                    "be printable ASCII on one line"
                ),
                f"write the token alone into a file and set {name}_file",
            )


def _method(settings: Settings) -> Iterator[Complaint]:
    spec, method, draft = (
        settings.speculative_decoding,
        settings.method,
        settings.models.draft_model,
    )
    if method is None:
        yield Complaint(
            (_SPEC,),
            (
                "'speculative_decoding' is enabled with neither a method nor a draft model; one "
                "must "
                "be given"
            ),
            (
                "add models.draft_model, or set speculative_decoding.method (e.g. ngram), or "
                "enabled: false"
            ),
        )
        return
    if method in NEEDS_DRAFT and draft is None:
        yield Complaint(
            (_SPEC, "method"),
            f"method '{method}' needs a draft checkpoint; 'models.draft_model.path' must be set",
            (
                "add models.draft_model.path, the "
                f"{'draft model' if method == 'draft_model' else 'head'} to load"
            ),
        )
    if method in WITHOUT_DRAFT and draft is not None:
        yield Complaint(
            ("models", "draft_model"),
            f"method '{method}' loads no draft; 'models.draft_model' is not used",
            *_edit(Change("models.draft_model"), ", or choose the method that uses it", warns=True),
        )
    for key, methods in ONLY_FOR.items():
        if getattr(spec, key) is not None and method not in methods:
            yield Complaint(
                (_SPEC, key),
                (
                    f"'{key}' is read by method {' and '.join(sorted(methods))} "
                    f"only; the method is '{method}'"
                ),
                *_edit(Change(f"{_SPEC}.{key}")),
            )
    low, high = spec.prompt_lookup_min, spec.prompt_lookup_max
    if low is not None and high is not None and low > high:
        yield Complaint(
            (_SPEC, "prompt_lookup_min"),
            f"'prompt_lookup_min' is {low}; must be at most prompt_lookup_max ({high})",
        )
    if spec.use_heterogeneous_vocab and spec.draft_sample_method == "probabilistic":
        yield Complaint(
            (_SPEC, "draft_sample_method"),
            "'use_heterogeneous_vocab' drafts greedily; 'draft_sample_method' must be greedy",
            *_edit(Change(f"{_SPEC}.draft_sample_method", "greedy")),
        )


def _draft(settings: Settings) -> Iterator[Complaint]:
    target, draft, method = (
        settings.models.target_model,
        settings.models.draft_model,
        settings.method,
    )
    if draft is None or method in WITHOUT_DRAFT:
        return
    if (
        draft.path.rstrip("/") == target.path.rstrip("/")
        and draft.revision == target.revision
        and method in NEEDS_DRAFT
    ):
        yield Complaint(
            ("models", "draft_model", "path"),
            "the draft is the target itself; must be another checkpoint",
        )
    yield from _draft_dtype(settings)
    tp, wanted = target.tensor_parallel_size, draft.tensor_parallel_size
    if wanted is None or wanted == tp:
        return
    if wanted != 1:
        yield Complaint(
            ("models", "draft_model", "tensor_parallel_size"),
            f"draft TP is {wanted}; must be the target's ({tp})"
            + ("" if method == "draft_model" else " or 1"),
            *_edit(Change("models.draft_model.tensor_parallel_size")),
        )
    elif method == "draft_model":
        yield Complaint(
            ("models", "draft_model", "tensor_parallel_size"),
            f"vLLM runs a draft model at the target's TP only; the draft runs at TP {tp}, not 1",
            *_edit(
                Change("models.draft_model.tensor_parallel_size"), " to silence this", warns=True
            ),
        )


def _draft_dtype(settings: Settings) -> Iterator[Complaint]:
    target: str = settings.models.target_model.dtype
    draft: str | None = settings.models.draft_model.dtype if settings.models.draft_model else None
    if (
        draft is None
        or draft == "auto"
        or SAME_DTYPE.get(draft, draft) == SAME_DTYPE.get(target, target)
    ):
        return
    path: KeyPath = ("models", "draft_model", "dtype")
    if target == "auto":
        yield Complaint(
            path,
            (
                f"vLLM gives the draft the target's dtype; '{draft}' has no "
                "effect while the target's is auto"
            ),
            *_edit(
                Change("models.target_model.dtype", draft),
                ", or remove the draft's dtype",
                warns=True,
            ),
        )
    else:
        yield Complaint(
            path,
            f"draft dtype '{draft}' is not the target's '{target}'; must be the same, "
            "since vLLM gives the draft the target's",
            *_edit(Change("models.draft_model.dtype")),
        )


def _schedule(settings: Settings) -> Iterator[Complaint]:
    spec, path = settings.speculative_decoding, (_SPEC, "schedule")
    if spec.schedule is not None and spec.max_batch_size is not None:
        yield Complaint(
            (_SPEC, "max_batch_size"),
            "'schedule' and 'max_batch_size' are both set; keep one, the schedule says more",
            *_edit(Change(f"{_SPEC}.max_batch_size")),
        )
    length = settings.engine.asked_length
    if length is not None and settings.num_speculative_tokens >= length:
        yield Complaint(
            (_SPEC, "num_speculative_tokens"),
            f"'num_speculative_tokens' is {settings.num_speculative_tokens}; must be less than "
            f"engine.max_model_len "
            f"({length})",
        )
    end = settings.engine.max_num_seqs
    if spec.max_batch_size is not None and end is not None and spec.max_batch_size > end:
        yield Complaint(
            (_SPEC, "max_batch_size"),
            (
                f"'max_batch_size' is {spec.max_batch_size}; no step holds more "
                f"than engine.max_num_seqs ({end})"
            ),
            *_edit(
                Change(f"{_SPEC}.max_batch_size"),
                f" to speculate always, or set it below {end}",
            ),
        )
    if spec.schedule is None:
        return
    if not spec.schedule:
        yield Complaint(
            path,
            "'schedule' is empty; must have rows [first, last, tokens]",
            *_edit(Change(f"{_SPEC}.schedule"), " to speculate always"),
        )
        return
    last, limit = 0, settings.num_speculative_tokens
    for i, (first, final, tokens) in enumerate(spec.schedule):
        row = f"row [{first}, {final}, {tokens}]"
        if first != last + 1:
            yield Complaint(
                (*path, i),
                (
                    f"{row} of 'schedule' starts at {first}; must start at "
                    f"{last + 1}, right after the row before"
                ),
            )
        if final < first:
            yield Complaint(
                (*path, i),
                f"{row} of 'schedule' ends before it starts; must be [first, last, tokens]",
            )
        if not 0 <= tokens <= settings.num_speculative_tokens:
            yield Complaint(
                (*path, i),
                (
                    f"{row} of 'schedule' asks for {tokens} tokens; must be 0 to "
                    f"num_speculative_tokens ({limit})"
                ),
            )
        last = max(last, final)


_NO_CONTROL = Change(f"{_SPEC}.control")


def _control(settings: Settings) -> Iterator[Complaint]:
    """What ``control`` needs, and what a live control cannot run beside."""
    spec = settings.speculative_decoding
    scheduled = settings.schedule is not None
    if spec.control == "schedule" and not scheduled:
        yield Complaint(
            (_SPEC, "control"),
            "'control' is 'schedule' but none is set; must have 'schedule' or 'max_batch_size'",
            *_edit(_NO_CONTROL),
        )
    if spec.control == "fixed" and scheduled:
        key = "schedule"
        if spec.schedule is None:
            key = "max_batch_size"
        yield Complaint(
            (_SPEC, "control"),
            f"'control' is 'fixed' but '{key}' is set; must be one of the two",
            *_edit(_NO_CONTROL, f" to follow '{key}'"),
        )
    if settings.control != "live":
        return
    for why in _beside_live(settings):
        fix = _edit(_NO_CONTROL, " to serve without the live control")
        yield Complaint((_SPEC, "control"), why, *fix)


def _beside_live(settings: Settings) -> Iterator[str]:
    """What a live control cannot run beside, each in a sentence."""
    flags, method = settings.engine.flags, settings.method
    if method is not None and method not in CONTROLLABLE:
        known = ", ".join(sorted(CONTROLLABLE))
        yield (
            f"'control' is 'live', but method '{method}' drafts one length only; "
            f"must be one of {known}"
        )
    ranks = flags.number("data-parallel-size") or 1
    if ranks > 1:
        yield (
            f"'control' is 'live' with {ranks} data parallel ranks; must be one rank, "
            "since ranks that draft different numbers of tokens wait for each other for ever "
            "(vllm-project/vllm#45963, #44185)"
        )
    stages = settings.models.target_model.pipeline_parallel_size
    if stages > 1:
        yield (
            f"'control' is 'live' with {stages} pipeline stages; must be one stage, "
            "since several batches are under way at once and a step's time says nothing of its "
            "draft"
        )
    if flags.text("scheduler-cls") is not None:
        yield (
            "'control' is 'live' and engine.extra_args names a scheduler-cls; "
            "must be one of the two, since the control is a scheduler"
        )
    if settings.speculative_decoding.extra_config.get("enable_adaptive_verification"):
        yield (
            "'control' is 'live' with vLLM's adaptive verification; "
            "must be one of the two, since each would undo what the other decides"
        )
