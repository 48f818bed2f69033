"""Text for the tiny models: short functions, JSON records, numbered steps and chats, from templates.

It is predictable on purpose. A draft of 0.3 million parameters can follow the templates and has to
guess only the words and numbers, which is how a good pair behaves on real traffic. Same seed, same text.

`train` and `held_out` never share a document: their seeds differ, and the words are drawn at random.
"""

# ruff: noqa: SIM905 - a hundred words read better as a sentence than as a list

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"

NOUNS = (
    "account address amount answer batch block branch buffer bucket cache client column counter cursor device entry "
    "event field file filter folder frame group handle header image index item job key label layer letter limit line "
    "list lock log message metric model name node note number offer order owner packet page parcel path plan point "
    "price process query queue range rate record region report request result route row rule sample score segment "
    "server session setting shape signal size source stage state step store stream table tag target task ticket token "
    "total user value vector version volume window word worker zone"
).split()
VERBS = "add build check clean collect copy count fetch find format join load merge parse print read remove".split()
ADJECTIVES = "active blank clean early empty final first fresh global hidden large last local new old open".split()


@dataclass(frozen=True)
class Sample:
    """A document cut in two: what a user sends, and how the text goes on."""

    prompt: str
    continuation: str


def train(documents: int, *, seed: int = 1) -> str:
    """The training text: documents separated by blank lines, every fourth of them a chat."""
    rng = random.Random(f"train {seed}")
    return "\n\n".join(_document(rng, number) for number in range(documents))


def held_out(count: int, *, seed: int = 1) -> list[Sample]:
    """`count` documents that training never saw, each cut after its first line."""
    return list(_samples(random.Random(f"held out {seed}"), count))


def instructions(count: int, *, seed: int = 1) -> list[str]:
    """`count` user messages for /v1/chat/completions, of the kind the pair was trained to answer."""
    rng = random.Random(f"instructions {seed}")
    return [_chat_parts(rng)[0] for _ in range(count)]


def _samples(rng: random.Random, count: int) -> Iterator[Sample]:
    makers = (_function, _records, _steps)
    for number in range(count):
        head, _, rest = makers[number % len(makers)](rng).partition("\n")
        yield Sample(head + "\n", rest)


def _document(rng: random.Random, number: int) -> str:
    if number % 4 == 3:
        question, answer = _chat_parts(rng)
        return f"{USER}{question}{END}{ASSISTANT}{answer}{END}"
    return (_function, _records, _steps)[number % 4](rng)


def _function(rng: random.Random) -> str:
    verb, noun, other, adjective = (
        rng.choice(VERBS),
        rng.choice(NOUNS),
        rng.choice(NOUNS),
        rng.choice(ADJECTIVES),
    )
    low, high = rng.randrange(2, 100), rng.randrange(100, 1000)
    return (
        f"def {verb}_{noun}({noun}, {other}):\n"
        f'    """Return the {adjective} {noun} for each {other}."""\n'
        f"    result = []\n"
        f"    for item in {noun}:\n"
        f"        if item > {low} and item < {high}:\n"
        f"            result.append(item + {other})\n"
        f"    return result\n"
    )


def _records(rng: random.Random) -> str:
    kind = rng.choice(NOUNS)
    rows = [
        json.dumps(
            {
                "id": rng.randrange(100, 1000),
                "kind": kind,
                "name": f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
                "count": rng.randrange(1, 100),
                "active": rng.random() < 0.8,
            }
        )
        for _ in range(rng.randrange(3, 7))
    ]
    return "\n".join(rows) + "\n"


def _steps(rng: random.Random) -> str:
    noun, other = rng.choice(NOUNS), rng.choice(NOUNS)
    lines = [f"How to {rng.choice(VERBS)} the {noun}:"]
    for number in range(1, rng.randrange(4, 8)):
        lines.append(
            f"Step {number}: {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {noun} and the {other}."
        )
    lines.append(f"When this is done, the {noun} is ready.")
    return "\n".join(lines) + "\n"


def _chat_parts(rng: random.Random) -> tuple[str, str]:
    makers = (
        ("Write a function like this one", _function),
        ("Write records", _records),
        ("List the steps", _steps),
    )
    ask, maker = rng.choice(makers)
    head, _, rest = maker(rng).partition("\n")
    return f"{ask}: {head}", f"{head}\n{rest.rstrip()}"
