"""The whole config file as one frozen model."""

from __future__ import annotations

from pydantic import Field

from specserve.config.alerting import Alerts
from specserve.config.base import Section
from specserve.config.models import Models
from specserve.config.serving import Engine, Hardware, Server
from specserve.config.sidecar import Sidecar
from specserve.config.speculation import WITHOUT_DRAFT, Method, SpeculativeDecoding


class Settings(Section):
    """specserve's config file."""

    server: Server = Field(default_factory=Server, description="The OpenAI endpoint.")
    models: Models = Field(description="The target, and the draft where the method needs one.")
    speculative_decoding: SpeculativeDecoding = Field(
        default_factory=SpeculativeDecoding, description="Whether, how and how far to speculate."
    )
    engine: Engine = Field(default_factory=Engine, description="How vLLM runs.")
    hardware: Hardware = Field(
        default_factory=Hardware, description="What-if hardware; absent means: detect."
    )
    sidecar: Sidecar = Field(default_factory=Sidecar, description="The watcher beside the engine.")
    alerts: Alerts = Field(default_factory=Alerts, description="Alerts and their receivers.")

    @property
    def method(self) -> Method | None:
        """The method in force; None when the target is served alone."""
        spec = self.speculative_decoding
        if not spec.enabled:
            return None
        return spec.method or ("draft_model" if self.models.draft_model else None)

    @property
    def uses_draft_model(self) -> bool:
        """Whether a second checkpoint is loaded."""
        method = self.method
        return (
            method is not None
            and method not in WITHOUT_DRAFT
            and self.models.draft_model is not None
        )

    @property
    def served_model_name(self) -> str:
        """The model name that clients send."""
        return self.server.served_model_name or self.models.target_model.path

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the OpenAI server, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server.host, self.server.host)
        if ":" in host:
            host = f"[{host}]"
        return f"{'https' if self.server.tls.cert_file else 'http'}://{host}:{self.server.port}"
