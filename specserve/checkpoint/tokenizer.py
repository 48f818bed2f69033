"""Token -> id maps from a checkpoint's tokenizer file: tokenizer.json, SentencePiece, tiktoken,
tekken.

Maps are read from the files themselves; the tokenizer libraries are loaded only to encode text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import BaseModel, JsonValue

from specserve.checkpoint.facts import ModelFacts, Source
from specserve.checkpoint.safetensors import Corrupt, parse_object
from specserve.units import size

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as NativeTokenizer

T = TypeVar("T")

MAX_TOKENIZER_BYTES = 64 * 1024**2
MAX_TOKENS = 600_000
"""More than twice the largest vocabulary of a public model."""
MAX_QUOTES = 3_000_000
"""Quotation marks of a tokenizer.json, two for each token and four for each merge: Gemma's 262,144
tokens and 514,906 merges have 2.6 million. Known before the file is parsed, which takes 200 MiB
then."""
TokenizerKind = Literal["tokenizer.json", "sentencepiece", "tiktoken", "tekken"]
_SENTENCEPIECE = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model.v3",
)
_RULES = ("normalizer", "pre_tokenizer")
_NO_MODEL = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
"""Stands where the vocabulary was, in what is kept of the rest."""


class MissingLibrary(Exception):
    """Raised when a tokenizer file needs a library that is not installed."""


class NotRead(Exception):
    """Raised when a tokenizer file is larger than what is read here; says why."""


class NotEncodable(Exception):
    """Raised when a map is known and text cannot be encoded with it; says why."""


@dataclass(frozen=True)
class Tokenizer:
    """The vocabulary of one tokenizer file."""

    kind: TokenizerKind
    file: str
    digest: str
    """SHA-256 of the file."""
    base: Mapping[str, int]
    """Ordinary tokens. Bytes are written in GPT-2's printable alphabet, as tokenizer.json does."""
    added: Mapping[str, int] = field(default_factory=dict)
    """Special and added tokens."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """Part (``normalizer``, ``pre_tokenizer``, ``merges``, ...) -> digest of its definition."""
    data: bytes = field(default=b"", repr=False)
    """The file itself, to encode with."""
    shell: str = field(default="", repr=False)
    """A tokenizer.json without vocabulary and merges: its rules alone."""

    def shares_model_with(self, other: Tokenizer) -> bool:
        """Whether vocabulary, merges and model are the same, so that only rules can differ."""
        return (
            self.kind == other.kind == "tokenizer.json"
            and self.base == other.base
            and self.added == other.added
            and all(self.rules[part] == other.rules[part] for part in ("merges", "model"))
        )

    @property
    def size(self) -> int:
        """Largest id plus one."""
        return 1 + max(max(self.base.values(), default=-1), max(self.added.values(), default=-1))

    def space_prefix(self) -> tuple[str, ...]:
        """The mark of a space before a word: ``Ġ`` (byte-level BPE) or ``▁`` (SentencePiece); both
        where unclear.
        """
        marks = tuple(mark for mark in ("Ġ", "▁") if mark + "a" in self.base)
        if len(marks) == 1:
            return marks
        return ("Ġ", "▁")


class TekkenWord(BaseModel):
    """An ordinary token; its bytes in base64."""

    rank: int
    token_bytes: str


class TekkenSpecial(BaseModel):
    """A special token."""

    rank: int
    token_str: str


class TekkenConfig(BaseModel):
    """How many of the tokens are in use, and how text is split into words."""

    pattern: str | None = None
    default_vocab_size: int
    default_num_special_tokens: int


class TekkenFile(BaseModel):
    """What is read of a tekken.json."""

    config: TekkenConfig
    vocab: list[TekkenWord]
    special_tokens: list[TekkenSpecial] | None = None

    def words(self) -> list[TekkenWord]:
        """The ordinary tokens in use: the file lists more. Special ones come before them."""
        ordinary = self.config.default_vocab_size - self.config.default_num_special_tokens
        return [word for word in self.vocab if word.rank < ordinary]


def load(facts: ModelFacts) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None when it has none. Raises Corrupt, NotRead or
    MissingLibrary.
    """
    name = _choose(facts.sizes)
    if name is None or facts.source is None:
        return None
    data = _bytes(facts.source, facts.sizes, name)
    digest = hashlib.sha256(data).hexdigest()
    try:
        if name == "tokenizer.json":
            return _tokenizer_json(name, digest, data)
        if name == "tekken.json":
            return _tekken(name, digest, data)
        if name.endswith(".tiktoken") or _is_tiktoken(data):
            return Tokenizer("tiktoken", name, digest, _ranks(data), data=data)
        return _sentencepiece(name, digest, data)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as e:
        if isinstance(e, Corrupt):
            raise
        raise Corrupt(f"is not a tokenizer file ({first_line(e)})") from None


