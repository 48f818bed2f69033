#!/usr/bin/env python3
"""How long `specserve plan` takes from local metadata: a small pair, and a checkpoint with 37,000 tensors.

Prints the median of several runs of the whole program, and the part that is planning (second number).
"""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RUNS = 7
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip


def header(folder: Path) -> None:
    """config.json and one safetensors file of 94 layers x 128 experts that is all header and a hole."""
    entries: dict[str, object] = {}
    at = 0
    for layer in range(94):
        for expert in range(128):
            for name, shape in (
                ("gate_proj", [1536, 4096]),
                ("up_proj", [1536, 4096]),
                ("down_proj", [4096, 1536]),
            ):
                size = shape[0] * shape[1] * 2
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                entries[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
                at += size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE))
    head = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + at)


def seconds(config: Path) -> float:
    """Median wall time of the program."""
    command = [sys.executable, "-m", "specserve", "plan", str(config), "--format", "json"]
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(command, check=False, capture_output=True, cwd=ROOT)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    """Time both."""
    from tests import checkpoints

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        target = checkpoints.write(root / "target", checkpoints.small_llama())
        draft = checkpoints.write(root / "draft", checkpoints.small_llama(layers=1))
        header(root / "experts")
        hardware = "hardware: {gpu_name: NVIDIA H100 80GB HBM3}\n"
        small, large = root / "small.yaml", root / "large.yaml"
        small.write_text(
            f"models: {{target_model: {{path: {target}}}, draft_model: {{path: {draft}}}}}\n{hardware}"
        )
        alone = "speculative_decoding: {enabled: false}\n"
        large.write_text(
            f"models: {{target_model: {{path: {root}/experts, tensor_parallel_size: 8}}}}\n{alone}{hardware}"
        )
        print(f"small pair                 {seconds(small):.2f} s")
        print(f"one header, 36,096 tensors {seconds(large):.2f} s")


if __name__ == "__main__":
    main()
