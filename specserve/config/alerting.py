"""``alerts``: which alerts fire when, and who hears of them.

Every threshold of a built-in alert is a default here, so ``specserve config show`` prints it and a
misspelt name is a config error. What each alert measures is in ``alert/builtin.py``; docs/alerts.md
is generated.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from specserve import metric_families as families
from specserve.config.base import FilePath, Positive, Ratio, Seconds, Secret, Section
from specserve.config.document import Yaml
from specserve.errors import nearest

Severity = Literal["critical", "warning", "info"]
AlertName = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=60)]
LabelName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")]
Duration = Annotated[float, Field(ge=0.0)]
_UNSET = "null: the firing threshold; unset, it moves along where that passes it"


class Timing(Section):
    """What every rule has."""

    enabled: bool = Field(True, description="false switches the alert off.")
    for_seconds: Duration = Field(
        120.0, description="Time the condition must hold before the alert fires."
    )
    keep_firing_for_seconds: Duration = Field(
        120.0,
        description="Time a firing alert stays after its condition ended or its data went missing.",
    )


def _ordered(rule: BaseModel, lower: str, upper: str) -> None:
    low, high = getattr(rule, lower), getattr(rule, upper)
    if low is not None and high is not None and low > high:
        raise ValueError(f"{lower} is {low:g}; must be at most {upper} ({high:g}), set both")


def _follow(given: dict[str, Yaml], default: BaseModel) -> dict[str, Yaml]:
    """The keys given; where they leave out the threshold for resolving and its default would be on
    the wrong side of the one for firing, then as far from that as by default.

    The distance shrinks with a threshold nearer to zero: 4 in a queue instead of 32 resolves below
    1, not below -20.
    """
    for fire, resolve in (("fire_below", "resolve_above"), ("fire_above", "resolve_below")):
        usual: float | None = getattr(default, fire, None)
        resolved: float | None = getattr(default, resolve, None)
        if resolve in given or usual is None or resolved is None:
            continue
        fires = given.get(fire, usual)
        if not isinstance(fires, int | float | str):
            continue
        try:
            threshold = float(fires)
        except (ValueError, OverflowError):  # the validation that follows says so
            continue
        distance = resolved - usual
        if (threshold - resolved) * distance <= 0:
            continue
        nearer = 1.0
        if usual:
            nearer = min(1.0, abs(threshold / usual))
        moved = round(threshold + distance * nearer, 6)
        if isinstance(default, AcceptanceRate):
            moved = min(1.0, moved)
        return {**given, resolve: moved}
    return given


class Below(Timing):
    """A rule that fires under a number."""

    fire_below: float | None = Field(None, description="Fires below this value; null: never.")
    resolve_above: float | None = Field(None, description=f"Resolves above this value; {_UNSET}.")
    min_samples: Duration = Field(
        0.0, description="Sample size in the window below which nothing is said."
    )

    @model_validator(mode="after")
    def _hysteresis(self) -> Self:
        _ordered(self, "fire_below", "resolve_above")
        return self


class Above(Timing):
    """A rule that fires over a number."""

    fire_above: float | None = Field(None, description="Fires above this value; null: never.")
    resolve_below: float | None = Field(None, description=f"Resolves below this value; {_UNSET}.")
    min_samples: Duration = Field(
        0.0, description="Sample size in the window below which nothing is said."
    )

    @model_validator(mode="after")
    def _hysteresis(self) -> Self:
        _ordered(self, "resolve_below", "fire_above")
        return self


class AcceptanceRate(Timing):
    """AcceptanceRateLow."""

    fire_below: Ratio = Field(0.5, description="Fires below this acceptance rate.")
    resolve_above: Ratio = Field(
        0.55,
        description=(
            "Resolves above this acceptance rate; unset, it moves along with a higher fire_below."
        ),
    )
    window_seconds: Seconds = Field(300.0, description="Window of the rate, weighted by tokens.")
    min_draft_tokens: Positive = Field(
        1000, description="Drafted tokens in the window below which nothing is said."
    )

    @model_validator(mode="after")
    def _hysteresis(self) -> Self:
        _ordered(self, "fire_below", "resolve_above")
        return self


def _below(
    fire: float | None, resolve: float | None, wait: float, what: str, samples: float = 0
) -> Below:
    default = Below(fire_below=fire, resolve_above=resolve, for_seconds=wait, min_samples=samples)
    field: Below = Field(default, description=what)
    return field


def _above(
    fire: float | None, resolve: float | None, wait: float, what: str, samples: float = 0
) -> Above:
    default = Above(fire_above=fire, resolve_below=resolve, for_seconds=wait, min_samples=samples)
    field: Above = Field(default, description=what)
    return field


def _switch(wait: float, what: str, keep: float = 30) -> Timing:
    default = Timing(for_seconds=wait, keep_firing_for_seconds=keep)
    field: Timing = Field(default, description=what)
    return field


class Rules(Section):
    """The other built-in alerts. A key that is not given keeps the default of that alert."""

    AcceptanceDrift: Below = _below(
        -0.1, -0.05, 600, "Acceptance rate minus the server's own baseline.", 5000
    )
    AcceptanceCollapsed: Below = _below(0.08, 0.2, 60, "Acceptance rate at position 0.", 200)
    SpecOutputMismatch: Timing = _switch(0, "Drafted text was proven not to be the target's own.")
    OutputSuspect: Timing = _switch(
        60, "Most of the usual acceptance is lost, and nothing that explains it has changed.", 300
    )
    AcceptanceSpread: Above = _above(
        0.25, 0.15, 600, "Highest minus lowest acceptance rate of the engines.", 5000
    )
    AcceptanceLengthLow: Below = _below(
        1.3, 1.4, 600, "Mean acceptance length in tokens (1 + accepted / drafts).", 200
    )
    DraftHeadIneffective: Below = _below(
        0.2, None, 0, "Acceptance at position 0 on the repetitive start-up canary."
    )
    DraftPositionsWasted: Below = _below(
        0.1, 0.15, 1800, "Acceptance rate at the last drafted position.", 1000
    )
    SpeculationInactive: Below = _below(
        1, None, 300, "Draft tokens in 5 minutes, with speculation configured.", 1000
    )
    BelowBreakEven: Below = _below(
        0, 0.02, 600, "Acceptance rate minus break-even; needs a benchmark profile.", 1000
    )
    EngineDown: Timing = _switch(15, "The engine does not answer.")
    EngineStalled: Timing = _switch(0, "Work is running and nothing progresses.")
    EngineRankStalled: Above = _above(
        120, 30, 0, "Seconds in which one rank of several has requests and stands still."
    )
    EngineStarved: Timing = _switch(60, "Requests wait and none runs.")
    RequestsNeverScheduled: Above = _above(
        120, 1, 0, "Seconds for which requests have waited while none ran and none advanced."
    )
    EngineRestarting: Above = _above(2, 1, 0, "Restarts of the engine in the last hour.")
    HostMemoryGrowing: Above = _above(
        0.1, 0.05, 1800, "Growth of the engine's host memory per hour, as part of it."
    )
    ThreadsGrowing: Above = _above(
        0.1, 0.05, 1800, "Growth of the engine's threads per hour, as part of them."
    )
    MetricsBlind: Timing = _switch(60, "The engine's metrics cannot be read.")
    QueueBacklog: Above = _above(32, 8, 120, "Requests waiting in the engine.")
    KVCachePressure: Above = _above(0.95, 0.85, 300, "Part of the KV cache in use.")
    LatencySLOTTFT: Above = _above(
        None, None, 300, "P90 of the time to first token in seconds; off unless set.", 50
    )
    LatencySLOTPOT: Above = _above(
        None, None, 300, "P90 of the time per output token in seconds; off unless set.", 50
    )
    ErrorShareHigh: Above = _above(0.05, 0.02, 120, "Part of the answers that are 5xx.", 20)
    ClientErrorShareHigh: Above = _above(0.2, 0.1, 300, "Part of the answers that are 4xx.", 20)
    PrefixHitDrop: Below = _below(
        -0.2, -0.1, 600, "Prefix-cache hit ratio minus the server's own baseline.", 50
    )
    LengthFinishJump: Above = _above(
        0.3, 0.15, 600, "Share of answers cut at max_tokens minus own baseline.", 50
    )
    SidecarAbsent: Timing = _switch(300, "No sidecar reports; Prometheus only.")
    GPUTemperatureHigh: Above = _above(88, 83, 120, "GPU temperature in degrees Celsius.")
    GPUMemoryHigh: Above = _above(0.985, 0.97, 300, "Part of the GPU memory in use.")
    GPUPowerHigh: Above = _above(None, None, 300, "GPU power as part of its limit; off unless set.")
    GPUThrottled: Timing = _switch(
        120, "The GPU holds its clocks down because of heat or a hardware fault."
    )
    GPUECCErrors: Timing = _switch(0, "Uncorrected ECC errors since the driver was loaded.")

    @field_validator("*", mode="before")
    @classmethod
    def _over_the_default(cls, value: Yaml, info: ValidationInfo) -> Yaml:
        """`{enabled: false}` changes one key and keeps the alert's other defaults."""
        if not isinstance(value, dict):
            return value
        default = cls.model_fields[info.field_name or ""].default
        return {**default.model_dump(), **_follow(value, default)}


