"""MTP: the proposer is one or more extra layers inside the target's own checkpoint (or a file of
their own).

How many modules there are, and the rule of multiples, are vLLM's (``config/speculative.py`` 0.32,
read 2026-11-29).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from specserve.checkpoint.facts import ASSISTANTS, ModelFacts
from specserve.checkpoint.fields import layer_count
from specserve.errors import Change
from specserve.findings import Finding
from specserve.pair.head_shapes import hidden_size

TOKENS = "speculative_decoding.num_speculative_tokens"
_KEYS = ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_ONE_MODULE = ("mimo_v2", *ASSISTANTS)
"""Model types of which vLLM runs one module whatever the config says."""
_ONE_BY_DEFAULT = (
    "longcat_flash",
    "step3p5",
    "step3p7",
    "minimax_m3_vl",
    "minimax_m3_mtp",
    "dots3_note",
)
"""Model types for which vLLM assumes one module when the config names none."""
_EVERY_MODULE_RUNS = ("step3p5", "step3p7", "inkling_model", "inkling_mm_model")


def modules(facts: ModelFacts) -> int | None:
    """``n_predict``: MTP modules of a checkpoint; None when its config names none."""
    if facts.model_type.startswith(_ONE_MODULE):
        return 1
    nested = facts.config.get("mtp_config")
    for config in (facts.config, facts.text_config, nested if isinstance(nested, Mapping) else {}):
        for key in _KEYS:
            if type(n := config.get(key)) is int:
                return n
    if facts.model_type in _ONE_BY_DEFAULT:
        return 1
    return None


def check(carrier: ModelFacts, k: int, where: str) -> Iterator[Finding]:
    """``carrier`` is the target, or the separate checkpoint of the MTP modules; ``where`` is its
    config key.
    """
    n = modules(carrier)
    if not n or n < 1:
        message = (
            "method mtp needs a checkpoint with MTP modules; its config.json names none "
            "(num_nextn_predict_layers ...)"
        )
        fix = "choose another method, or a checkpoint that ships its MTP modules"
        yield Finding("mtp-modules-missing", "error", where, message, fix)
        return
    if carrier.tensors and not _has_weights(carrier):
        message = (
            f"config.json names {n} MTP module{'s' * (n > 1)}, no tensor of one "
            "is there (conversions drop them)"
        )
        yield Finding("mtp-weights-missing", "error", where, message, "use the original checkpoint")
    if k > n and k % n:
        legal = ", ".join(str(i) for i in [*range(1, n + 1), 2 * n, 3 * n])
        message = (
            f"num_speculative_tokens is {k}; with {n} MTP modules it must "
            f"be up to {n} or a multiple of it"
        )
        change = Change(TOKENS, k - k % n)
        fix = f"{change}; legal are {legal}, ..."
        yield Finding("mtp-multiple", "error", TOKENS, message, fix, (change,))
    elif k > n and not carrier.model_type.startswith((*_EVERY_MODULE_RUNS, *ASSISTANTS)):
        message = (
            f"num_speculative_tokens is {k} and there "
            f"{'is 1 module' if n == 1 else f'are {n} modules'}"
        )
        message += "; it runs several times, and later positions are accepted less"
        change = Change(TOKENS, n)
        fix = f"measure with {TOKENS}: {n}"
        yield Finding("mtp-module-reuse", "warning", TOKENS, message, fix, (change,))


def width(target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """Modules in a checkpoint of their own read the target's hidden states beside embeddings of
    the same width; an assistant projects them first."""
    ours, theirs = hidden_size(target), hidden_size(draft)
    if ours is None or theirs is None or ours == theirs or draft.model_type.endswith("assistant"):
        return
    message = (
        f"the draft's MTP module works on hidden size {theirs}, the target has {ours}; they must "
        "be equal"
    )
    fix = "use the MTP module of this very target"
    yield Finding("head-hidden-size", "error", "models.draft_model.path", message, fix)


def _has_weights(facts: ModelFacts) -> bool:
    """Whether any tensor belongs to an MTP module, by its name or as a layer behind the last."""
    own = layer_count(facts.text_config)
    for name in facts.tensors or ():
        if "mtp" in name or "nextn" in name or "eh_proj" in name:
            return True
        match = re.search(r"\blayers\.(\d{1,6})\.", name)
        if own is not None and match and int(match.group(1)) >= own:
            return True
    return facts.model_type.endswith("assistant")
