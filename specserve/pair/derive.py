"""What a checkpoint says of itself where the config leaves it open: method and tokens per draft.

As vLLM 0.32 decides it (``SpeculativeConfig.__post_init__`` of ``config/speculative.py``, read
2026-12-01), but for heads in speculators' format, of which it takes the number from the head alone
when the head is served as the model: here the head's own number counts wherever it is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from specserve.checkpoint.facts import ModelFacts
from specserve.config.speculation import Method
from specserve.pair import mtp
from specserve.pair.head_shapes import block_limit, head_of
from specserve.pair.heads import kind_of

PATH_WORDS = (
    ("eagle-", "eagle"),
    ("eagle3", "eagle3"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
)
"""Parts of a draft's path, in lower case, by which vLLM chooses the method."""


def method_of(draft: ModelFacts) -> Method | None:
    """The method that a draft was made for, by its config and then by its path; None for a whole
    language model, and where nothing tells.
    """
    kind = kind_of(draft)
    if kind in (None, "draft_model"):
        path = draft.path.lower()
        kind = next((method for word, method in PATH_WORDS if word in path), None)
    for method in get_args(Method):
        if method == kind:
            known: Method = method
            return known
    return None


def tokens_of(method: Method, carrier: ModelFacts) -> int | None:
    """Tokens per draft that a checkpoint names; None where it names none.

    ``carrier`` is the draft, or the target where the method lives inside it.
    """
    head = head_of(carrier)
    match method:
        case "mtp":
            named = mtp.modules(carrier)
        case "dspark" | "dflash":
            named = block_limit(head, method)
        case "mlp_speculator":
            named = head.number("n_predict")
        case "medusa":
            named = head.number("num_heads", "medusa_num_heads")
        case _:
            named = None
    if named is None:
        named = _proposed(carrier)
    if named is None or named < 1:
        return None
    return named


def _proposed(head: ModelFacts) -> int | None:
    """``speculative_tokens`` of the first proposal method in speculators' format."""
    section = head.config.get("speculators_config")
    if not isinstance(section, Mapping):
        return None
    methods = section.get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], Mapping):
        return None
    tokens = methods[0].get("speculative_tokens")
    if type(tokens) is int:
        return tokens
    return None