def first_line(error: Exception) -> str:
    """What is wrong, without the rest of a long report."""
    return (str(error).splitlines() or ["damaged"])[0]


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """A function from text to ids without special tokens. Raises Corrupt or NotEncodable."""
    match tokenizer.kind:
        case "tokenizer.json":
            return json_encoder(tokenizer.data)[1]
        case "tekken":
            return _encode_tekken(tokenizer)
        case "sentencepiece":
            processor = _processor(tokenizer.data)
            return lambda text: list(processor.encode(text))
        case "tiktoken":
            raise NotEncodable(f"{tokenizer.file} does not say how text is split into words")


def _encode_tekken(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    try:
        from tiktoken import Encoding
    except ImportError:
        raise NotEncodable(
            "the tiktoken library is not installed (pip install 'specserve[vocab]')"
        ) from None
    file = TekkenFile.model_validate_json(tokenizer.data)
    specials = file.config.default_num_special_tokens
    ranks = {base64.b64decode(word.token_bytes): word.rank for word in file.words()}
    pattern = file.config.pattern or ""
    native = _guarded(
        lambda: Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    )
    return lambda text: [i + specials for i in _guarded(lambda: native.encode_ordinary(text))]


def json_encoder(
    data: bytes, shared: NativeTokenizer | None = None, shell: str = ""
) -> tuple[NativeTokenizer, Callable[[str], list[int]]]:
    """The library's tokenizer of a tokenizer.json, and a function from text to ids.

    With ``shell`` the vocabulary and the merges are those of ``shared``, under the shell's rules:
    loading them again would be most of the work.
    """
    from tokenizers import Tokenizer as Native

    if shared is None or not shell:
        native: NativeTokenizer = _guarded(lambda: Native.from_buffer(data))
    else:
        native = shared
        rules = _guarded(lambda: Native.from_str(shell))
        native.normalizer, native.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    return native, lambda text: list(
        _guarded(lambda: native.encode(text, add_special_tokens=False).ids)
    )


def _guarded(call: Callable[[], T]) -> T:
    """Call a library in Rust; it raises a bare Exception, or a PanicException, which is no
    Exception at all.
    """
    try:
        return call()
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise Corrupt(f"is one that no text can be encoded with ({str(e)[:200]})") from None


def _choose(sizes: Mapping[str, int]) -> str | None:
    """The file that vLLM would use first."""
    for name in ("tokenizer.json", "tekken.json", *_SENTENCEPIECE):
        if name in sizes:
            return name
    return next((n for n in sizes if n.endswith(".tiktoken")), None)


def _bytes(source: Source, sizes: Mapping[str, int], name: str) -> bytes:
    if sizes[name] > MAX_TOKENIZER_BYTES:
        raise NotRead(f"has {size(sizes[name])}; more than {size(MAX_TOKENIZER_BYTES)} is not read")
    try:
        return source.read(name, 0, MAX_TOKENIZER_BYTES)
    except OSError as e:
        raise Corrupt(f"cannot be read ({e.strerror or e})") from None


def _tokenizer_json(name: str, digest: str, data: bytes) -> Tokenizer:
    if data.count(b'"') > MAX_QUOTES:
        raise NotRead(f"has more tokens and merges ({size(len(data))}) than are read here")
    body = parse_object(data)
    model = body.get("model")
    if not isinstance(model, dict):
        raise Corrupt("has no model")
    vocab = model.pop("vocab", None)
    if isinstance(vocab, list):
        base = dict(_unigram(vocab))
    else:
        base = vocab
    if not isinstance(base, dict):
        raise Corrupt("has no vocabulary")
    added = {str(t["content"]): t["id"] for t in body.get("added_tokens") or []}
    _check_ids(base)
    _check_ids(added)
    for token, token_id in added.items():
        if base.get(token) == token_id:
            del base[token]
    rules = {part: _digest(body.get(part)) for part in _RULES}
    rules["merges"] = _merges(model.pop("merges", None))
    rules["model"] = _digest({k: v for k, v in model.items() if v not in (None, False, "")})
    shell = json.dumps({**body, "added_tokens": [], "model": _NO_MODEL})
    return Tokenizer("tokenizer.json", name, digest, base, added, rules, data, shell)


def _unigram(vocab: list[JsonValue]) -> list[tuple[str, int]]:
    tokens = []
    for i, entry in enumerate(vocab):
        if not isinstance(entry, list):
            raise Corrupt("has a token without a score")
        tokens.append((str(entry[0]), i))
    return tokens


def _merges(merges: JsonValue) -> str:
    """Digest of merges as ``a b`` lines: newer files write pairs, older ones strings."""
    if not isinstance(merges, list):
        return _digest(merges)
    words = []
    for merge in merges:
        if isinstance(merge, list):
            words.append(" ".join(map(str, merge)))
        else:
            words.append(str(merge))
    lines = "\n".join(words)
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _check_ids(ids: Mapping[str, JsonValue]) -> None:
    if len(ids) > MAX_TOKENS:
        raise Corrupt(f"has {len(ids)} tokens; more than {MAX_TOKENS} are not read")
    for token, token_id in ids.items():
        if type(token_id) is not int or not 0 <= token_id < 1 << 31:
            raise Corrupt(f"token {token[:50]!r} has no valid id")


def _digest(value: JsonValue) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _is_tiktoken(data: bytes) -> bool:
    """Whether a ``tokenizer.model`` is tiktoken text (Llama 3's original) and not a SentencePiece
    protobuf.
    """
    first = data[:200].split(b"\n", 1)[0].split(b" ")
    return len(first) == 2 and first[1].strip().isdigit()


def _ranks(data: bytes) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for line in data.splitlines():
        if line.strip():
            token, rank = line.split()
            ranks[_printable(base64.b64decode(token, validate=True))] = int(rank)
    _check_ids(ranks)
    return ranks


def _tekken(name: str, digest: str, data: bytes) -> Tokenizer:
    file = TekkenFile.model_validate_json(data)
    specials = file.config.default_num_special_tokens
    base = {_printable(base64.b64decode(w.token_bytes)): w.rank + specials for w in file.words()}
    added = {token.token_str: token.rank for token in file.special_tokens or ()}
    _check_ids(base)
    _check_ids(added)
    rules = {"pre_tokenizer": _digest(file.config.pattern)}
    return Tokenizer("tekken", name, digest, base, added, rules, data)


def _sentencepiece(name: str, digest: str, data: bytes) -> Tokenizer:
    processor = _processor(data)
    base: dict[str, int] = {}
    added: dict[str, int] = {}
    for i in range(min(processor.get_piece_size(), MAX_TOKENS)):
        special = processor.is_control(i) or processor.is_unknown(i)
        (added if special else base)[processor.id_to_piece(i)] = i
    return Tokenizer("sentencepiece", name, digest, base, added, data=data)


def _processor(data: bytes) -> SentencePieceProcessor:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise MissingLibrary("sentencepiece") from None
    try:
        return SentencePieceProcessor(model_proto=data)
    except RuntimeError as e:
        raise Corrupt(f"is not a SentencePiece model ({str(e)[:100]})") from None


def _printable(token: bytes) -> str:
    return token.decode("latin-1").translate(_ALPHABET)


def _alphabet() -> dict[int, str]:
    """Byte -> printable stand-in, GPT-2's table: printable Latin-1 stays, the rest moves behind
    U+0100.
    """
    stays = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = (b for b in range(256) if b not in stays)
    return {b: chr(256 + i) for i, b in enumerate(moved)}


_ALPHABET = _alphabet()
