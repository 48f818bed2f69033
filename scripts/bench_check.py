"""What `specserve check` costs: wall time and memory of a cold start, and comparing two tokenizers of 150,000 tokens.

    .venv/bin/python scripts/bench_check.py [CONFIG]

Prints figures; judges nothing. "With the engine" includes what the installed vLLM supports, from the cache.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import checkpoints as make  # noqa: E402

CHECK = [sys.executable, "-m", "specserve", "check"]
REPEATS = 5


MEASURE = """
import os, resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, code)
"""
"""Runs in a small process: a child's peak memory counts what its parent held when it was started."""


def cold(command: list[str]) -> str:
    """Median wall and processor seconds, largest resident MiB of the process, and its exit code, in words."""
    runs = []
    for _ in range(REPEATS):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True
        )
        runs.append([float(field) for field in done.stdout.split()])
    runs.sort()
    wall, cpu, _, code = runs[REPEATS // 2]
    return f"{wall:.2f} s ({cpu:.2f} s of processor), {max(r[2] for r in runs):.0f} MiB, exit code {code:.0f}"


def large_tokenizer(size: int, seed: int, *, prefix_space: bool) -> dict[str, Any]:
    """A byte-level BPE of ``size`` tokens with as many merges: each new token joins two older ones."""
    random_ = random.Random(seed)
    body = make.tokenizer()
    vocab, merges = body["model"]["vocab"], body["model"]["merges"]
    tokens = [t for t in vocab if t not in ("<unk>", "<s>", "</s>")]
    while len(vocab) < size:
        a, b = random_.choice(tokens), random_.choice(tokens[:400])
        if len(a + b) < 16 and a + b not in vocab:
            merges.append([a, b])
            vocab[a + b] = len(vocab)
            tokens.append(a + b)
    body["pre_tokenizer"]["add_prefix_space"] = prefix_space
    return body


def pair(folder: Path, ours: dict[str, Any], theirs: dict[str, Any], size: int) -> Path:
    """A config of two checkpoints with these tokenizers."""
    for name, builder, tokenizer in (
        ("target", make.llama, ours),
        ("draft", make.small_llama, theirs),
    ):
        checkpoint = builder(vocab_size=size)
        checkpoint.tokenizer = tokenizer
        make.write(folder / name, checkpoint, sparse=True)
    path = folder / "pair.yaml"
    path.write_text(
        f"models: {{target_model: {{path: {folder}/target}}, draft_model: {{path: {folder}/draft}}}}\n"
    )
    return path


COMPARE = """
import sys, time
from specserve.checkpoint import tokenizer as tokenizer_files
from specserve.pair import vocabulary
from specserve.checkpoint.read import read
target, draft = read(sys.argv[1] + "/target"), read(sys.argv[1] + "/draft")
start = time.process_time()
ours, theirs = tokenizer_files.load(target), tokenizer_files.load(draft)
loaded = time.process_time() - start
comparison = vocabulary.compare(ours, theirs)
total = time.process_time() - start
said = comparison.relation + (f", sample not compared: {comparison.not_encoded}" if comparison.not_encoded else "")
print(f"{total:.2f} s of processor (reading {loaded:.2f} s): {said}")
"""


def main() -> None:
    """Measure and print."""
    subprocess.run([*CHECK, "--help"], stdout=subprocess.DEVNULL, check=True)
    for config in sys.argv[1:]:
        print(f"check {config}: {cold([*CHECK, config])}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = 150_000
        base = large_tokenizer(size, 1, prefix_space=False)
        other = json.loads(json.dumps(base))
        other["model"]["vocab"] = dict(reversed(other["model"]["vocab"].items()))
        for title, theirs in (
            ("same file", base),
            ("same map, written otherwise", other),
            ("same map, other pre-tokenizer", large_tokenizer(size, 1, prefix_space=True)),
            ("other tokens", large_tokenizer(size, 2, prefix_space=False)),
        ):
            config = pair(folder / title.replace(" ", "-").replace(",", ""), base, theirs, size)
            done = subprocess.run(
                [sys.executable, "-c", COMPARE, str(config.parent)],
                capture_output=True,
                text=True,
                check=True,
            )
            print(f"2 x {size} tokens, {title}: compare {done.stdout.strip()}")
            print(f"    whole check {cold([*CHECK, str(config)])}")


if __name__ == "__main__":
    main()
