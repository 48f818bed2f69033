"""A batch as it runs: requests out, answers back, each kept once.

One thread decides and writes; the others do nothing but wait for one answer each.
"""

from __future__ import annotations

import heapq
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, TypeAlias

from pydantic import JsonValue

from specserve.app import arm
from specserve.app.batch import inputs
from specserve.app.batch.inputs import BadLine, BatchRequest, LineShape, Raw
from specserve.app.batch.journal import Fate, Journal, Kept
from specserve.app.batch.pace import Pace, Yielding
from specserve.engine.http.client import EngineClient, EngineNotListening
from specserve.engine.http.metrics import EngineSnapshot
from specserve.engine.http.transport import Answer, EngineError, EngineRefused
from specserve.errors import ConfigError, EngineLost

TICK_SECONDS = 0.5
SYNC_SECONDS = 2.0
LOOK_SECONDS = 1.0
"""Between two reads of the metrics of a server that is shared."""
KEPT_BAD_LINES = 1_000
"""Numbers of bad lines that are told; all of them are in OUTPUT."""
_OVERLOADED = (429, 503)
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class _Job:
    """A request on its way. ``serial`` orders retries that are due at the same time."""

    index: int
    request: BatchRequest
    attempts: int = 0
    """That failed in a way that may be the request's own fault."""


@dataclass(frozen=True)
class _Came:
    """What one sending brought."""

    job: _Job
    answer: Answer | None = None
    error: EngineError | None = None


_News: TypeAlias = "_Came | EngineSnapshot | None"
"""None: the metrics could not be read."""


@dataclass(frozen=True)
class BatchProgress:
    """How far a batch is."""

    done: int
    failed: int
    in_flight: int
    requests_per_second: float
    tokens_per_second: float
    done_ratio: float | None
    """Of the whole input, by its bytes; None for a pipe."""
    left_seconds: float | None
    holds: str | None
    """Why it goes slower than it could, or not at all; None when nothing holds it."""


