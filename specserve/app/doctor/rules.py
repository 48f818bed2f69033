"""Where an alert belongs in the tree, and the line to type for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specserve.app.doctor.report import Step


@dataclass(frozen=True)
class AlertPlace:
    """What the doctor adds to an alert."""

    step: Step
    fix: str
    stops: bool = False


PLACES: Mapping[str, AlertPlace] = {
    "EngineDown": AlertPlace(
        "load", "specserve doctor --log FILE   # the engine's log", stops=True
    ),
    "EngineStalled": AlertPlace(
        "load", "py-spy dump --pid PID   # of the EngineCore process; then restart it", stops=True
    ),
    "EngineRankStalled": AlertPlace(
        "load", "py-spy dump --pid PID   # of that rank's EngineCore process; then restart it"
    ),
    "EngineStarved": AlertPlace(
        "memory", "lower engine.max_model_len   # so that one request always fits", stops=True
    ),
    "MetricsBlind": AlertPlace(
        "load", "curl -sS -o /dev/null -w '%{http_code} %{size_download}' URL"
    ),
    "SidecarAbsent": AlertPlace("load", "specserve sidecar CONFIG --engine-url URL"),
    "ErrorShareHigh": AlertPlace("load", "specserve doctor --log FILE   # the engine's log"),
    "ClientErrorShareHigh": AlertPlace(
        "load", "specserve doctor --log FILE   # the access log names the requests with 4xx"
    ),
    "RequestsNeverScheduled": AlertPlace(
        "memory", "lower engine.max_model_len   # so that one request always fits", stops=True
    ),
    "EngineRestarting": AlertPlace("load", "specserve doctor --log FILE   # the engine's log"),
    "HostMemoryGrowing": AlertPlace("memory", "ps -o pid,rss,nlwp,etime,args -C python3"),
    "ThreadsGrowing": AlertPlace("memory", "ps -o pid,rss,nlwp,etime,args -C python3"),
    "QueueBacklog": AlertPlace(
        "memory", "lower server.max_concurrent_requests, or add a replica   # more load than it has"
    ),
    "KVCachePressure": AlertPlace(
        "memory", "specserve plan CONFIG --grid   # context and requests that fit"
    ),
    "GPUMemoryHigh": AlertPlace("memory", "lower engine.gpu_memory_utilization by 0.03"),
    "PrefixHitDrop": AlertPlace("traffic", "specserve status   # and what changed in the prompts"),
    "AcceptanceCollapsed": AlertPlace(
        "vocabulary", "specserve check CONFIG; specserve doctor CONFIG --url URL --canary"
    ),
    "DraftHeadIneffective": AlertPlace(
        "vocabulary", "specserve check CONFIG   # kind of head, its target, its tensors"
    ),
    "AcceptanceRateLow": AlertPlace(
        "traffic", "specserve bench CONFIG   # with prompts of this traffic"
    ),
    "AcceptanceDrift": AlertPlace(
        "traffic", "specserve bench CONFIG   # with prompts of this traffic"
    ),
    "AcceptanceLengthLow": AlertPlace(
        "traffic", "specserve bench CONFIG   # with prompts of this traffic"
    ),
    "AcceptanceSpread": AlertPlace(
        "vocabulary", "specserve models verify CONFIG   # on every node"
    ),
    "DraftPositionsWasted": AlertPlace(
        "parameters", "lower speculative_decoding.num_speculative_tokens"
    ),
    "SpeculationInactive": AlertPlace(
        "parameters", "specserve doctor CONFIG --log FILE   # what the engine says it runs"
    ),
    "BelowBreakEven": AlertPlace(
        "speed", "set speculative_decoding.max_batch_size below the requests that run at once"
    ),
    "LatencySLOTTFT": AlertPlace(
        "speed", "specserve bench CONFIG --slo ttft_p90=500ms   # the load that keeps it"
    ),
    "LatencySLOTPOT": AlertPlace(
        "speed", "specserve bench CONFIG --slo tpot_p90=30ms   # the load that keeps it"
    ),
    "GPUTemperatureHigh": AlertPlace("speed", "nvidia-smi -q -d TEMPERATURE,PERFORMANCE"),
    "GPUPowerHigh": AlertPlace("speed", "nvidia-smi -q -d POWER"),
    "GPUThrottled": AlertPlace("speed", "nvidia-smi -q -d PERFORMANCE"),
    "GPUECCErrors": AlertPlace("output", "nvidia-smi -q -d ECC   # then replace or reset the GPU"),
    "SpecOutputMismatch": AlertPlace(
        "output", "--set speculative_decoding.enabled=false", stops=True
    ),
    "OutputSuspect": AlertPlace(
        "output",
        "specserve doctor CONFIG --url URL --canary   # compares answers with the target's",
    ),
    "LengthFinishJump": AlertPlace(
        "output", "specserve doctor CONFIG --url URL --canary   # loops, or a lost stop token"
    ),
}
"""Every built-in alert; a test keeps the two in step. The user's own alerts go to ``OWN``."""
OWN = AlertPlace("load", "specserve status")
