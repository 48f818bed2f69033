"""What speculation costs and what it brings: every formula of it, once.

Standard library only: the control loads it inside vLLM's interpreter.

Units are seconds, bytes, operations and tokens. ``k`` is the number of tokens drafted per sequence
and step; a step that drafted k verifies k + 1 positions of each sequence. Two yardsticks are never
mixed: *off* is an engine started without speculation; *k = 0* is the engine with its draft loaded
that drafts nothing, which for a draft with weights still costs one forward of the draft a step
(vLLM 0.32, v1/spec_decode/llm_base_proposer.py:propose, read 2026-11-30).

Sources: Leviathan et al., arXiv 2211.17192 (tokens of a step, 2023); Liu et al., arXiv 2406.14066
(goodput, 2024); Chen et al., arXiv 2408.11049 (KV reads at long contexts, 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LARGEST_K = 8
"""The largest k that is weighed where the best one is sought."""


def expected_tokens(by_position: Sequence[float], k: int) -> float:
    """Tokens that one step gives a sequence: 1 + the sum of the acceptance of the first k
    positions.

    ``by_position`` is unconditional, as vLLM's counter per position / drafts; positions beyond it
    are accepted as the last two say, each as likely after the one before it.

    >>> expected_tokens([0.8, 0.6], 2)
    2.4
    >>> round(expected_tokens([0.8, 0.6], 3), 4)
    2.85
    """
    known = list(by_position[:k])
    while len(known) < k and known:
        before = 1.0
        if len(known) > 1:
            before = known[-2]
        chance = 0.0
        if before > 0:
            chance = min(1.0, known[-1] / before)
        known.append(known[-1] * chance)
    return 1 + sum(known)


def positions(chance: float, k: int) -> tuple[float, ...]:
    """Acceptance by position where each token is accepted with the same chance after those before
    it: chance, chance^2, ... (arXiv 2211.17192, formula 1).

    >>> positions(0.5, 3)
    (0.5, 0.25, 0.125)
    """
    return tuple(chance**i for i in range(1, k + 1))


def acceptance_rate(tokens_per_step: float, k: float) -> float:
    """Accepted / drafted tokens: (tokens per step - 1) / k.

    >>> acceptance_rate(2.5, 3)
    0.5
    """
    return (tokens_per_step - 1) / k


def chance_of(rate: float, k: int) -> float:
    """The chance per token behind an acceptance rate of k drafted tokens, so that other k can be
    reckoned: the root of (chance + chance^2 + ... + chance^k) / k = rate.

    >>> round(chance_of(0.5, 2), 3), chance_of(1.0, 4), chance_of(0.0, 4)
    (0.618, 1.0, 0.0)
    """
    return _root(lambda chance: sum(positions(chance, k)) / k - rate)


def gain(tokens_per_step: float, cost: float) -> float:
    """The speedup: tokens of a step / how many times as long it takes as a step without.

    >>> gain(2.4, 1.2)
    2.0
    """
    return tokens_per_step / cost


def break_even_rate(cost: float, drafted: float) -> float | None:
    """The acceptance rate at which a token costs the same with and without speculation; None where
    no acceptance pays.

    A step gives 1 + rate x drafted tokens and takes ``cost`` times as long, so they meet where
    1 + rate x drafted = cost.

    >>> round(break_even_rate(1.6, 3.0), 6), break_even_rate(5.0, 3.0), break_even_rate(0.9, 3.0)
    (0.2, None, 0.0)
    """
    rate = (cost - 1) / drafted
    if rate > 1:
        return None
    return max(0.0, rate)


def margin(rate: float, cost: float, drafted: float) -> float:
    """How far an acceptance rate lies above what pays; negative is slower, also where no acceptance
    pays.

    >>> round(margin(0.5, 1.6, 3.0), 6), round(margin(0.5, 7.0, 3.0), 6)
    (0.3, -1.5)
    """
    return rate - (cost - 1) / drafted


def break_even_chance(part: float, k: int) -> float | None:
    """The chance per token at which k drafts pay that each cost ``part`` of the target's step, by
    bytes alone: the root of chance + ... + chance^k = k x part. None where none does.

    >>> round(break_even_chance(0.3, 3), 3), break_even_chance(1.0, 3)
    (0.509, None)
    """
    if part >= 1:
        return None
    return _root(lambda chance: sum(positions(chance, k)) - k * part)


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function of 0 to 1 crosses 0; the end of the range that is nearer if it does
    not."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    if low == 0.0:
        return low
    return high


def tokens_per_step(output_tokens: float, accepted_tokens: float) -> float:
    """Tokens of a sequence per step it took part in: every token that no draft gave cost a step.

    >>> tokens_per_step(100, 50)
    2.0
    """
    return output_tokens / max(output_tokens - accepted_tokens, 1.0)


@dataclass(frozen=True)
class Curve:
    """Something over a rising axis, as it was measured: linear between two points; below the first
    its value holds, and beyond the last nothing is known.

    >>> curve = Curve(((4.0, 1.0), (16.0, 2.0)))
    >>> curve.at(10), curve.at(1), curve.at(17)
    (1.5, 1.0, None)
    """

    points: tuple[tuple[float, float], ...]

    def at(self, place: float) -> float | None:
        """The value at a place of the axis."""
        if not self.points or place > self.points[-1][0]:
            return None
        left, value = self.points[0]
        if place <= left:
            return value
        for right, there in self.points[1:]:
            if place <= right:
                return value + (place - left) / (right - left) * (there - value)
            left, value = right, there
        return value


@dataclass(frozen=True)
class Chip:
    """One GPU, as its vendor states it."""

    bytes_per_second: float
    """Memory bandwidth."""
    flops: float
    """Dense operations a second in the type that the weights are multiplied in."""
    link_bytes_per_second: float = math.inf
    """Between the GPUs that share layers, one way."""


@dataclass(frozen=True)
class ForwardWork:
    """What one forward pass of a model does on one GPU."""

    shared_bytes: float
    """Weights that every pass reads: all but the routed experts and the embedding's table."""
    flops_per_token: float
    """2 x the weights that a token meets (arXiv 2001.08361, 2020)."""
    layers: float
    expert_bytes: float = 0.0
    """Weights of all routed experts."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    kv_bytes_per_token: float = 0.0
    """Keys and values of one token of context; read once a sequence and pass."""
    state_bytes: float = 0.0
    """Recurrent states of one sequence (Mamba, gated delta net): a pass reads them once and writes
    them after every token, so that rejected tokens can be taken back (vLLM 0.32,
    model_executor/layers/mamba, read 2026-12-01)."""
    exchanged_bytes_per_token: float = 0.0
    """What all-reduces move of one token through all layers, where GPUs share them."""

    def exchanging(self, hidden: int) -> ForwardWork:
        """With the bytes that two all-reduces a layer move of one token, in 16 bits."""
        return replace(self, exchanged_bytes_per_token=2 * 2 * hidden * self.layers)

    def weight_bytes(self, tokens: float) -> float:
        """Weights that a pass over so many tokens reads. Of E experts, n tokens that choose a each
        touch E x (1 - (1 - a/E)^n) where they choose independently.

        >>> moe = ForwardWork(1.0, 1.0, 1, expert_bytes=128.0, experts=128, experts_per_token=8)
        >>> moe.weight_bytes(1), round(moe.weight_bytes(8), 1)
        (9.0, 52.6)
        """
        if not self.experts:
            return self.shared_bytes
        missed = math.pow(1 - self.experts_per_token / self.experts, tokens)
        return self.shared_bytes + self.expert_bytes * (1 - missed)


@dataclass(frozen=True)
class StepCosts:
    """How far an engine falls short of the chip, and what a step costs beside it."""

    bandwidth_share: float
    """Of the stated bandwidth that reading weights and cache reaches."""
    flops_share: float
    """Of the stated operations that matrices of a decoding batch reach."""
    layer_seconds: float
    """Beside the weights, per layer: norms, attention's launch, gaps between kernels."""
    step_seconds: float
    """Per step: sampling, scheduling that is not hidden."""
    speculation_seconds: float
    """Per step that verifies: rejection sampling, preparing drafts."""
    draft_seconds: float
    """Per forward of the draft."""
    lookup_seconds: float
    """Per sequence and step of a lookup method (ngram, suffix), on the host."""
    reduce_seconds: float
    """Per layer where several GPUs share it: two all-reduces, beside the bytes they move."""
    overlap: float
    """How far reading and multiplying hide one another: 1 adds them up, infinity takes the longer
    one (the roofline)."""


