"""The repairs, in the process that they repair and through a server."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from specserve.engine.canary.corruption import CLEAR_GAP_NATS, gaps
from specserve.engine.http.client import Completion, EngineClient
from specserve.engine.http.metrics import parse
from specserve.engine.inside.repairs import applied_in

PROMPT = '{"id": 412, "kind": "'
LAUNCH = """
import logging, torch, vllm.utils.cpu_triton_utils as stand_ins
logging.basicConfig(level=logging.INFO)
{before}
from specserve.engine.inside import repairs
repairs.register(); repairs.register()
print("ours", stand_ins._expand_kernel_impl is repairs.expand)
from vllm.platforms import current_platform
if stand_ins._expand_kernel_impl is None:
    raise SystemExit
current_platform.register_triton_kernel_overrides()
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
values = expand_batch_to_tokens(torch.tensor([0.5, 0.0, 0.25]), torch.tensor([1, 3, 3], dtype=torch.int32), 3, 0, 1)
print("values", values.tolist())
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
if repairs.requested_repairs():
    print("rows", len(apply_top_k_top_p(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int32), None)))
"""
FIXED = """
def fixed(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    start = 0
    for value, end in zip(input_val.tolist(), cu_num_tokens.tolist()):
        output[start:end] = replace_to if value == replace_from else value
        start = end
stand_ins._expand_kernel_impl = fixed
from vllm.v1.sample.ops import topk_topp_sampler
topk_topp_sampler.apply_top_k_only = lambda logits, k: logits
"""


WAITING = """
import logging, os, time
logging.basicConfig(level=logging.INFO)
{before}
from specserve.engine.inside import repairs
repairs.register(); repairs.register()
from vllm.distributed.device_communicators import shm_broadcast
os.sched_yield = lambda: print("yielded")
time.sleep = lambda seconds: print("slept", seconds)
shm_broadcast.sched_yield()
"""


def run_in_engine(
    before: str = "", repairs: str = "cpu-speculative-sampling", code: str = LAUNCH
) -> str:
    """What a process with vLLM in it prints and logs after loading our plugin."""
    env = os.environ | {"SPECSERVE_REPAIRS": repairs}
    code = code.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_defect_is_repaired_once_and_said_once():
    """Where the test shows the defect, values are expanded in the buffer's own dtype, and one line says so."""
    said = run_in_engine()
    assert "values [0.5, 1.0, 1.0]" in said
    assert "ours True" in said
    assert "rows 0" in said
    assert said.count("specserve repair cpu-speculative-sampling: applied") == 1


def test_engine_without_defect_is_left_alone():
    """A right stand-in stays, and the log says that the repair stepped aside."""
    said = run_in_engine(FIXED)
    assert "values [0.5, 1.0, 1.0]" in said
    assert "ours False" in said
    assert applied_in(said.splitlines()) == ()
    assert (
        "specserve repair cpu-speculative-sampling: not applied: this vLLM does not have the defect"
        in said
    )


def test_nothing_happens_unasked():
    """Without the variable of specserve's own the plugin does nothing and says nothing, though the defect is there."""
    said = run_in_engine(repairs="")
    assert "ours False" in said
    assert "specserve repair" not in said


def test_missing_stand_in_is_no_error():
    """An engine that has no such function goes on."""
    said = run_in_engine("stand_ins._expand_kernel_impl = None")
    assert "ours False" in said
    assert "specserve repair cpu-speculative-sampling: " in said


@pytest.mark.parametrize(
    "before", ["", "import vllm.distributed.device_communicators.shm_broadcast"]
)
def test_processes_that_wait_for_each_other_sleep(before):
    """Loaded before our plugin or after it: vLLM's waiting sleeps, and one line says so."""
    said = run_in_engine(before, "cpu-yielding", WAITING)
    assert "slept 2e-05" in said
    assert "yielded" not in said
    assert said.count("specserve repair cpu-yielding: applied") == 1


def test_waiting_is_left_alone_unasked():
    """Without its name vLLM yields as ever; this is what the repair is for."""
    said = run_in_engine(repairs="cpu-speculative-sampling", code=WAITING)
    assert "yielded" in said
    assert "slept" not in said


@pytest.fixture
def client(engine_server) -> EngineClient:
    """Of the tiny pair, which logs that the repairs are in force."""
    repaired = applied_in(engine_server.engine_log_path.read_text().splitlines())
    assert repaired == ("cpu-speculative-sampling", "cpu-yielding")
    return EngineClient(engine_server.base_url, model="tiny", timeout_seconds=120)


def ask(client: EngineClient, tokens: int = 48, prompt: str = PROMPT, **sampling) -> Completion:
    """One text of exactly so many tokens."""
    return client.complete(
        prompt, max_tokens=tokens, ignore_eos=True, return_token_ids=True, **sampling
    )


def text_gaps(client: EngineClient, text: Completion) -> list[float]:
    """Each token's distance to the target's best one in nats, scored in one undrafted pass."""
    ids = [*text.prompt_token_ids, *text.token_ids]
    scored = client.complete(ids, max_tokens=1, temperature=0, prompt_logprobs=20)
    return gaps(text.token_ids, scored.prompt_logprobs[len(text.prompt_token_ids) :])


def acceptance(client: EngineClient, **sampling) -> float:
    """Accepted over drafted tokens of eight texts."""
    before = parse(client.metrics_text(), at_seconds=0)
    for _ in range(8):
        ask(client, **sampling)
    after = parse(client.metrics_text(), at_seconds=0)
    accepted, drafted = (
        after.total(n) - before.total(n) for n in ("accepted_tokens", "draft_tokens")
    )
    return accepted / drafted


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0])
def test_sampled_tokens_are_likely_ones(client, temperature):
    """A token g nats below the best one has at most probability exp(-g/T): at any temperature none is far out."""
    found = [
        gap for _ in range(4) for gap in text_gaps(client, ask(client, temperature=temperature))
    ]
    assert len(found) == 4 * 48
    # 192 tokens, 512 words: a gap wider than this has a probability below 1e-4 anywhere.
    assert max(found) <= temperature * math.log(192 * 512 * 1e4) + 0.1
    assert sum(gap > CLEAR_GAP_NATS for gap in found) <= len(found) * temperature * 0.25


