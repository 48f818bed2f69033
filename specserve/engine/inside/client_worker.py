"""The load generator: vLLM's own benchmark client, kept in one process because its import takes
12 s.

Runs as ``python -m specserve.engine.inside.client_worker`` under the interpreter that has vLLM.
Protocol: one JSON job a line on stdin, one JSON answer a line on the original stdout; everything
that vLLM prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from typing import Any

from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest

JsonObject = dict[str, Any]


def _sample(request: JsonObject) -> SampleRequest:
    """A request as vLLM's client wants it.

    Lengths come from the server's own count, so no tokenizer is loaded.
    """
    chat = {}
    if request.get("messages"):
        chat["chat_messages"] = request["messages"]
    return SampleRequest(
        prompt=request.get("prompt") or "",
        prompt_len=1,
        expected_output_len=request["max_tokens"],
        request_id=request["id"],
        timestamp=request.get("at_seconds"),
        **chat,
    )


async def _run(job: JsonObject) -> JsonObject:
    endpoint, path = "openai", "/v1/completions"
    if job["requests"][0].get("messages") is not None:
        endpoint, path = "openai-chat", "/v1/chat/completions"
    ssl_context = None
    if not job["verify"]:
        ssl_context = False
    result: JsonObject = await serve.benchmark(
        task_type=serve.TaskType.GENERATION,
        endpoint_type=endpoint,
        api_url=job["base_url"] + path,
        base_url=job["base_url"],
        model_id=job["model"],
        model_name=job["model"],
        tokenizer=None,
        input_requests=[_sample(r) for r in job["requests"]],
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
        selected_percentiles=[50.0, 90.0, 99.0],
        ignore_eos=False,
        goodput_config_dict={},
        max_concurrency=job["concurrency"],
        lora_modules=None,
        extra_headers=job.get("headers"),
        extra_body=job["sampling"],
        ready_check_timeout_sec=0,
        self_timed=job["timed"],
        ssl_context=ssl_context,
    )
    return {
        key: result[key]
        for key in (
            "duration",
            "ttfts",
            "latencies",
            "itls",
            "output_lens",
            "generated_texts",
            "errors",
            "start_times",
        )
    }


BROKEN = (ValueError, TypeError, KeyError, AttributeError, OSError, RuntimeError)
"""What a job can raise, also in a version of vLLM whose client takes other arguments."""


def _end_with_parent() -> None:
    """SIGKILL when whoever started us ends: a benchmark that is killed must not leave its load on a
    server for the rest of the hour."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def main() -> None:
    """Answer jobs until stdin ends."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()  # as `vllm bench serve` does: else collections walk all that the import made
    with contextlib.redirect_stdout(sys.stderr), answers:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                answer = asyncio.run(_run(json.loads(line)))
            except BROKEN as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
