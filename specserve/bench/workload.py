"""What is asked: built-in workloads and the user's own traffic, with how to send them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from specserve.errors import ConfigError, Problem
from specserve.files import replacing

MAX_LINE_BYTES = 1 << 20
MAX_REQUESTS = 100_000
_TIMES = ("timestamp", "at_seconds")


class Request(BaseModel):
    """One request of a workload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    messages: tuple[dict[str, str], ...] | None = Field(
        None, description="Chat messages; None for plain completion."
    )
    prompt: str | None = Field(None, description="Text to complete; None for chat.")
    max_tokens: int = Field(128, ge=1)
    at_seconds: float | None = Field(
        None, ge=0, description="When a recorded request was sent, from the first one."
    )


class Workload(BaseModel):
    """Requests that belong together, and how they are sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    predictability: str = Field(
        "", description="How much of the answer stands in the prompt already."
    )
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    requests: tuple[Request, ...]

    @property
    def is_timed(self) -> bool:
        """Whether it is replayed at its recorded times."""
        return all(r.at_seconds is not None for r in self.requests)

    @property
    def is_greedy(self) -> bool:
        """Whether two runs should give the same answers."""
        return self.temperature == 0

    @property
    def digest(self) -> str:
        """SHA-256 of all that is sent: prompts, lengths, times and sampling."""
        sent = self.model_dump_json(exclude={"description", "predictability"})
        return hashlib.sha256(sent.encode()).hexdigest()


def builtin_names() -> list[str]:
    """Names of the workloads that come with specserve."""
    folder = resources.files("specserve.bench") / "workloads"
    return sorted(
        item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")
    )


def builtin(name: str) -> Workload:
    """One of the workloads that come with specserve. Raises ConfigError for an unknown name."""
    if name not in builtin_names():
        raise ConfigError(
            f"unknown workload '{name}'; known: {', '.join(builtin_names())}",
            where="--workload",
            fix="or give --trace FILE",
        )
    text = (resources.files("specserve.bench") / "workloads" / f"{name}.yaml").read_text(
        encoding="utf-8"
    )
    document = yaml.safe_load(text)
    prompts = document.pop("prompts")
    max_tokens = document.pop("max_tokens")
    return Workload(
        name=name,
        requests=tuple(
            Request(
                id=f"{name}-{i:03d}",
                messages=({"role": "user", "content": p},),
                max_tokens=max_tokens,
            )
            for i, p in enumerate(prompts)
        ),
        **document,
    )


def pick(workload: Workload, count: int, *, seed: int) -> Workload:
    """``count`` of its requests, the same for the same seed; recorded times keep their order."""
    if workload.is_timed or count >= len(workload.requests):
        return workload.model_copy(update={"requests": workload.requests[:count]})
    draw = random.Random(seed)  # noqa: S311 sampling, not cryptography
    chosen = draw.sample(workload.requests, count)
    return workload.model_copy(update={"requests": tuple(chosen)})


def limit(workload: Workload, max_tokens: int) -> Workload:
    """The same requests with answers of at most this many tokens."""
    requests = tuple(
        r.model_copy(update={"max_tokens": min(r.max_tokens, max_tokens)})
        for r in workload.requests
    )
    return workload.model_copy(update={"requests": requests})


def as_completions(workload: Workload) -> Workload:
    """The same requests for a model without a chat template: the messages' contents as plain
    text."""
    requests = []
    for request in workload.requests:
        if request.messages is not None:
            text = "\n".join(m.get("content", "") for m in request.messages) + "\n"
            request = request.model_copy(update={"prompt": text, "messages": None})  # noqa: PLW2901
        requests.append(request)
    return workload.model_copy(update={"requests": tuple(requests)})


def from_file(path: Path, *, max_tokens: int = 128) -> Workload:
    """The user's own traffic, one JSON object (or one plain prompt) a line.

    Understood: OpenAI request bodies (``messages`` or ``prompt``, with ``max_tokens``,
    ``temperature`` and, when recorded, ``timestamp`` in seconds or ISO 8601), also under a ``body``
    or ``request`` key; ShareGPT (``conversations``); plain text. Where some lines are chats, the
    others become chats of one message. Raises ConfigError with every bad line.
    """
    problems: list[Problem] = []
    requests: list[Request] = []
    temperatures: list[float] = []
    for number, line in _lines(path):
        try:
            request, temperature = _request(line, number, max_tokens)
        except (ValueError, ValidationError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                reason = _first(error)
            problems.append(Problem(reason, f"{path}:{number}"))
            continue
        requests.append(request)
        temperatures.append(temperature)
    if problems:
        raise ConfigError(problems[:20])
    if not requests:
        raise ConfigError("holds no requests; must have one a line", where=str(path))
    return Workload(
        name=path.name.split(".")[0],
        temperature=sorted(temperatures)[len(temperatures) // 2],
        requests=tuple(_from_first(_alike(requests))),
    )


def _alike(requests: Sequence[Request]) -> Sequence[Request]:
    """All for one endpoint: a block is sent to one."""
    if all(r.messages is None for r in requests):
        return requests
    out = []
    for request in requests:
        if request.messages:
            out.append(request)
        else:
            turn = {"role": "user", "content": request.prompt}
            out.append(request.model_copy(update={"messages": (turn,), "prompt": None}))
    return out


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"is longer than {MAX_LINE_BYTES} characters", where=f"{path}:{number}"
                    )
                if number > MAX_REQUESTS:
                    raise ConfigError(
                        f"has more than {MAX_REQUESTS} lines; cut it", where=str(path)
                    )
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", where=str(path)) from None


def _request(line: str, number: int, max_tokens: int) -> tuple[Request, float]:
    if not line.startswith(("{", "[")):
        return Request(id=f"line-{number}", prompt=line, max_tokens=max_tokens), 0.0
    entry = _parsed(line)
    if not isinstance(entry, dict):
        raise ValueError("is not a JSON object; must be one request")
    body = _body(entry)
    times = [_when(entry.get(key)) for key in _TIMES]
    when = next((at for at in times if at is not None), None)
    lengths = (
        body.get("max_tokens"),
        body.get("max_completion_tokens"),
        entry.get("output_tokens"),
    )
    length = next((n for n in lengths if n is not None), max_tokens)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"asks for {length!r} tokens; must be a whole number from 1")
    temperature = body.get("temperature") or 0.0
    if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
        raise ValueError(f"'temperature' is {temperature!r}; must be a number from 0 to 2")
    messages = _messages(body)
    prompt = body.get("prompt")
    if messages is None and not (isinstance(prompt, str) and prompt):
        raise ValueError(
            "has neither 'messages' nor 'prompt' nor 'conversations'; must have one of them"
        )
    if messages is not None:
        prompt = None
    request = Request(
        id=f"line-{number}", messages=messages, prompt=prompt, max_tokens=length, at_seconds=when
    )
    return request, float(temperature)


def _body(entry: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The OpenAI request in an entry: below a key, or the entry itself."""
    for key in ("body", "request"):
        body = entry.get(key)
        if isinstance(body, dict):
            return body
    return entry