@dataclass(kw_only=True)
class BatchRun:
    """Everything a run has; `run` does it."""

    client: EngineClient
    journal: Journal
    source: BinaryIO
    source_bytes: int | None
    """None for a pipe."""
    shape: LineShape
    pace: Pace
    yielding: Yielding | None = None
    retries: int = 5
    timeout_seconds: float = 1800.0
    patience_seconds: float = 600.0
    """Without one answer while the server is gone or refuses: then the batch ends, to be resumed.
    """
    report: Callable[[BatchProgress], None] = lambda _: None
    report_seconds: float = 10.0
    server_ended: Callable[[], str | None] = lambda: None
    """Why the server that we launched is gone for good; None while it is there."""
    clock: Callable[[], float] = time.monotonic
    bad_lines: list[tuple[int, str]] = field(default_factory=list)
    """Line and reason, of this run."""
    made: int = 0
    """Requests that this run ended."""
    tokens: int = 0
    """That this run was given."""
    highest: int = 0
    """Most requests in flight."""
    busy_seconds: float = 0.0
    """Requests in flight, added up over time."""
    _inbox: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    _outbox: queue.SimpleQueue[_News] = field(default_factory=queue.SimpleQueue)
    _again: list[tuple[float, int, _Job]] = field(default_factory=list)
    _workers: int = 0
    _in_flight: int = 0
    _own: int = 0
    """Most in flight since the last read of the metrics."""
    _read: int = 0
    _read_bytes: int = 0
    _exhausted: bool = False
    _failures: int = 0
    _trouble: str | None = None
    _trouble_since: float = 0.0
    _ahead: Raw | None = None
    _counted_at: float = 0.0

    def run(self) -> None:
        """Ask for everything that is not in the journal. Raises ConfigError where the disk is full
        or the server wants another key, EngineLost where it stays away."""
        raws = inputs.lines(self.source, self.shape)
        started = reported = synced = self._counted_at = self.clock()
        stop = threading.Event()
        if self.yielding is not None:
            threading.Thread(target=self._look, args=(stop,), daemon=True).start()
        recent = [(started, 0, 0)]
        try:
            while True:
                self._start(raws)
                if self._exhausted and not self._in_flight and not self._again:
                    break
                self._wait()
                now = self.clock()
                self._require_server(now)
                if now - synced >= SYNC_SECONDS:
                    self.journal.sync()
                    synced = now
                if now - reported >= self.report_seconds:
                    self.report(self._progress(now, recent[0]))
                    recent = [*recent, (now, self.made, self.tokens)][-7:]
                    reported = now
        finally:
            stop.set()
            for _ in range(self._workers):
                self._inbox.put(None)
        self.journal.finish()

    # --- out ---

    def _start(self, raws: Iterator[Raw]) -> None:
        """Send as many as may be in flight."""
        now = self.clock()
        while self._in_flight < self.pace.allowed(now):
            job = self._next(raws, now)
            if job is None:
                return
            self._count(now)
            self._in_flight += 1
            self._own = max(self._own, self._in_flight)
            self.highest = max(self.highest, self._in_flight)
            if self._workers < self._in_flight:
                self._workers += 1
                threading.Thread(target=self._work, name="batch", daemon=True).start()
            self._inbox.put(job)

    def _count(self, now: float) -> None:
        self.busy_seconds += self._in_flight * (now - self._counted_at)
        self._counted_at = now

    def _next(self, raws: Iterator[Raw], now: float) -> _Job | None:
        """What to send: what is due again, else the next of the input; None for nothing yet."""
        if self._again and self._again[0][0] <= now:
            return heapq.heappop(self._again)[2]
        while not self._exhausted:
            if self._ahead is None:
                self._ahead = next(raws, None)
            raw = self._ahead
            if raw is None:
                self._exhausted = True
                return None
            if not self.journal.has_room(raw.index):
                return None  # an earlier answer must come first
            self._ahead = None
            self._read, self._read_bytes = raw.index + 1, raw.ends_at
            try:
                if self.journal.has(raw.index):
                    continue
                return _Job(raw.index, inputs.request(raw, self.shape))
            except BadLine as error:
                self._keep_bad(raw, str(error))
        return None

    def _keep_bad(self, raw: Raw, reason: str) -> None:
        if len(self.bad_lines) < KEPT_BAD_LINES:
            self.bad_lines.append((raw.line, reason))
        error: dict[str, JsonValue] = {
            "code": "invalid_request",
            "message": f"line {raw.line} of the input: {reason}",
        }
        line = _line(raw.index, inputs.custom_id(raw), None, error)
        self.journal.add(raw.index, Kept(Fate.BAD_LINE, line))
        self.made += 1

    def _work(self) -> None:
        while True:
            job = self._inbox.get()
            if job is None:
                return
            request = job.request
            try:
                answer = self.client.post(request.path, request.body, timeout=self.timeout_seconds)
            except EngineError as error:
                self._outbox.put(_Came(job, error=error))
            else:
                self._outbox.put(_Came(job, answer=answer))

    def _look(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS):
            self._outbox.put(arm.counters(self.client, self.clock, timeout=10))

    # --- back ---

    def _wait(self) -> None:
        """Take one thing that has come, so that the next request leaves before more is written;
        wait for it, but not for long."""
        timeout = TICK_SECONDS
        now = self.clock()
        if self._again and self._in_flight < self.pace.allowed(now):
            timeout = min(timeout, max(0.0, self._again[0][0] - now))
        elif now < self.pace.paused_until:
            timeout = min(timeout, self.pace.paused_until - now)
        try:
            news = self._outbox.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return
        self._take(news)

    def _take(self, news: _News) -> None:
        now = self.clock()
        if isinstance(news, _Came):
            self._count(now)
            self._in_flight -= 1
            if news.answer is not None:
                self._answered(news.job, news.answer, now)
            elif news.error is not None:
                self._failed(news.job, news.error, now)
        elif self.yielding is not None:
            reason = None
            if news is not None:
                reason = self.yielding.read(news, self._own)
            self._own = self._in_flight
            pace = self.pace
            pace.cap = Yielding.cap(pace.cap, self._in_flight, pace.limit, reason)

    def _answered(self, job: _Job, answer: Answer, now: float) -> None:
        self._calm()
        tokens = _completion_tokens(answer)
        response: dict[str, JsonValue] = {
            "status_code": 200,
            "request_id": _text(answer, "id"),
            "body": _whole(answer),
        }
        line = _line(job.index, job.request.custom_id, response, None)
        self._keep(job, Kept(Fate.ANSWERED, line, tokens))
        self.tokens += tokens or 0
        self.pace.finished(now, tokens or 1, self._in_flight + 1)

    def _keep(self, job: _Job, kept: Kept) -> None:
        self.journal.add(job.index, kept)
        self.made += 1
        if self.yielding is not None:
            self.yielding.own_finished += 1

    def _calm(self) -> None:
        self._trouble, self._failures = None, 0

    def _failed(self, job: _Job, error: EngineError, now: float) -> None:
        """Again where it can pass, kept as failed where it cannot."""
        if isinstance(error, EngineRefused):
            if error.status in (401, 403):
                raise _unauthorized(error)
            if error.status in _OVERLOADED:
                self.pace.refused(now, self._in_flight + 1, error.retry_after_seconds)
                self._worry(error, now)
                self._later(job, now)
                return
            if 400 <= error.status < 500 or 300 <= error.status < 400:
                self._calm()
                self._keep_failed(job, error)
                return
        else:
            self.pace.unreachable(now, self._failures)
            self._failures += 1
        self._worry(error, now)
        if isinstance(error, EngineNotListening):  # it was never sent
            self._later(job, now)
            return
        attempts = job.attempts + 1
        if attempts > self.retries:
            self._keep_failed(job, error)
            return
        pause = min(2.0 ** (attempts - 1), _LONGEST_PAUSE_SECONDS)
        self._later(_Job(job.index, job.request, attempts), now + pause)

    def _later(self, job: _Job, at: float) -> None:
        heapq.heappush(self._again, (at, job.index, job))

    def _worry(self, error: EngineError, now: float) -> None:
        if self._trouble is None:
            self._trouble_since = now
        self._trouble = error.problems[0].message

    def _require_server(self, now: float) -> None:
        """Raises EngineLost for a server that is gone, or for too long unable to answer."""
        ended = self.server_ended()
        if ended is not None:
            raise EngineLost(f"the server {ended}", where=self.client.base_url)
        if self._trouble is not None and now - self._trouble_since > self.patience_seconds:
            raise EngineLost(
                f"no answer for {self.patience_seconds:.0f} s, at last: {self._trouble}",
                where=self.client.base_url,
            )

    def _keep_failed(self, job: _Job, error: EngineError) -> None:
        response: dict[str, JsonValue] | None = None
        cause: dict[str, JsonValue] | None = None
        if isinstance(error, EngineRefused) and error.status >= 400:
            response = {
                "status_code": error.status,
                "request_id": None,
                "body": _error_body(error),
            }
        else:
            cause = {"code": "server_error", "message": error.problems[0].message}
        line = _line(job.index, job.request.custom_id, response, cause)
        self._keep(job, Kept(Fate.FAILED, line))

    # --- how far ---

    def _progress(self, now: float, since: tuple[float, int, int]) -> BatchProgress:
        seconds = max(now - since[0], 0.001)
        rate = (self.made - since[1]) / seconds
        totals = self.journal.totals
        # What waits for its turn is done as well.
        done = self._read - self._in_flight - len(self._again)
        ratio = left = None
        if self.source_bytes and self._read:
            whole = max(self._read * self.source_bytes / max(self._read_bytes, 1), self._read)
            ratio = min(done / whole, 1.0)
            if rate > 0:
                left = (whole - done) / rate
        holds = self._trouble
        if holds is None and self.yielding is not None and self.pace.cap is not None:
            holds = self.yielding.reason or "coming back after others waited"
        if holds is None and self._ahead is not None and not self.journal.has_room(self._read):
            holds = f"waits for the answer to request {self.journal.next + 1}"
        return BatchProgress(
            done=done,
            failed=totals.failed + totals.bad_lines,
            in_flight=self._in_flight,
            requests_per_second=rate,
            tokens_per_second=(self.tokens - since[2]) / seconds,
            done_ratio=ratio,
            left_seconds=left,
            holds=holds,
        )


