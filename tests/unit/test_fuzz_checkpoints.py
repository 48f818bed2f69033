"""Damaged checkpoints, thousands of them: findings or a refusal, never a traceback, a hang or much memory."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specserve.app import preflight
from specserve.config.load import Loaded
from specserve.config.schema import Settings
from specserve.engine.installed import introspect
from specserve.findings import Finding
from tests import checkpoints as make

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 70, 0.5, 1e308, "", "x", "../..", "\x00", [], {}, [None], [[]],
    {"a": 1}, [1 << 40], {"quant_method": None}, {"type": []}, {"rope_type": "linear", "factor": None},
)  # fmt: skip
SEED = 20261129


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every node, a few of large collections."""
    found = [path] if path else []
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in list(children)[:40]:
        found += places(child, (*path, key))
    return found


def odd_value(random_: random.Random, body: Any) -> Any:
    """The same JSON with one node replaced, removed or renamed."""
    nodes = places(body)
    if not nodes:
        return random_.choice(ODD)
    *above, last = random_.choice(nodes)
    here = body
    for key in above:
        here = here[key]
    if random_.random() < 0.15:
        del here[last]
    elif isinstance(here, dict) and random_.random() < 0.1:
        here[random_.choice(["model_type", "text_config", "quantization_config", "x"])] = here.pop(
            last
        )
    else:
        here[last] = random_.choice(ODD)
    return body


def odd_bytes(random_: random.Random, data: bytes) -> bytes:
    """The same bytes cut, changed, doubled or filled."""
    raw = bytearray(data[: 1 << 16])
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(raw) + 1)
        match random_.randrange(5):
            case 0:
                del raw[at:]
            case 1 if raw:
                raw[min(at, len(raw) - 1)] = random_.randrange(256)
            case 2:
                raw[at:at] = bytes(random_.randrange(256) for _ in range(random_.randint(1, 9)))
            case 3:
                raw[at : at + 8] = random_.choice([0, 1, 255, 1 << 62, (1 << 64) - 1]).to_bytes(
                    8, "little"
                )
            case _:
                raw[at:at] = raw[at : at + 64]
    return bytes(raw)


def silent_engine(cache: Path) -> dict[str, str]:
    """An environment whose cache says that the installed vLLM has answered nothing; nobody then waits to ask it."""
    environ = {"XDG_CACHE_HOME": str(cache)}
    installed = introspect.installed()
    if installed is not None:
        file = introspect.cache_file(installed, environ)
        file.parent.mkdir(parents=True)
        file.write_text('{"unanswered": {}}')
    return environ


def verdict(settings: Settings) -> list[Finding]:
    """Everything the checkpoints say."""
    target, found = preflight.read(settings, "target_model")
    draft, more = preflight.read(settings, "draft_model")
    return [*found, *more, *preflight.pair_findings(settings, target, draft).findings]


HEADS: dict[str, Callable[[], make.Checkpoint]] = {
    "draft_model": lambda: make.small_llama(layers=1),
    "eagle": make.eagle,
    "eagle3": lambda: make.speculators(make.eagle3(), verifier="x"),
    "medusa": make.medusa,
    "mlp_speculator": make.mlp_speculator,
    "dflash": make.dflash,
    "mtp": make.with_mtp,
}


@pytest.mark.parametrize("method", HEADS)
def test_damaged_files(method: str, tmp_path: Path) -> None:
    """One file of one model is damaged at a time; every finding still has a code and a sentence."""
    random_ = random.Random(f"{SEED} {method}")
    make.write(tmp_path / "target", make.llama(layers=8))
    make.write(tmp_path / "draft", HEADS[method](), shards=2)
    body = {
        "models": {
            "target_model": {"path": f"{tmp_path}/target"},
            "draft_model": {"path": f"{tmp_path}/draft"},
        },
        "speculative_decoding": {"method": method, "num_speculative_tokens": 3},
    }
    settings = Settings.model_validate(body)
    small = [f for f in tmp_path.rglob("*") if f.is_file()]
    loaded, environ = Loaded(tmp_path / "pair.yaml", settings), silent_engine(tmp_path / "cache")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(300):
        file = random_.choice(small)
        whole = file.read_bytes()
        if file.suffix == ".json" and random_.random() < 0.8:
            damaged = json.dumps(odd_value(random_, json.loads(whole))).encode()
        else:
            damaged = odd_bytes(random_, whole)
        file.write_bytes(damaged)
        found = (
            preflight.run(loaded, environ=environ).findings if turn % 6 == 0 else verdict(settings)
        )
        for finding in found:
            assert finding.code
            assert finding.message
        file.write_bytes(whole)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