def test_sampling_from_one_token_is_greedy(client):
    """top_k 1, a top_p that only the best token meets, and temperature 0 write the same text."""
    greedy = ask(client, temperature=0).text
    assert ask(client, temperature=1.0, top_k=1).text == greedy
    assert ask(client, temperature=1.0, top_p=1e-6).text == greedy


def test_top_k_bounds_the_rank(client):
    """With top_k 3 at a high temperature, every token is among the target's best three, and not always the best."""
    text = ask(client, temperature=2.0, top_k=3)
    scored = client.complete(
        [*text.prompt_token_ids, *text.token_ids], max_tokens=1, prompt_logprobs=20
    )
    rows = scored.prompt_logprobs[len(text.prompt_token_ids) :]
    ranks = [row[str(token)]["rank"] for token, row in zip(text.token_ids, rows, strict=True)]
    assert max(ranks) in (2, 3)


def test_greedy_and_sampled_share_a_batch(client):
    """Greedy texts come out as when alone while sampled ones run beside them, and each with its own settings."""
    alone = ask(client, temperature=0).text
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.01},
    ] * 4
    with ThreadPoolExecutor(len(kinds)) as pool:
        texts = list(pool.map(lambda kind: ask(client, **kind), kinds))
    assert [t.text for t in texts[0::4] + texts[2::4]] == [alone] * 8
    assert len({t.text for t in texts[1::4]}) == 4
    assert max(max(text_gaps(client, t)) for t in texts[3::4]) < CLEAR_GAP_NATS


def test_seed_repeats_the_text(client):
    """The same seed gives the same text, another seed another."""
    first, again, other = (ask(client, temperature=1.0, seed=seed).text for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_drafts_are_accepted_as_when_greedy(client):
    """Near temperature 0 acceptance is the greedy one, at temperature 1 it is lower but far from collapse."""
    greedy, cold, warm = (acceptance(client, temperature=t) for t in (0, 0.01, 1.0))
    assert cold == pytest.approx(greedy, abs=0.1)
    assert warm > 0.4 * greedy


def test_sampled_tokens_follow_the_targets_distribution(client):
    """Frequencies of the first drafted token fit the target's probabilities: chi-square under its 1e-5 bound."""
    # One certain token, then one of some twenty: the beginnings of words.
    ids = list(ask(client, 1, PROMPT.removesuffix(' "'), temperature=0).prompt_token_ids)
    sampling = {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
    made = [
        c.token_ids
        for _ in range(20)
        for c in client.complete_each([ids] * 50, max_tokens=3, **sampling)
    ]
    (first, count), *_ = Counter(tokens[0] for tokens in made).most_common(1)
    seen = Counter(tokens[1] for tokens in made if tokens[0] == first)
    scored = client.complete(
        [*ids, first, 0], max_tokens=1, prompt_logprobs=20, temperature=0
    ).prompt_logprobs[-1]
    expected = {int(t): count * math.exp(s["logprob"]) for t, s in scored.items()}
    common = {token: n for token, n in expected.items() if n >= 5}
    rest = count - sum(common.values())
    observed = [seen[token] for token in common]
    cells = [
        *zip(observed, common.values(), strict=True),
        *([(count - sum(observed), rest)] if rest >= 5 else []),
    ]
    chi_square = sum((n - e) ** 2 / e for n, e in cells)
    degrees = max(1, len(cells) - 1)
    tail = math.log(1e5)  # Laurent and Massart: P(X >= d + 2 sqrt(dx) + 2x) <= exp(-x)
    assert count >= 900
    assert len(cells) >= 10
    assert chi_square < degrees + 2 * math.sqrt(degrees * tail) + 2 * tail