def _unauthorized(error: EngineRefused) -> ConfigError:
    return ConfigError(
        f"the server refuses our key: {error.problems[0].message}",
        where=error.problems[0].where,
        fix="add --api-key-file FILE with its key",
    )


def _line(
    index: int,
    custom_id: str | None,
    response: dict[str, JsonValue] | None,
    error: dict[str, JsonValue] | None,
) -> bytes:
    """A line of OpenAI's batch output."""
    body: dict[str, JsonValue] = {
        "id": f"batch_req_{index}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        return json.dumps(body, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return json.dumps(body).encode() + b"\n"


def _whole(answer: Answer) -> JsonValue:
    """All of an answer, also what `Answer` does not name."""
    found: dict[str, JsonValue] = {}
    found.update(answer.items())  # type: ignore[arg-type]
    return found


def _text(answer: Answer, key: str) -> str | None:
    for name, value in answer.items():
        if name == key and isinstance(value, str):
            return value
    return None


def _completion_tokens(answer: Answer) -> int | None:
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    tokens = usage.get("completion_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0:
        return tokens
    return None


def _error_body(error: EngineRefused) -> JsonValue:
    """OpenAI's form, from what the server said where that has it."""
    try:
        body = json.loads(error.body)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return body
    message = error.body.strip() or "(empty body)"
    return {"error": {"message": message, "type": "api_error", "param": None, "code": error.status}}
