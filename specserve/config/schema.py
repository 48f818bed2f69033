"""The whole config file as one frozen model."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from specserve.config.alerting import Alerts
from specserve.config.base import Section
from specserve.config.conditions import conditions
from specserve.config.models import Models
from specserve.config.serving import Engine, Hardware, Server
from specserve.config.sidecar import Sidecar
from specserve.config.speculation import (
    DEFAULT_TOKENS,
    SUFFIX_DEPTH,
    WIDEST_STEP,
    WITHOUT_DRAFT,
    Method,
    ScheduleRow,
    SpeculativeDecoding,
)


class Settings(Section):
    """specserve's config file."""

    model_config = ConfigDict(json_schema_extra={"allOf": conditions()})

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
    def copy_gpus(self) -> int:
        """GPUs of one copy of the model, as vLLM counts them."""
        target = self.models.target_model
        prefill = self.engine.flags.number("prefill-context-parallel-size") or 1
        return target.tensor_parallel_size * target.pipeline_parallel_size * prefill

    @property
    def all_gpus(self) -> int:
        """GPUs of this engine over all of its nodes: those of a copy for each data parallel rank.

        Over several nodes vLLM runs every rank itself (its world is DP x TP x PP); on one node
        ``data-parallel-size-local`` and ``data-parallel-rank`` leave ranks to other engines.

        >>> base = {"models": {"target_model": {"path": "m", "tensor_parallel_size": 2}}}
        >>> flags = {"dp": 8, "data-parallel-size-local": 2}
        >>> Settings(**base, engine={"extra_args": flags}).all_gpus
        4
        >>> Settings(**base, engine={"extra_args": flags, "node_count": 4}).gpus_per_node
        4
        """
        flags = self.engine.flags
        ranks = flags.number("data-parallel-size") or 1
        if self.engine.node_count == 1:
            if flags.number("data-parallel-rank") is not None:
                ranks = 1
            ranks = flags.number("data-parallel-size-local") or ranks
        return self.copy_gpus * ranks

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node's workers."""
        return max(1, self.all_gpus // self.engine.node_count)

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
    def num_speculative_tokens(self) -> int:
        """Tokens per draft; where nobody set them and no checkpoint was asked
        (:mod:`specserve.app.derive`), vLLM's default for suffix, the most that the schedule asks
        for, or ours.
        """
        spec = self.speculative_decoding
        if spec.num_speculative_tokens is not None:
            return spec.num_speculative_tokens
        if spec.schedule:
            return max(1, *(tokens for _, _, tokens in spec.schedule))
        if self.method == "suffix":
            return spec.suffix_decoding_max_tree_depth or SUFFIX_DEPTH
        return DEFAULT_TOKENS

    def draft_tensor_parallel_size(self, *, on_first_engine: bool = False) -> int:
        """GPUs that share the draft.

        vLLM runs a draft model at the target's TP alone (``v1/spec_decode/draft_model.py``),
        whatever is asked for; heads, and drafts on the first engine (before 0.11), may lie whole on
        each GPU.
        """
        target = self.models.target_model.tensor_parallel_size
        draft = self.models.draft_model
        if draft is None or (self.method == "draft_model" and not on_first_engine):
            return target
        if self.method == "mlp_speculator":  # vLLM's default, which it warns of
            target = 1
        return draft.tensor_parallel_size or target

    @property
    def control(self) -> Literal["fixed", "schedule", "live"] | None:
        """What sets the tokens per draft while serving; None when the target is served alone."""
        if self.method is None:
            return None
        given = self.speculative_decoding.control
        if given is not None:
            return given
        if self.schedule is not None:
            return "schedule"
        return "fixed"

    @property
    def schedule(self) -> tuple[ScheduleRow, ...] | None:
        """Rows of first batch size, last batch size and tokens per draft; None drafts at every
        size.

        >>> base = {"models": {"target_model": {"path": "m"}}, "engine": {"max_num_seqs": 64}}
        >>> Settings(**base, speculative_decoding={"method": "ngram", "max_batch_size": 8}).schedule
        ((1, 8, 5), (9, 64, 0))
        """
        spec = self.speculative_decoding
        if spec.schedule is not None:
            return tuple(spec.schedule)
        last = self.engine.max_num_seqs or WIDEST_STEP
        if spec.max_batch_size is None or spec.max_batch_size >= last:
            return None
        return (
            (1, spec.max_batch_size, self.num_speculative_tokens),
            (spec.max_batch_size + 1, last, 0),
        )

    def drafts_at(self, batch_size: int) -> int:
        """Tokens per draft in a step of so many sequences; 0 where nothing is drafted.

        Beyond the last row vLLM carries that row on.
        """
        rows = self.schedule
        if rows is None:
            return self.num_speculative_tokens
        tokens = 0
        for first, _, row_tokens in sorted(rows):
            if first <= batch_size:
                tokens = row_tokens
        return tokens

    @property
    def largest_drafting_batch(self) -> int | None:
        """The largest step batch that is drafted for; None where there is no largest.

        A row reaches to the next one, and the last row to every size above it: a schedule that ends
        in a row that drafts has no largest.
        """
        rows = self.schedule
        if rows is None:
            return None
        above: int | None = None
        for first, _, tokens in sorted(rows, reverse=True):
            if tokens == 0:
                above = first
            elif above is None:
                return None
            else:
                return above - 1
        return 0

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """Every model name that requests may use; the first is the metrics' ``model_name``."""
        names = self.server.served_model_name
        if names is None:
            return (self.models.target_model.path,)
        if isinstance(names, str):
            return (names,)
        return tuple(names)

    @property
    def served_model_name(self) -> str:
        """The model name that our own requests use, and that the metrics carry."""
        return self.served_model_names[0]

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the OpenAI server, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server.host, self.server.host)
        if ":" in host:
            host = f"[{host}]"
        return f"{'https' if self.server.tls.cert_file else 'http'}://{host}:{self.server.port}"