FITTED = StepCosts(
    bandwidth_share=0.80,
    flops_share=0.56,
    layer_seconds=36e-6,
    step_seconds=0.32e-3,
    speculation_seconds=1.1e-3,
    draft_seconds=0.64e-3,
    lookup_seconds=20e-6,
    reduce_seconds=30e-6,
    overlap=1.5,
)
"""Fitted 2026-12-01 on the half of tests/data/speedups.jsonl that is named ``fit`` there (Qwen3-32B
and Llama 3.1 8B on one H100); ``lookup_seconds`` and ``reduce_seconds`` are estimates that nothing
was fitted to. ``scripts/worth-accuracy`` prints what they give on the other half."""


@dataclass(frozen=True)
class Speculating:
    """A target, what drafts for it, and where both run."""

    target: ForwardWork
    chip: Chip
    draft: ForwardWork | None = None
    """None for a method that looks drafts up."""
    gpus: int = 1
    """That share each layer of the target."""
    draft_gpus: int = 1
    parallel: bool = False
    """Whether one forward of the draft gives all its tokens."""
    costs: StepCosts = FITTED

    def off(self, batch: float, context: float) -> float:
        """Seconds of a step of an engine without speculation."""
        return self.costs.step_seconds + self._forward(self.target, batch, 1, context, self.gpus)

    def on(self, batch: float, k: int, context: float) -> float:
        """Seconds of a step that drafts k tokens for each sequence and verifies k + 1.

        >>> eight = ForwardWork(15e9, 15e9, 32, kv_bytes_per_token=131072)
        >>> here = Speculating(eight, Chip(3.35e12, 989e12), ForwardWork(0.8e9, 0.8e9, 1))
        >>> round(here.off(1, 500) * 1e3, 1), round(here.on(1, 3, 500) * 1e3, 1)
        (7.1, 11.1)
        """
        costs = self.costs
        verify = self._forward(self.target, batch, k + 1, context, self.gpus)
        seconds = costs.step_seconds + costs.speculation_seconds + verify
        return seconds + self.drafting(batch, k, context)

    def idle(self, batch: float, context: float) -> float:
        """Seconds of a step at k = 0: the draft, where there is one, still runs one forward to keep
        its cache in step."""
        return self.off(batch, context) + self.drafting(batch, 0, context)

    def drafting(self, batch: float, k: int, context: float) -> float:
        """Seconds that the drafts of a step cost: the first forward over all verified tokens, then
        one token each."""
        if self.draft is None:
            if k:
                return batch * self.costs.lookup_seconds
            return 0.0
        first = self._draft_forward(batch, k + 1, context)
        if self.parallel or k < 2:
            return first
        return first + (k - 1) * self._draft_forward(batch, 1, context)

    def _draft_forward(self, batch: float, tokens: float, context: float) -> float:
        assert self.draft is not None
        forward = self._forward(self.draft, batch, tokens, context, self.draft_gpus)
        return self.costs.draft_seconds + forward

    def _forward(
        self, work: ForwardWork, batch: float, tokens: float, context: float, gpus: int
    ) -> float:
        """Seconds of one pass: reading weights and multiplying them; the cache; what each layer
        costs beside."""
        costs = self.costs
        bandwidth = self.chip.bytes_per_second * costs.bandwidth_share
        reading = work.weight_bytes(batch * tokens) / bandwidth
        multiplying = batch * tokens * work.flops_per_token / (self.chip.flops * costs.flops_share)
        cache = batch * context * work.kv_bytes_per_token / bandwidth
        cache += batch * (1 + tokens) * work.state_bytes / bandwidth
        beside = work.layers * costs.layer_seconds
        if gpus > 1:
            # A ring moves 2 (n - 1) / n of the bytes over each link.
            moved = batch * tokens * work.exchanged_bytes_per_token * 2 * (gpus - 1) / gpus
            beside += work.layers * costs.reduce_seconds
            beside += moved / self.chip.link_bytes_per_second
        both = math.pow(
            math.pow(reading, costs.overlap) + math.pow(multiplying, costs.overlap),
            1 / costs.overlap,
        )
        return both + cache + beside

    def cost(self, batch: float, k: int, context: float) -> float:
        """Seconds of a step that drafts / of one without speculation."""
        return self.on(batch, k, context) / self.off(batch, context)

    def speedup(self, batch: float, k: int, context: float, tokens: float) -> float:
        """Against an engine without speculation, where a step gives this many tokens."""
        return gain(tokens, self.cost(batch, k, context))

    def best_k(
        self, batch: float, context: float, by_position: Sequence[float], *, factor: float = 1.0
    ) -> int:
        """The k with the most tokens a second against *off*; 0 where none is faster. Ties go to the
        smaller one. ``factor``: how much costlier speculation was measured than modelled."""
        best, most = 0, 1.0
        for k in range(1, LARGEST_K + 1):
            cost = self.cost(batch, k, context) * factor
            here = gain(expected_tokens(by_position, k), cost)
            if here > most * 1.001:
                best, most = k, here
        return best
