"""``sidecar``: what is watched beside the engine."""

from __future__ import annotations

from pydantic import Field

from specserve.config.base import FilePath, Host, Port, Seconds, Secret, Section


class Sidecar(Section):
    """The watcher beside the engine."""

    enabled: bool = Field(True, description="Run the sidecar with `specserve launch`.")
    host: Host = Field("127.0.0.1", description="Address of the sidecar's HTTP server.")
    port: Port = Field(
        9400, description="Port of /metrics, /status, /livez, /readyz and /startupz."
    )
    token: Secret | None = Field(
        None,
        description="What readers of /metrics, /status and / must send; prefer token_file.",
    )
    token_file: FilePath | None = Field(
        None,
        description=(
            "File that holds the token of /metrics, /status and the page; the probes stay open."
        ),
    )
    scrape_interval_seconds: Seconds = Field(
        5.0, description="Time between two reads of the engine's metrics."
    )
    canary_timeout_seconds: Seconds = Field(
        120.0,
        description=(
            "Longest time for a canary completion of one token; longer than the longest step."
        ),
    )
    canary_interval_seconds: Seconds = Field(
        60.0, description="Time between two canaries while the engine is idle, blind or stalled."
    )
    comparison_interval_seconds: Seconds | None = Field(
        None,
        description="Time between two comparisons of drafted text with the target's own while "
        "serving, as after the "
        "start (some hundred short requests); null: after the start only.",
    )
    benchmark_profile: FilePath | None = Field(
        None,
        description=(
            "Profile that `specserve bench` writes; gives estimated speedup and break-even."
        ),
    )
    state_dir: FilePath | None = Field(
        None,
        description=(
            "Folder where the acceptance baseline survives restarts; null is the user's "
            "state folder."
        ),
    )