class CustomRule(Timing):
    """A rule of the user's over one exported number."""

    name: AlertName = Field(description="Name of the alert, in CapWords.")
    metric: str = Field(description="A specserve_* family; `specserve alerts metrics` prints them.")
    labels: dict[LabelName, str] = Field(
        default_factory=dict,
        description="Labels to match; one alert for each combination of the others.",
    )
    fire_below: float | None = Field(None, description="Fires below this value.")
    resolve_above: float | None = Field(
        None, description="Resolves above this value; null: fire_below."
    )
    fire_above: float | None = Field(None, description="Fires above this value.")
    resolve_below: float | None = Field(
        None, description="Resolves below this value; null: fire_above."
    )
    severity: Severity = Field("warning", description="critical, warning or info.")
    summary: str = Field("", max_length=300, description="One sentence for the notification.")
    runbook_url: str | None = Field(None, description="Where to read on.")

    @model_validator(mode="after")
    def _known(self) -> Self:
        family = families.FAMILIES.get(self.metric)
        if family is None:
            near = nearest(self.metric, families.FAMILIES)
            if near:
                hint = f"; did you mean '{near}'?"
            else:
                hint = "; `specserve alerts metrics` prints them"
            raise ValueError(f"unknown metric '{self.metric}'{hint}")
        if wrong := sorted(set(self.labels) - set(family.labels)):
            has = ", ".join(family.labels) or "no labels"
            raise ValueError(f"metric '{self.metric}' has no label '{wrong[0]}'; it has {has}")
        return self

    @model_validator(mode="after")
    def _one_direction(self) -> Self:
        if (self.fire_below is None) == (self.fire_above is None):
            raise ValueError("a rule needs exactly one of fire_below and fire_above")
        if (self.fire_below is None and self.resolve_above is not None) or (
            self.fire_above is None and self.resolve_below is not None
        ):
            raise ValueError("resolve_above goes with fire_below, resolve_below with fire_above")
        _ordered(self, "fire_below", "resolve_above")
        _ordered(self, "resolve_below", "fire_above")
        return self


