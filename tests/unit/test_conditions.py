"""The schema's conditions and the application's rules say the same about a config."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import jsonschema
import pytest
from pydantic import JsonValue, ValidationError

from specserve.config import rules
from specserve.config.conditions import conditions
from specserve.config.schema import Settings
from specserve.config.speculation import METHODS

VALIDATOR = jsonschema.Draft202012Validator({"allOf": conditions()})
Config = dict[str, JsonValue]


def config(spec: Config, target: Config | None = None, draft: Config | None = None) -> Config:
    """A config with these keys."""
    models: Config = {"target_model": {"path": "/m/target", **(target or {})}}
    if draft is not None:
        models["draft_model"] = {"path": "/m/draft", **draft}
    return {"models": models, "speculative_decoding": spec}


def refused_by_rules(values: Config) -> bool:
    """Whether the application refuses the config."""
    try:
        settings = Settings.model_validate(values)
    except ValidationError:
        return True
    return any(not complaint.is_warning for complaint in rules.check(settings))


def cases() -> Iterator[Config]:
    """Methods with and without a draft, keys of other methods, schedules, data types, widths."""
    drafts: list[Config | None] = [None, {}]
    keys: list[Config] = [
        {},
        {"prompt_lookup_max": 4},
        {"suffix_decoding_max_tree_depth": 8},
        {"use_heterogeneous_vocab": True},
        {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
    ]
    methods: list[JsonValue] = [None, *METHODS]
    for enabled, method, draft, key in product((True, False), methods, drafts, keys):
        yield config({"enabled": enabled, "method": method, **key}, draft=draft)
    schedules: list[JsonValue] = [None, [], [[1, 8, 4]], [[2, 8, 4]], [[1, 8, 6]], [[1, 8, -1]]]
    for schedule, most, longest in product(schedules, (None, 8), (4, 5, 6)):
        yield config(
            {
                "method": "ngram",
                "schedule": schedule,
                "max_batch_size": most,
                "num_speculative_tokens": longest,
            }
        )
    dtypes = ("auto", "half", "float16", "bfloat16", "float32", "float")
    for one, other, method in product(dtypes, (*dtypes, None), ("draft_model", "ngram", "mtp")):
        yield config({"method": method}, target={"dtype": one}, draft={"dtype": other})
    for one, other in product((1, 2, 4, 8), (None, 1, 2, 3, 4, 8)):
        yield config(
            {"method": "eagle3"},
            target={"tensor_parallel_size": one},
            draft={"tensor_parallel_size": other},
        )
    for tls in ({}, {"cert_file": "c"}, {"key_file": "k"}, {"cert_file": "c", "key_file": "k"}):
        yield {**config({"method": "ngram"}), "server": {"tls": tls}}


def test_schema_and_rules_agree() -> None:
    """Of these configs the schema refuses just those that the application refuses."""
    differing = [
        values for values in cases() if VALIDATOR.is_valid(values) == refused_by_rules(values)
    ]
    assert differing == []


@pytest.mark.parametrize(
    "values",
    [
        config({"enabled": "${ON}"}),
        config({"method": "${METHOD}"}),
        config(
            {"method": "${METHOD}", "prompt_lookup_max": 4, "suffix_decoding_max_tree_depth": 2}
        ),
        config({"method": "ngram", "num_speculative_tokens": "${K}", "schedule": [[1, 8, 9]]}),
        config({}, target={"dtype": "float16"}, draft={"dtype": "${DTYPE}"}),
        config({"method": "eagle"}, target={"tensor_parallel_size": "${TP}"}, draft={}),
        config({"method": "eagle"}, draft={"tensor_parallel_size": "${TP}"}),
    ],
)
def test_what_a_variable_decides_is_left_to_the_pod(values: Config) -> None:
    """A value that only the environment knows is never refused by the schema."""
    assert VALIDATOR.is_valid(values)
