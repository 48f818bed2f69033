"""A tiny Llama target and two drafts for it, trained from scratch on generated text.

They are for tests: a real engine loads them in a second, and the pair behaves like a good pair in
production. Seeds and threads are fixed, so two runs on one machine write the same weights.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from models import text

VOCABULARY_TOKENS = 512
CONTEXT_TOKENS = 1024
"""What the engine accepts. Training windows are shorter; the text repeats its shapes, so it carries."""
DOCUMENTS = 6000
TEMPLATE = (
    "{% for message in messages %}{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Shape and training of one model. No steps: the weights stay as they were drawn."""

    name: str
    layers: int
    width: int
    steps: int
    seed: int
    window_tokens: int = 128
    batch: int = 12
    learning_rate: float = 3e-3


TARGET = Recipe("tiny-target", layers=4, width=192, steps=300, seed=1)
DRAFT = Recipe("tiny-draft", layers=1, width=96, steps=250, seed=2)
BAD_DRAFT = Recipe("tiny-draft-bad", layers=1, width=96, steps=0, seed=3)
"""Has the right tokenizer and proposes noise: for alerts and canaries that must see low acceptance."""


def train_tokenizer(corpus: str) -> Tokenizer:
    """Byte-level BPE with the three chat marks as ids 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=[text.END, text.USER, text.ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.split("\n\n"), trainer)
    return tokenizer


def train_model(recipe: Recipe, ids: torch.Tensor) -> LlamaForCausalLM:
    """AdamW with a one-cycle schedule over random windows of `ids`."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(_config(recipe))
    if recipe.steps == 0:
        return model
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, recipe.steps, pct_start=0.1
    )
    for _ in range(recipe.steps):
        starts = torch.randint(0, len(ids) - recipe.window_tokens - 1, (recipe.batch,)).tolist()
        windows = torch.stack([ids[s : s + recipe.window_tokens + 1] for s in starts])
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def build(recipe: Recipe, folder: Path) -> None:
    """Write one model with its tokenizer into an empty folder."""
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    corpus = text.train(DOCUMENTS)
    tokenizer = train_tokenizer(corpus)
    model = train_model(recipe, torch.tensor(tokenizer.encode(corpus).ids))
    # float32: two near-equal tokens stay apart whatever the batch is, so tests can compare greedy text.
    model.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)


def acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: list[list[int]], k: int = 3
) -> float:
    """Accepted draft tokens / draft tokens, greedy, over 48 new tokens per prompt."""
    drafted = accepted = 0
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 48:
            proposal = _greedy(draft, ids, k)
            wanted = _next_tokens(target, ids + proposal)[len(ids) - 1 :]
            agreed = next((i for i in range(k) if proposal[i] != wanted[i]), k)
            drafted, accepted = drafted + k, accepted + agreed
            ids += [*proposal[:agreed], wanted[agreed]]
    return accepted / drafted if drafted else math.nan


def measure(target_folder: Path, draft_folder: Path, samples: int = 12) -> float:
    """Acceptance rate of a saved pair on held-out text."""
    torch.set_num_threads(2)
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    prompts = [tokenizer.encode(sample.prompt).ids for sample in text.held_out(samples)]
    pair = [LlamaForCausalLM.from_pretrained(folder) for folder in (target_folder, draft_folder)]
    return acceptance(pair[0], pair[1], prompts)


def timed_build(recipe: Recipe, folder: Path) -> str:
    """Build, and say how long it took."""
    began = time.monotonic()
    build(recipe, folder)
    return f"{time.monotonic() - began:.0f} s"


def _config(recipe: Recipe) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=recipe.width,
        intermediate_size=recipe.width * 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.width // 32,
        num_key_value_heads=recipe.width // 32,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text.END,
        "pad_token": text.END,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def _next_tokens(model: LlamaForCausalLM, ids: list[int]) -> list[int]:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    choices: list[int] = logits.argmax(-1).tolist()
    return choices


def _greedy(model: LlamaForCausalLM, ids: list[int], count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(_next_tokens(model, ids + out)[-1])
    return out