class AlertmanagerReceiver(Section):
    """Alertmanager's v2 API."""

    type: Literal["alertmanager"] = Field(description="Kind of receiver.")
    url: str = Field(pattern=r"^https?://", description="Base URL of Alertmanager.")
    bearer_token: Secret | None = Field(
        None, description="Token for the Authorization header; prefer bearer_token_file."
    )
    bearer_token_file: FilePath | None = Field(None, description="File that holds the token.")


class WebhookReceiver(Section):
    """Any HTTP endpoint that takes JSON."""

    type: Literal["webhook"] = Field(description="Kind of receiver.")
    url: str = Field(pattern=r"^https?://", description="URL that receives a POST with JSON.")
    secret: Secret | None = Field(
        None, description="Key of the HMAC-SHA256 signature; prefer secret_file."
    )
    secret_file: FilePath | None = Field(None, description="File that holds the signing key.")
    bearer_token: Secret | None = Field(
        None, description="Token for the Authorization header; prefer bearer_token_file."
    )
    bearer_token_file: FilePath | None = Field(None, description="File that holds the token.")


class SlackReceiver(Section):
    """A Slack-compatible incoming webhook."""

    type: Literal["slack"] = Field(description="Kind of receiver.")
    url: Secret | None = Field(None, description="Incoming webhook URL; prefer url_file.")
    url_file: FilePath | None = Field(None, description="File that holds the webhook URL.")


Receiver = Annotated[
    AlertmanagerReceiver | WebhookReceiver | SlackReceiver, Field(discriminator="type")
]


class Alerts(Section):
    """Alerts and their receivers."""

    acceptance_rate: AcceptanceRate = Field(
        default_factory=AcceptanceRate, description="AcceptanceRateLow."
    )
    rules: Rules = Field(
        default_factory=Rules, description="Thresholds of the other built-in alerts."
    )
    custom: list[CustomRule] = Field(
        default_factory=list, description="Own rules over any exported number."
    )
    notify: list[Receiver] = Field(
        default_factory=list, description="Receivers of firing and resolved alerts."
    )
    repeat_interval_seconds: Seconds = Field(
        14400.0, description="Webhook and Slack hear of an alert that still fires this often."
    )
    labels: dict[LabelName, str] = Field(
        default_factory=dict, description="Labels on every notification, e.g. {cluster: a}."
    )
    runbook_base_url: str = Field(
        "docs/runbooks", description="Where the runbook pages are; a link in notifications."
    )

    @field_validator("acceptance_rate", mode="before")
    @classmethod
    def _hysteresis(cls, value: Yaml) -> Yaml:
        if isinstance(value, dict):
            return _follow(value, AcceptanceRate())
        return value

    @model_validator(mode="after")
    def _names(self) -> Self:
        seen = {"AcceptanceRateLow", *Rules.model_fields}
        for custom in self.custom:
            if custom.name in seen:
                raise ValueError(
                    f"alert '{custom.name}' exists already; a custom rule needs a name of its own"
                )
            seen.add(custom.name)
            window = custom.labels.get("window")
            known = sorted({*families.WINDOWS, self.acceptance_rate.window_seconds})
            if window is not None and window not in map(families.window_label, known):
                names = ", ".join(map(families.window_label, known))
                raise ValueError(
                    f"custom rule '{custom.name}': there is no window '{window}'; there are {names}"
                )
        return self
