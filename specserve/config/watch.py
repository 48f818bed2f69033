"""``sidecar`` and ``alerts``: what is watched, and who hears of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from specserve.config.base import Port, Positive, Ratio, Seconds, Section


class Sidecar(Section):
    """The watcher beside the engine."""

    enabled: bool = Field(True, description="Run the sidecar with `specserve launch`.")
    host: str = Field("127.0.0.1", description="Address of the sidecar's HTTP server.")
    port: Port = Field(9400, description="Port of /metrics, /status, /livez, /readyz and /startupz.")
    scrape_interval_seconds: Seconds = Field(5.0, description="Time between two reads of the engine's metrics.")


class AcceptanceRate(Section):
    """AcceptanceRateLow."""

    fire_below: Ratio = Field(0.5, description="Fires below this acceptance rate.")
    resolve_above: Ratio = Field(0.55, description="Resolves above this acceptance rate.")
    for_seconds: float = Field(120.0, ge=0, description="Time the rate must stay below before it fires.")
    window_seconds: Seconds = Field(300.0, description="Window of the rate, weighted by tokens.")
    min_draft_tokens: Positive = Field(1000, description="Drafted tokens in the window below which nothing is said.")


class AlertmanagerReceiver(Section):
    """Alertmanager's v2 API."""

    type: Literal["alertmanager"]
    url: str = Field(description="Base URL of Alertmanager.")


class WebhookReceiver(Section):
    """Any HTTP endpoint that takes JSON."""

    type: Literal["webhook"]
    url: str = Field(description="URL that receives a POST with JSON.")
    secret: SecretStr | None = Field(None, description="Key of the HMAC-SHA256 signature; prefer secret_file.")
    secret_file: str | None = Field(None, description="File that holds the signing key.")


class SlackReceiver(Section):
    """A Slack-compatible incoming webhook."""

    type: Literal["slack"]
    url: SecretStr | None = Field(None, description="Incoming webhook URL; prefer url_file.")
    url_file: str | None = Field(None, description="File that holds the webhook URL.")


Receiver = Annotated[AlertmanagerReceiver | WebhookReceiver | SlackReceiver, Field(discriminator="type")]


class Alerts(Section):
    """Built-in alerts and their receivers."""

    acceptance_rate: AcceptanceRate = Field(default_factory=AcceptanceRate, description="AcceptanceRateLow.")
    notify: list[Receiver] = Field(default_factory=list, description="Receivers of firing and resolved alerts.")