def _parsed(line: str) -> JsonValue:
    try:
        parsed: JsonValue = json.loads(line)
        return parsed
    except RecursionError:
        raise ValueError("is nested too deeply; must be one request") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _when(value: JsonValue) -> float | None:
    """Seconds of a number or of an ISO 8601 text (without a zone: UTC); None for anything else.

    >>> _when("2026-01-01T00:00:01Z") - _when("2026-01-01T00:00:00"), _when(2), _when("Ann")
    (1.0, 2.0, None)
    """
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return None
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        return time.timestamp()
    if isinstance(value, int | float) and abs(value) < 1e15:
        return float(value)
    return None


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    return f"'{'.'.join(map(str, found['loc']))}' cannot be used: {found['msg']}"


def _turns(body: Mapping[str, JsonValue], key: str) -> list[JsonValue]:
    turns = body.get(key) or []
    if not isinstance(turns, list):
        raise ValueError(f"'{key}' is not a list; must hold the turns of a chat")
    return turns


def _messages(body: Mapping[str, JsonValue]) -> tuple[dict[str, str], ...] | None:
    """Chat messages up to and including the last that a user sent; None when there are none."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    found: list[dict[str, str]] = []
    for turn in _turns(body, "messages"):
        if isinstance(turn, dict):
            text = _content(turn.get("content"))
            if text:
                found.append({"role": str(turn.get("role", "user")), "content": text})
    for turn in _turns(body, "conversations"):
        if not isinstance(turn, dict):
            continue
        author, said = turn.get("from"), turn.get("value")
        if isinstance(author, str) and author in roles and isinstance(said, str):
            found.append({"role": roles[author], "content": said})
    while found and found[-1]["role"] == "assistant":
        found.pop()
    return tuple(found) or None


def _content(content: JsonValue) -> str | None:
    """The text of a turn, also of one in parts; None where it has none (a tool's call)."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(
                "holds content that is not text (an image, a sound); only text can be sent again"
            )
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)


