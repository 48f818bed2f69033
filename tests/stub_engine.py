"""A real HTTP process that behaves like vLLM's OpenAI server, and misbehaves on demand.

It takes the place of the command that ``engine.args`` builds: vLLM's flags are accepted, those that matter here
are obeyed, the rest are ignored. Its own switches start with ``--stub-``; every switch can also be set while it
runs: ``POST /__control {"freeze": true}``. Further verbs of ``/__control``: ``{"crash": 1}`` (exit status),
``{"drafts": 500}`` (count that many drafts as if traffic had made them), ``{"count": {"num_preemptions": 3}}``,
``{"reset_counters": true}``. It answers with the switches in force, pid and grandchild pid. ``GET /__seen``: the last
completions that were asked for, with the time of each.

Nothing of specserve is imported: a fake that shares code with what it tests would share its mistakes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import queue
import random
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

WORDS = """
the of and to in is was for on that with as it by at from his an were are which this be had also but not or
its one first their has after two who they her she been other when time during there into all may more school
years over only some most later between world state river city house water people under system number made
where both many work used early being known while three through part until name south north line area family
group against second long since university film song team year game season war member high century street
""".split()  # noqa: SIM905
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
STARTED = time.time()
GARBAGE = ("\ufffd", "㋡", "ʭ", "ᚙ", "}};", "\x07", "ற", "0xq", "Ѫ", "▚")


@dataclasses.dataclass
class Switches:
    """What can be programmed. Times are seconds."""

    ready_after: float = 0.0  # time before it listens; inf = hangs while loading
    log_file: str = ""  # its lines are printed first, as an engine's log
    crash_at_start: int = -1  # exit status instead of becoming ready; -1 = do not
    crash_after: float = -1.0  # time after ready; exits with status 1
    hang: bool = False  # accepts, never answers
    freeze: bool = False  # /health and /metrics answer, no engine step happens
    starve: bool = False  # requests wait, none runs
    ignore_term: bool = False
    grandchild: bool = False  # a process in the same group that ignores TERM
    stderr_flood: int = 0  # bytes written to stderr while loading
    long_line: int = 0  # length of one line written while loading
    acceptance: str = "0.9,0.7,0.5,0.3,0.2"  # acceptance rate at each position
    corrupt: str = "off"  # off | sampled | streamed | always | loop
    thoughts: int = 0  # tokens that a reasoning parser sets apart before a chat's answer
    ttft: float = 0.0  # time of a prefill
    step: float = 0.0  # time of one decode step
    per_sequence: float = 0.0  # further time of a step for each running sequence beyond the first
    per_draft_token: float = 0.0  # further time of a step for each drafted token
    tokens_per_chunk: int = 1  # tokens of one streamed chunk without speculation
    metrics_delay: float = 0.0
    metrics_truncate: int = -1  # bytes after which the body of /metrics ends
    metrics_pad: int = 0  # bytes of one more label in the body of /metrics
    metrics_break: str = ""  # close | reset | garbage: what ends a connection to /metrics
    metrics_status: int = 200
    health_status: int = 200
    completion_status: int = 200
    running: int = -1  # overrides the gauge
    waiting: int = -1  # overrides the gauge
    kv_usage: float = 0.0
    seed: int = 0

    def set(self, name: str, value: Any) -> None:
        """Set one switch from text or JSON."""
        kind = type(getattr(self, name))
        if kind is bool and isinstance(value, str):
            value = value.lower() in {"1", "true", "yes", "on"}
        if name == "acceptance" and isinstance(value, list):
            value = ",".join(map(str, value))
        setattr(self, name, kind(value))


class Metrics:
    """vLLM's families, names and labels; read in vLLM 0.32's metrics/loggers.py and spec_decode/metrics.py."""

    COUNTERS = (
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
    )
    SECONDS = (
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        10.0,
        30.0,
        80.0,
    )
    TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 16384)
    HISTOGRAMS: ClassVar = {
        "time_to_first_token_seconds": SECONDS,
        "inter_token_latency_seconds": SECONDS,
        "request_time_per_output_token_seconds": SECONDS,
        "e2e_request_latency_seconds": SECONDS,
        "request_queue_time_seconds": SECONDS,
        "request_prefill_time_seconds": SECONDS,
        "request_decode_time_seconds": SECONDS,
        "request_prompt_tokens": TOKENS,
        "request_generation_tokens": TOKENS,
        "iteration_tokens_total": TOKENS,
    }

    def __init__(self, model: str, positions: int) -> None:
        self.model, self.positions = model, positions
        self.reset()

    def reset(self) -> None:
        """All counters from zero, as after a restart."""
        self.registry = CollectorRegistry()
        names, values = ["model_name", "engine"], (self.model, "0")
        speculative = tuple(
            c for c in self.COUNTERS if self.positions or not c.startswith("spec_decode")
        )
        self.counter = {
            c: Counter(f"vllm:{c}", c, names, registry=self.registry).labels(*values)
            for c in speculative
        }
        if self.positions:
            family = Counter(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted.",
                [*names, "position"],
                registry=self.registry,
            )
            self.per_position = [family.labels(*values, str(i)) for i in range(self.positions)]
        success = Counter(
            "vllm:request_success", "Finished.", [*names, "finished_reason"], registry=self.registry
        )
        self.success = {r: success.labels(*values, r) for r in ("stop", "length", "abort", "error")}
        self.histogram = {
            h: Histogram(f"vllm:{h}", h, names, buckets=b, registry=self.registry).labels(*values)
            for h, b in self.HISTOGRAMS.items()
        }
        self.http = Counter(
            "http_requests", "Answers.", ["handler", "method", "status"], registry=self.registry
        )
        Gauge("process_start_time_seconds", "Start.", registry=self.registry).set(STARTED)
        self.gauge = {
            g: Gauge(f"vllm:{g}", g, names, registry=self.registry).labels(*values)
            for g in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        info = ["model_name", "engine", "block_size", "num_gpu_blocks", "cache_dtype"]
        Gauge("vllm:cache_config_info", "Cache.", info, registry=self.registry).labels(
            *values, "16", "2730", "auto"
        ).set(1)

    def drafts(self, accepted: int, drafted: int) -> None:
        """Count one draft."""
        self.counter["spec_decode_num_drafts"].inc()
        self.counter["spec_decode_num_draft_tokens"].inc(drafted)
        self.counter["spec_decode_num_accepted_tokens"].inc(accepted)
        for position in self.per_position[:accepted]:
            position.inc()


class Refused(Exception):
    """A request is answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Engine:
    """Slots, latencies, drafts. Each request runs its own steps; the batch is whoever runs at that moment."""

    def __init__(self, flags: argparse.Namespace, switches: Switches) -> None:
        self.switches = switches
        self.model = flags.served_model_name or flags.model or "stub"
        spec = json.loads(flags.speculative_config) if flags.speculative_config else {}
        self.num_speculative_tokens = int(spec.get("num_speculative_tokens") or (1 if spec else 0))
        self.schedule = spec.get("num_speculative_tokens_per_batch_size") or []
        self.max_num_seqs, self.max_queued = flags.max_num_seqs, flags.max_num_queued_reqs
        self.shutdown_timeout = flags.shutdown_timeout
        self.max_model_len = flags.max_model_len
        self.metrics = Metrics(self.model, self.num_speculative_tokens)
        self.random = random.Random(switches.seed)
        self.lock = threading.Condition()
        self.running = self.waiting = 0
        self.draining = False
        self.serial = itertools.count()
        self.seen: collections.deque[dict[str, Any]] = collections.deque(maxlen=10_000)

    def speculative_tokens(self) -> int:
        """Draft length at the present batch size."""
        for first, last, tokens in self.schedule:
            if first <= self.running <= last:
                return min(tokens, self.num_speculative_tokens)
        return self.num_speculative_tokens

    def accepted(self, drafted: int) -> int:
        """Tokens of one draft that are accepted: position i with its programmed, unconditional probability."""
        rates = [float(x) for x in self.switches.acceptance.split(",")]
        draw = self.random.random()
        return sum(draw < rate for rate in (rates + [0.0] * drafted)[:drafted])

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """A place in the batch; waits for one, or refuses."""
        with self.lock:
            if self.draining:
                raise Refused(503, "Server is shutting down")
            if self.max_queued is not None and self.running + self.waiting >= self.max_queued:
                raise Refused(503, "The server is overloaded: too many queued requests")
            self.waiting += 1
            self.lock.wait_for(
                lambda: self.running < self.max_num_seqs and not self.switches.starve
            )
            self.waiting -= 1
            self.running += 1
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1
                self.lock.notify_all()

    def pause(self, seconds: float) -> None:
        """One engine step: takes its time, and for ever while frozen."""
        if seconds > 0:
            time.sleep(seconds)
        if self.switches.freeze:
            with self.lock:
                self.lock.wait_for(lambda: not self.switches.freeze)

    def is_corrupt(self, temperature: float, streamed: bool) -> bool:
        """Whether this request is answered with garbage."""
        match self.switches.corrupt:
            case "sampled":
                return temperature > 0
            case "streamed":
                return streamed
            case other:
                return other == "always"

    def words(self, prompt: str, seed: str, temperature: float, bad: bool) -> Iterator[str]:
        """The text, one token at a time; the same prompt, seed and temperature give the same text."""
        if self.switches.corrupt == "loop":
            yield from itertools.repeat(" the")
        source = random.Random(hashlib.sha256(f"{prompt}|{seed}|{temperature}".encode()).digest())
        while True:
            yield source.choice(GARBAGE) if bad else " " + source.choice(WORDS)

    def steps(self, prompt: str, n_prompt: int, body: dict[str, Any]) -> Iterator[list[str]]:
        """Tokens of each engine step of one request."""
        total = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        temperature = body.get("temperature", 1.0)
        temperature = 1.0 if temperature is None else float(temperature)
        unseeded = next(self.serial) if temperature > 0 else 0
        collapsed = self.is_corrupt(temperature, bool(body.get("stream")))
        words = self.words(prompt, str(body.get("seed") or unseeded), temperature, collapsed)
        s, m = self.switches, self.metrics
        start = time.perf_counter()
        m.counter["prompt_tokens"].inc(n_prompt)
        m.counter["prefix_cache_queries"].inc(n_prompt)
        m.histogram["request_prompt_tokens"].observe(n_prompt)
        self.pause(s.ttft)
        first = last = time.perf_counter()
        m.histogram["time_to_first_token_seconds"].observe(first - start)
        m.histogram["request_prefill_time_seconds"].observe(first - start)
        m.histogram["iteration_tokens_total"].observe(n_prompt + 1)
        m.counter["generation_tokens"].inc()
        yield [next(words)]
        done = 1
        while done < total:
            drafted = self.speculative_tokens()
            self.pause(
                s.step + s.per_sequence * max(0, self.running - 1) + s.per_draft_token * drafted
            )
            if drafted:
                accepted = 0 if collapsed else self.accepted(drafted)
                m.drafts(accepted, drafted)
                n = 1 + accepted
            else:
                n = s.tokens_per_chunk
            n = min(n, total - done)
            done += n
            now = time.perf_counter()
            m.histogram["inter_token_latency_seconds"].observe(now - last)
            m.histogram["iteration_tokens_total"].observe(n)
            m.counter["generation_tokens"].inc(n)
            last = now
            yield list(itertools.islice(words, n))
        m.histogram["request_decode_time_seconds"].observe(last - first)
        m.histogram["e2e_request_latency_seconds"].observe(last - start)
        m.histogram["request_generation_tokens"].observe(total)
        if total > 1:
            m.histogram["request_time_per_output_token_seconds"].observe(
                (last - first) / (total - 1)
            )
        m.success["length"].inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The body of /metrics and its content type."""
        s, gauge = self.switches, self.metrics.gauge
        gauge["num_requests_running"].set(self.running if s.running < 0 else s.running)
        gauge["num_requests_waiting"].set(self.waiting if s.waiting < 0 else s.waiting)
        gauge["kv_cache_usage_perc"].set(s.kv_usage)
        encoder, content_type = choose_encoder(accept)
        return encoder(self.metrics.registry), content_type


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Engine
    api_key: str | None
    process: Process

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.guarded(self.get)

    def do_POST(self) -> None:
        self.guarded(self.post)

    def guarded(self, answer: Any) -> None:
        """Answer, unless hung; errors become vLLM's JSON; a client that left is no error."""
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        s = self.engine.switches
        if s.hang and self.path != "/__control":
            with self.engine.lock:
                self.engine.lock.wait_for(lambda: not s.hang)
        if (
            self.api_key
            and self.path.startswith("/v1")
            and self.headers.get("Authorization") != f"Bearer {self.api_key}"
        ):
            return self.send_json({"error": "Unauthorized"}, 401)
        try:
            answer(raw)
        except Refused as e:
            self.send_json(
                {"error": {"message": str(e), "type": "ServiceUnavailableError", "code": e.status}},
                e.status,
            )
        except json.JSONDecodeError as e:
            self.send_json(
                {
                    "error": {
                        "message": f"JSON decode error: {e}",
                        "type": "BadRequestError",
                        "code": 400,
                    }
                },
                400,
            )
        except (BrokenPipeError, ConnectionResetError):
            self.engine.metrics.success["abort"].inc()
            self.close_connection = True
        return None

    def send_body(self, body: bytes, content_type: str, status: int = 200) -> None:
        if self.path.startswith("/v1"):
            handler = self.path.partition("?")[0]
            self.engine.metrics.http.labels(handler, self.command, f"{status // 100}xx").inc()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send_body(json.dumps(value).encode(), "application/json", status)

    def get(self, _: bytes) -> None:
        engine, s = self.engine, self.engine.switches
        match self.path.partition("?")[0]:
            case "/health":
                self.send_body(b"", "text/plain", s.health_status)
            case "/v1/models":
                card = {
                    "id": engine.model,
                    "object": "model",
                    "owned_by": "vllm",
                    "max_model_len": engine.max_model_len,
                }
                self.send_json({"object": "list", "data": [card]})
            case "/metrics":
                time.sleep(s.metrics_delay)
                if s.metrics_break:
                    self.break_off(s.metrics_break)
                    return
                body, content_type = engine.exposition(self.headers.get("Accept") or "")
                if s.metrics_pad:
                    body += b'vllm:pad{label="' + b"x" * s.metrics_pad + b'"} 1\n'
                self.send_body(
                    body[: s.metrics_truncate] if s.metrics_truncate >= 0 else body,
                    content_type,
                    s.metrics_status,
                )
            case "/version":
                self.send_json({"version": "0.32.0"})
            case "/__control":
                self.send_json(self.process.describe())
            case "/__seen":
                self.send_json({"seen": list(self.engine.seen)})
            case _:
                self.send_json({"detail": "Not Found"}, 404)

    def break_off(self, way: str) -> None:
        """End the connection without an answer of HTTP."""
        self.close_connection = True
        match way:
            case "reset":  # closing with no time to linger sends RST
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
            case "garbage":
                self.wfile.write(b"\x00\xffnonsense\r\n\r\n")

    def post(self, raw: bytes) -> None:
        body = json.loads(raw or b"{}")
        match self.path.partition("?")[0]:
            case "/__control":
                self.process.control(body)
                self.send_json(self.process.describe())
            case "/v1/completions":
                prompt = body.get("prompt", "")
                n_prompt = len(prompt) if isinstance(prompt, list) else max(1, len(prompt.split()))
                self.complete(body, str(prompt), n_prompt, chat=False)
            case "/v1/chat/completions":
                prompt = " ".join(str(m.get("content")) for m in body.get("messages", []))
                self.complete(body, prompt, max(1, len(prompt.split())), chat=True)
            case "/tokenize":
                words = str(body.get("prompt", "")).split()
                self.send_json(
                    {
                        "count": len(words),
                        "max_model_len": self.engine.max_model_len,
                        "tokens": [*range(len(words))],
                    }
                )
            case _:
                self.send_json({"detail": "Not Found"}, 404)

    def complete(self, body: dict[str, Any], prompt: str, n_prompt: int, *, chat: bool) -> None:
        """A completion, streamed or whole."""
        if body.get("model", self.engine.model) != self.engine.model:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.engine.seen.append({"at": time.monotonic(), "prompt": prompt, "max_tokens": asked})
        if self.engine.switches.completion_status != 200:
            raise Refused(self.engine.switches.completion_status, "programmed")
        if n_prompt + asked > self.engine.max_model_len:
            raise Refused(
                400, f"This model's maximum context length is {self.engine.max_model_len} tokens."
            )
        with self.engine.slot():
            steps = self.engine.steps(prompt, n_prompt, body)
            if body.get("stream"):
                self.stream(body, steps, n_prompt, chat)
            else:
                tokens = list(itertools.chain.from_iterable(steps))
                text, reason = stopped("".join(tokens), body.get("stop"))
                if "response_format" in body and self.engine.switches.corrupt == "off":
                    text, reason = ' {"answer": "yes"}', "stop"  # what a grammar would have forced
                content: dict[str, Any] = {"text": text}
                if chat:
                    content = {"message": {"role": "assistant", "content": text}}
                    if thoughts := self.engine.switches.thoughts:
                        content["message"]["reasoning"] = "Well, " * min(
                            thoughts, body.get("max_tokens", thoughts)
                        )
                        if thoughts > body.get("max_tokens", thoughts):
                            content["message"]["content"], reason = None, "length"
                choice = {"index": 0, "finish_reason": reason, "logprobs": None, **content}
                self.send_json(
                    self.envelope(
                        chat, choices=[choice], usage=usage(n_prompt, len(tokens)), streamed=False
                    )
                )

    def envelope(self, chat: bool, *, streamed: bool = True, **fields: Any) -> dict[str, Any]:
        kind = (
            ("chat.completion.chunk" if streamed else "chat.completion")
            if chat
            else "text_completion"
        )
        return {
            "id": "cmpl-stub",
            "object": kind,
            "created": int(time.time()),
            "model": self.engine.model,
            **fields,
        }

    def stream(
        self, body: dict[str, Any], steps: Iterator[list[str]], n_prompt: int, chat: bool
    ) -> None:
        """Server-sent events, one for each engine step."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        total = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        options = body.get("stream_options") or {}
        if chat:
            self.event(
                self.envelope(
                    True, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]
                )
            )
        done = 0
        for tokens in steps:
            done += len(tokens)
            text, reason = "".join(tokens), "length" if done >= total else None
            content = {"delta": {"content": text}} if chat else {"text": text}
            more = {"usage": usage(n_prompt, done)} if options.get("continuous_usage_stats") else {}
            self.event(
                self.envelope(
                    chat,
                    choices=[{"index": 0, "finish_reason": reason, "logprobs": None, **content}],
                    **more,
                )
            )
        if options.get("include_usage"):
            self.event(self.envelope(chat, choices=[], usage=usage(n_prompt, done)))
        self.event("[DONE]", last=True)

    def event(self, value: Any, *, last: bool = False) -> None:
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if last else b""))


def stopped(text: str, stop: str | list[str] | None) -> tuple[str, str]:
    """The text up to the first stop string, and the finish reason."""
    ends = [text.find(s) for s in ([stop] if isinstance(stop, str) else stop or []) if s in text]
    return (text[: min(ends)], "stop") if ends else (text, "length")


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class Server(ThreadingHTTPServer):
    """Binds when made, listens when ready: as vLLM does, so a taken port is an error at once."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[Handler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler, bind_and_activate=False)
        self.server_bind()

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class Process:
    """The life of the process: load, serve, drain, or whatever was programmed instead."""

    def __init__(self, flags: argparse.Namespace, switches: Switches) -> None:
        self.flags, self.switches = flags, switches
        self.engine = Engine(flags, switches)
        self.events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.grandchild: subprocess.Popen[bytes] | None = None

    def describe(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.switches),
            "pid": os.getpid(),
            "grandchild_pid": self.grandchild.pid if self.grandchild else None,
            "in_flight": self.engine.running,
        }

    def control(self, body: dict[str, Any]) -> None:
        """Obey ``POST /__control``."""
        for name, value in body.items():
            match name:
                case "crash":
                    self.events.put(("crash", int(value)))
                case "drafts":
                    for _ in range(int(value)):
                        drafted = self.engine.num_speculative_tokens
                        self.engine.metrics.drafts(self.engine.accepted(drafted), drafted)
                case "count":
                    for counter, amount in value.items():
                        self.engine.metrics.counter[counter].inc(amount)
                case "reset_counters":
                    self.engine.metrics.reset()
                case _:
                    self.switches.set(name, value)
        with self.engine.lock:
            self.engine.lock.notify_all()

    def load(self) -> None:
        """Print what vLLM prints while it loads, for as long as it was told to."""
        s = self.switches
        if s.grandchild:
            self.grandchild = subprocess.Popen(
                [sys.executable, "-S", "-c", STUBBORN], stdout=subprocess.PIPE
            )
            assert self.grandchild.stdout
            self.grandchild.stdout.readline()
        if s.log_file:
            sys.stdout.write(Path(s.log_file).read_text(encoding="utf-8", errors="replace"))
        say("APIServer", f"version 0.32.0, model {self.engine.model}", "server_utils.py:217")
        say("EngineCore", "Initializing a V1 LLM engine (v0.32.0) with config: ...", "core.py:134")
        if s.crash_at_start >= 0:
            sys.stdout.flush()
            os._exit(s.crash_at_start)
        if s.long_line:
            print("x" * s.long_line, flush=True)
        block = b"e" * 99 + b"\n"
        for _ in range(s.stderr_flood // len(block)):
            sys.stderr.buffer.write(block)
        say("Worker", f"Starting to load model {self.engine.model}...", "cpu_model_runner.py:68")
        deadline = time.monotonic() + s.ready_after
        while (left := deadline - time.monotonic()) > 0:
            self.handle(min(left, 1.0), loading=True)
        if self.engine.num_speculative_tokens:
            say("Worker", "Loading drafter model...", "cpu_model_runner.py:75")
        say("Worker", "Loading weights took 0.05 seconds", "default_loader.py:502")
        say(
            "Worker",
            "Model loading took 0.26 GiB memory and 0.312345 seconds",
            "gpu_model_runner.py:5150",
        )
        kv = "CPU KV cache size: 43,680 tokens, Maximum concurrency for 2,048 tokens per request: 21.33x"
        say("EngineCore", kv, "kv_cache_utils.py:2327")
        say(
            "EngineCore",
            "init engine (profile, create kv cache, warmup model) took 0.93 s",
            "core.py:403",
        )
        say(
            "APIServer",
            f"Starting vLLM server on http://{self.flags.host}:{self.flags.port}",
            "entry.py:140",
        )

    def handle(self, timeout: float, *, loading: bool = False) -> None:
        """Wait for one event and obey it."""
        try:
            kind, value = self.events.get(timeout=timeout)
        except queue.Empty:
            return
        if kind == "crash":
            os._exit(value)
        if self.switches.ignore_term:
            say("APIServer", f"ignoring signal {value}", "launcher.py:0")
            return
        if loading:
            os._exit(128 + value)
        self.drain()

    def drain(self) -> None:
        """As vLLM: new requests get 503, running ones finish within ``--shutdown-timeout``, then exit 0."""
        say(
            "APIServer",
            f"[shutdown] API server: shutdown triggered, timeout={self.engine.shutdown_timeout}s",
            "launcher.py:254",
        )
        with self.engine.lock:
            self.engine.draining = True
            self.engine.lock.wait_for(
                lambda: self.engine.running + self.engine.waiting == 0,
                timeout=self.engine.shutdown_timeout,
            )
        time.sleep(0.02)  # the last chunk leaves its thread
        os._exit(0)

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: self.events.put(("signal", n)))
        handler = type(
            "BoundHandler",
            (Handler,),
            {"engine": self.engine, "process": self, "api_key": self.flags.api_key},
        )
        try:
            server = Server((self.flags.host, self.flags.port), handler)
        except OSError as e:
            print(f"OSError: [Errno {e.errno}] {os.strerror(e.errno or 0)}", file=sys.stderr)
            raise SystemExit(1) from None
        self.load()
        server.server_activate()
        if self.flags.ssl_certfile:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.flags.ssl_certfile, self.flags.ssl_keyfile)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("INFO:     Application startup complete.", flush=True)
        ready = time.monotonic()
        while True:
            wait = 1.0
            if self.switches.crash_after >= 0:
                wait = ready + self.switches.crash_after - time.monotonic()
                if wait <= 0:
                    say(
                        "EngineCore",
                        "EngineCore encountered a fatal error.",
                        "core.py:1522",
                        "ERROR",
                    )
                    os._exit(1)
            self.handle(min(1.0, wait))


def say(process: str, text: str, place: str, level: str = "INFO") -> None:
    """One line in vLLM's form."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"({process} pid={os.getpid()}) {level} {stamp} [{place}] {text}", flush=True)


def parse(argv: list[str]) -> tuple[argparse.Namespace, Switches]:
    """vLLM's flags that matter here, and our switches; everything else is ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--speculative-config")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"))
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-queued-reqs", type=int)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--shutdown-timeout", type=int, default=0)
    switches = Switches()
    for field in dataclasses.fields(Switches):
        kind = {"nargs": "?", "const": "true"} if field.type == "bool" else {}
        parser.add_argument(
            "--stub-" + field.name.replace("_", "-"), dest=f"stub_{field.name}", **kind
        )
    flags, rest = parser.parse_known_args(argv)
    if flags.model is None:
        flags.model = next((a for a in rest if not a.startswith("-") and a != "serve"), None)
    for name, value in vars(flags).items():
        if name.startswith("stub_") and value is not None:
            switches.set(name.removeprefix("stub_"), value)
    return flags, switches


if __name__ == "__main__":
    Process(*parse(sys.argv[1:])).run()
