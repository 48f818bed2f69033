"""Load on a server: requests of a workload through vLLM's own benchmark client, samples back."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pydantic import BaseModel, JsonValue

from specserve.bench.result import Sample
from specserve.bench.workload import Request, Workload
from specserve.errors import Unsound

LOOK_SECONDS = 1.0
"""Longest wait at a time: an interrupt given to another thread does not wake the one that waits."""
IMPORT_SECONDS = 180.0
"""Longest time for the client to import vLLM: 12 s on a quiet machine, far more on a busy one."""


class ClientAnswer(BaseModel):
    """A line of the client; one column for each figure, one row for each request."""

    failed: str | None = None
    """Why the load could not be sent; no column is there then."""
    duration: float = 0.0
    ttfts: tuple[float, ...] = ()
    latencies: tuple[float, ...] = ()
    itls: tuple[tuple[float, ...], ...] = ()
    output_lens: tuple[int, ...] = ()
    generated_texts: tuple[str, ...] = ()
    errors: tuple[str | None, ...] = ()
    start_times: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measured:
    """What one run of the load gave."""

    samples: tuple[Sample, ...]
    duration_seconds: float


class LoadClient:
    """vLLM's benchmark client in its own process; one import, many runs.

    Use as a context manager.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._log: IO[bytes] | int = subprocess.DEVNULL
        if log is not None:
            self._log = log.open("ab")
        # A worker that answers over pipes and dies with its stdin: nothing needs to supervise it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specserve.engine.inside.client_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environ),
            start_new_session=True,
        )
        self._buffer = b""
        self._is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # an interruption has no time for an import to end
            self._process.kill()
        self.close()

    def wait_ready(self) -> None:
        """Wait for the import. Raises Unsound when the client cannot start."""
        self._answer(IMPORT_SECONDS)
        self._is_ready = True

    def run(
        self,
        base_url: str,
        model: str,
        workload: Workload,
        *,
        concurrency: int,
        api_key: str | None = None,
        verify: bool = True,
        timeout_seconds: float = 3600,
    ) -> Measured:
        """Send the workload and return a sample for every request, in its order.

        Raises Unsound when the client died, hung or could not send; a request that failed is a
        sample that is not ok.
        """
        if not self._is_ready:
            self.wait_ready()
        headers: dict[str, JsonValue] | None = None
        if api_key:
            headers = {"Authorization": f"Bearer {api_key}"}
        self._send(
            {
                "base_url": base_url,
                "model": model,
                "concurrency": concurrency,
                "timed": workload.is_timed,
                "headers": headers,
                "verify": verify,
                "sampling": {"temperature": workload.temperature, "top_p": workload.top_p},
                "requests": [r.model_dump(exclude_none=True) for r in workload.requests],
            }
        )
        answer = self._answer(timeout_seconds)
        if answer.failed is not None:
            raise Unsound(f"the load could not be sent: {answer.failed}", where=base_url)
        samples = [
            _sample(i, request, workload, answer) for i, request in enumerate(workload.requests)
        ]
        return Measured(tuple(samples), answer.duration)

    def close(self) -> None:
        """End the client; it stops by itself when its input ends."""
        if self._process.stdin:
            with contextlib.suppress(OSError):  # it has gone, and something was still to be sent
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        if not isinstance(self._log, int):
            self._log.close()

    def _send(self, job: Mapping[str, JsonValue]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None

    def _answer(self, timeout_seconds: float) -> ClientAnswer:
        assert self._process.stdout is not None
        deadline = self._clock() + timeout_seconds
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - self._clock()
            if left <= 0:
                self._process.kill()
                raise Unsound(f"the benchmark client gave no answer in {timeout_seconds:.0f} s")
            if not select.select([descriptor], [], [], min(left, LOOK_SECONDS))[0]:
                continue
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise self._gone()
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return ClientAnswer.model_validate_json(line)

    def _gone(self) -> Unsound:
        code = self._process.wait()
        return Unsound(
            f"vLLM's benchmark client ended with code {code}; it must stay for the whole benchmark",
            fix="pip install 'vllm>=0.28'; without a GPU: scripts/setup engine, in a clone",
        )


def _sample(i: int, request: Request, workload: Workload, answer: ClientAnswer) -> Sample:
    """The sample of one request, the ``i``-th of the workload."""
    late = kept = None
    if workload.is_timed:
        began = answer.start_times[0]
        late = answer.start_times[i] - began - (request.at_seconds or 0.0)
    if workload.is_greedy:
        kept = answer.generated_texts[i]
    error, tokens = answer.errors[i], answer.output_lens[i]
    if error or not tokens:
        reason = (error or "no tokens").strip().splitlines()[-1][:300]
        return Sample(prompt_id=request.id, ok=False, error=reason, late_seconds=late)
    return Sample(
        prompt_id=request.id,
        ok=True,
        ttft_seconds=answer.ttfts[i],
        e2e_seconds=answer.latencies[i],
        output_tokens=tokens,
        itl_seconds=list(answer.itls[i]),
        text=kept,
        late_seconds=late,
    )