def _from_first(requests: Sequence[Request]) -> Iterable[Request]:
    """Recorded times counted from the first; without a time for every request, none is timed."""
    times = [r.at_seconds for r in requests]
    if any(t is None for t in times):
        return [r.model_copy(update={"at_seconds": None}) for r in requests]
    first = min(t for t in times if t is not None)
    return sorted(
        (r.model_copy(update={"at_seconds": (r.at_seconds or 0.0) - first}) for r in requests),
        key=lambda r: r.at_seconds or 0.0,
    )


_KEPT = (
    "messages",
    "conversations",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "timestamp",
    "at_seconds",
    "output_tokens",
)


def redact(line: str, *, keep_text: bool) -> str:
    """One line of a trace without who sent it: only what shapes the load is kept.

    Without ``keep_text`` every word becomes a stable nonsense word of the same length, so lengths
    and repetition (what n-gram lookup and prefix caching live on) stay, and the content does not.
    """
    entry: dict[str, JsonValue] = {"prompt": line}
    if line.startswith("{"):
        parsed = _parsed(line)
        if isinstance(parsed, dict):
            entry = parsed
    body, beside = _body(entry), (*_TIMES, "output_tokens")
    kept = {k: body[k] for k in _KEPT if k in body} | {k: entry[k] for k in beside if k in entry}
    if not keep_text:
        kept = {key: _masked(value, key) for key, value in kept.items()}
    return json.dumps(kept, ensure_ascii=False)


def redact_file(source: Path, destination: Path, *, keep_text: bool) -> int:
    """Redact every line of a trace; the number of requests.

    Raises ConfigError naming a bad line.
    """
    if destination.exists() and destination.samefile(source):
        raise ConfigError("is the trace itself; must be another file", where=str(destination))
    count = 0
    with replacing(destination) as out:
        for number, line in _lines(source):
            try:
                out.write(redact(line, keep_text=keep_text) + "\n")
            except (ValueError, RecursionError) as error:
                raise ConfigError(str(error), where=f"{source}:{number}") from None
            count += 1
        if not count:
            raise ConfigError("holds no requests; must have one a line", where=str(source))
    return count


def _masked(value: JsonValue, key: str) -> JsonValue:
    if isinstance(value, dict):
        return {k: _masked(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_masked(v, key) for v in value]
    if key in _TIMES and _when(value) is not None:
        return value
    if isinstance(value, str) and key not in ("role", "from", "type"):
        return " ".join(_nonsense(word) for word in value.split(" "))
    return value


def _nonsense(word: str) -> str:
    digest = hashlib.sha256("".join(filter(str.isalnum, word)).encode()).hexdigest()
    letters = list(word)
    for i, letter in enumerate(letters):
        if letter.isalnum():
            letters[i] = "abcdefghijklmnop"[int(digest[i % 64], 16)]
    return "".join(letters)
