"""``server``, ``engine`` and ``hardware``: where it listens, how vLLM runs, on what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from specserve.config import legacy
from specserve.config.base import (
    FITTING,
    FilePath,
    Host,
    Length,
    Port,
    Positive,
    Ratio,
    Seconds,
    Secret,
    Section,
    Tokens,
    lines_of,
)
from specserve.config.extra_args import ExtraArgs

Repair = Literal["cpu-speculative-sampling", "cpu-yielding"]
Policy = Literal["warn", "block"]
EngineVersion = Annotated[str, Field(pattern=r"^v?[0-9]+\.[0-9]+[0-9A-Za-z.+_-]*$")]
ServedName = Annotated[str, Field(min_length=1)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Tls(Section):
    """TLS of the OpenAI endpoint."""

    cert_file: FilePath | None = Field(None, description="PEM certificate chain.")
    key_file: FilePath | None = Field(None, description="PEM private key.")


class Server(Section):
    """The OpenAI endpoint."""

    host: Host = Field(
        "127.0.0.1", description="Address to listen on. Other than loopback needs an API key."
    )
    port: Port = Field(8000, description="Port of the OpenAI API.")
    served_model_name: ServedName | Annotated[list[ServedName], Field(min_length=1)] | None = Field(
        None,
        description=(
            "Model name that clients use, or a list of names: the first is the metrics' "
            "model_name, all work in requests; null is the target's path."
        ),
    )
    max_concurrent_requests: Positive | None = Field(
        None, description="Requests in flight, running and waiting; beyond it 503."
    )
    api_key: Secret | None = Field(
        None,
        description=(
            "Key that clients must send, or several, one a line; prefer api_key_file. The first is "
            "the one of our own requests."
        ),
    )
    api_key_file: FilePath | None = Field(
        None, description="File that holds the API key, or several, one a line."
    )
    allow_unauthenticated: bool = Field(
        False, description="Listen beyond loopback without a key (something else authenticates)."
    )
    tls: Tls = Field(default_factory=Tls, description="TLS certificate and key.")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that clients may send, in clear; empty where none is asked for."""
        if self.api_key is None:
            return ()
        return lines_of(self.api_key)

    @property
    def own_key(self) -> str | None:
        """The key of our own requests."""
        return next(iter(self.api_keys), None)


class Canary(Section):
    """The short check between 'answers' and 'ready'."""

    policy: Policy = Field("block", description="Proven corruption: block readiness, or warn.")
    acceptance_policy: Policy = Field(
        "warn", description="Position-0 acceptance under the floor: block readiness, or warn."
    )
    min_position0_acceptance: Ratio = Field(
        0.2, description="Floor of position-0 acceptance on repetitive text."
    )
    timeout_seconds: Seconds = Field(120.0, description="Longest time for the whole canary.")


class Engine(Section):
    """How vLLM runs. Flags that have no key here go into extra_args."""

    version: EngineVersion | None = Field(
        None,
        description=(
            'vLLM version that will run, e.g. "0.30" (quoted: a bare 0.30 is the number 0.3 to '
            "many programs); null is the installed one, or the newest known."
        ),
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Part of each GPU's memory that vLLM may use."
    )
    max_model_len: Length | None = Field(
        None,
        description=(
            "Longest sequence, also as 32k (32000) or 32K (32768); null is the model's own limit, "
            "auto or -1 as much of it as fits into memory."
        ),
    )
    max_num_seqs: Positive | None = Field(
        None, description="Sequences in one step; null is vLLM's default."
    )
    max_num_batched_tokens: Tokens | None = Field(
        None, description="Tokens in one step, also as 8k or 8K; null is vLLM's default."
    )
    enforce_eager: bool = Field(
        False, description="Skip compilation and CUDA graphs: starts faster, runs slower."
    )
    kv_cache_dtype: str = Field("auto", description="Data type of the KV cache.")
    startup_timeout_seconds: Seconds = Field(
        1800.0, description="Longest time from start to ready."
    )
    drain_timeout_seconds: Seconds = Field(
        60.0, description="Time that running requests get when stopping."
    )
    node_count: Positive = Field(
        1, description="Machines that share one model; TP x PP is spread over them."
    )
    node_rank: int = Field(
        0, ge=0, description="Which of them this is. 0 leads: it alone has the API."
    )
    leader_address: Host | None = Field(
        None, description="Name or address of node 0, as the other nodes reach it."
    )
    max_restarts: int = Field(
        0, ge=0, description="Restarts after the engine was lost; 0 exits with code 5."
    )
    restart_backoff_seconds: Seconds = Field(
        2.0, description="First pause before a restart; doubles each time."
    )
    restart_when_stalled: bool = Field(
        False,
        description=(
            "Restart an engine that the sidecar has proven to hang; counts into max_restarts."
        ),
    )
    canary: Canary = Field(
        default_factory=Canary, description="The check before the server counts as ready."
    )
    repairs: tuple[Repair, ...] = Field(
        ("cpu-speculative-sampling", "cpu-yielding"),
        description=(
            "Repairs of known engine defects, applied only where the engine has the "
            "defect; [] turns them off."
        ),
    )
    extra_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further vLLM flags without dashes, e.g. {max-logprobs: 5}.",
        json_schema_extra={"patternProperties": {legacy.NOT_EXTRA: False}},
    )
    env: dict[VariableName, str] = Field(
        default_factory=dict,
        description="Environment of the engine, e.g. {VLLM_LOGGING_LEVEL: DEBUG}.",
    )

    @property
    def flags(self) -> ExtraArgs:
        """``extra_args`` by vLLM's long names, however they are written."""
        return ExtraArgs(self.extra_args)

    @property
    def asked_length(self) -> int | None:
        """``max_model_len`` where it is a number; None where the model or the memory decides."""
        if self.max_model_len == FITTING:
            return None
        return self.max_model_len


class Hardware(Section):
    """What-if hardware for plan and check; absent means: detect."""

    gpu_name: str | None = Field(
        None, description="GPU name as NVML prints it, e.g. NVIDIA H100 80GB HBM3."
    )
    gpu_memory_gib: float | None = Field(
        None, gt=0, le=65536, description="Memory of one GPU in GiB, as NVML's total."
    )
    gpu_count: Positive | None = Field(None, description="Number of GPUs.")
