"""Texts encoded by a checkpoint's tokenizer, in a process of its own.

A tokenizer file is a program in disguise: rules with regular expressions that make gigabytes out of
a line, millions of merges. The libraries that run it are written in Rust and C++ and know no
bounds, so the process has them: memory, processor time, and an end.

As ``python -m specserve.checkpoint.encoding`` it reads one job from stdin: a line of JSON, then the
files; and writes one line of JSON.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from specserve.checkpoint.safetensors import Corrupt
from specserve.checkpoint.tokenizer import (
    NotEncodable,
    Tokenizer,
    TokenizerKind,
    encoder,
    json_encoder,
)
from specserve.units import MIB, size

MEMORY_BYTES = 256 * MIB
"""Address space of the process for a small file: Python and the library take 120 MiB of it."""
MEMORY_PER_BYTE = 12
"""A tokenizer of 260,000 tokens and as many merges (24 MB) takes 288 MB in all."""
SECONDS = 30


@dataclass(frozen=True)
class EncodeResult:
    """The ids of each text, by each tokenizer."""

    ids: tuple[tuple[tuple[int, ...], ...], ...]


class EncodingFile(BaseModel):
    """One tokenizer of a job."""

    kind: TokenizerKind
    name: str
    length: int
    """Bytes of the file; 0 for a tokenizer.json that shares vocabulary and merges with the one
    before it, and differs in its rules."""
    rules: str = ""
    """The tokenizer.json without vocabulary and merges, of one that shares them."""


class EncodingJob(BaseModel):
    """What the process is to encode, with which files."""

    texts: list[str]
    files: list[EncodingFile]


class EncodingAnswer(BaseModel):
    """The ids of each text by each tokenizer, or why there are none."""

    ids: list[list[list[int]]] = []
    corrupt: str | None = None
    not_encodable: str | None = None


def encode(tokenizers: Sequence[Tokenizer], texts: Sequence[str]) -> EncodeResult:
    """The ids without special tokens. Raises Corrupt or NotEncodable, also for a file that needs
    more memory or time than the process may take.
    """
    files, data = [], b""
    for i, tokenizer in enumerate(tokenizers):
        first = tokenizers[0]
        if i > 0 and tokenizer.shares_model_with(first):
            files.append(
                EncodingFile(
                    kind=tokenizer.kind, name=tokenizer.file, length=0, rules=tokenizer.shell
                )
            )
        else:
            files.append(
                EncodingFile(kind=tokenizer.kind, name=tokenizer.file, length=len(tokenizer.data))
            )
            data += tokenizer.data
    job = EncodingJob(texts=list(texts), files=files)
    largest = max(file.length for file in files)
    memory = max(MEMORY_BYTES, MEMORY_PER_BYTE * largest + MEMORY_BYTES // 2)
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(memory)],
            check=False,
            input=job.model_dump_json().encode() + b"\n" + data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=2 * SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NotEncodable(f"it takes more than {2 * SECONDS} s to encode a text") from None
    if done.returncode != 0 or not done.stdout:
        raise NotEncodable(
            f"it takes more than {size(memory)} of memory or {SECONDS} s to encode a text"
        )
    answer = EncodingAnswer.model_validate_json(done.stdout)
    if answer.corrupt is not None:
        raise Corrupt(answer.corrupt)
    if answer.not_encodable is not None:
        raise NotEncodable(answer.not_encodable)
    return EncodeResult(tuple(tuple(tuple(line) for line in ids) for ids in answer.ids))


def main() -> None:
    """Encode one job within the limits."""
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = EncodingJob.model_validate_json(sys.stdin.buffer.readline())
    answer = EncodingAnswer()
    native = None
    try:
        for file in job.files:
            if file.kind == "tokenizer.json":
                if file.length:
                    native = None  # two large ones at once would not fit
                native, run = json_encoder(sys.stdin.buffer.read(file.length), native, file.rules)
            else:
                data = sys.stdin.buffer.read(file.length)
                run = encoder(Tokenizer(file.kind, file.name, "", {}, data=data))
            answer.ids.append([run(text) for text in job.texts])
    except Corrupt as error:
        answer = EncodingAnswer(corrupt=str(error))
    except NotEncodable as error:
        answer = EncodingAnswer(not_encodable=str(error))
    sys.stdout.write(answer.model_dump_json() + "\n")


if __name__ == "__main__":
    main()
