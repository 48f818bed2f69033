"""Layers to blocks: how vLLM groups caching layers, what one block costs, how many a request needs.

The arithmetic is vLLM's (v1/core/kv_cache_utils.py and v1/kv_cache_interface.py, read in 0.32 on
2026-11-29): layers of one kind form groups of equal size, all groups draw from one pool of equal
blocks, so a block costs what the widest group needs and a request takes blocks from every group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specserve.memory.deployment import Shape
from specserve.memory.layers import CacheLayer


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table."""

    layer: CacheLayer
    """One of the layers: kind, window, state."""
    layers: int
    block_tokens: int
    page_bytes: int
    """Bytes of one block in all of the group's layers."""

    def blocks(self, length: int, shape: Shape) -> int:
        """Blocks that one request of ``length`` tokens holds at its longest."""
        match self.layer.kind:
            case "full":
                return _up(_up(length, shape.dcp), self.block_tokens)
            case "sliding":
                held = min((self.layer.window or length) - 1 + shape.in_flight_tokens, length)
                # A window need not start where a block does.
                return _up(held, self.block_tokens) + 1
            case "chunked":
                return _up(
                    min((self.layer.window or length) + shape.in_flight_tokens, length),
                    self.block_tokens,
                )
            case "state":
                return 1 + shape.num_speculative_tokens + int(shape.state_checkpoints)


@dataclass(frozen=True)
class CachePlan:
    """The pool's unit and what a request takes of it."""

    groups: tuple[CacheGroup, ...]
    block_bytes: int
    """Bytes of one block of the pool on one GPU."""
    shape: Shape
    layers: tuple[CacheLayer, ...] = ()

    def request_blocks(self, length: int) -> int:
        """Blocks of one request of ``length`` tokens."""
        return sum(g.blocks(length, self.shape) for g in self.groups)

    def request_bytes(self, length: int) -> int:
        """Bytes that one request of ``length`` tokens takes on one GPU."""
        return self.request_blocks(length) * self.block_bytes

    def blocks(self, pool_bytes: int) -> int:
        """Whole blocks of a pool."""
        if self.block_bytes:
            return max(0, pool_bytes) // self.block_bytes
        return 0

    def requests(self, blocks: int, length: int) -> float:
        """Requests of ``length`` tokens that fit at once: vLLM's "maximum concurrency"."""
        needed = self.request_blocks(length)
        if needed:
            return blocks / needed
        return 0.0

    def tokens(self, blocks: int, length: int) -> int:
        """KV tokens as this version of vLLM logs them."""
        if not self.groups:
            return 0
        if self.shape.accounting.tokens_from_concurrency:
            return int(self.requests(blocks, length) * length)
        smallest = min(g.block_tokens for g in self.groups)
        return blocks // len(self.groups) * smallest * self.shape.dcp

    def token_bytes(self, length: int) -> int:
        """Pool bytes per KV token as logged: exact for plain attention, else the average over
        ``length`` tokens.
        """
        if all(g.layer.kind == "full" for g in self.groups):
            tokens = [g.page_bytes / g.block_tokens for g in self.groups]
            return round(sum(tokens) / self.shape.dcp)
        if self.shape.accounting.tokens_from_concurrency:
            return round(self.request_bytes(length) / length)
        return round(self.block_bytes * len(self.groups) / min(g.block_tokens for g in self.groups))

    def longest(self, pool_bytes: int, limit: int) -> int:
        """The longest single request that fits, at most ``limit``; the pool's null block is set
        aside.

        vLLM searches the same way when it prints "the estimated maximum model length".
        """
        return bisect_right(
            range(1, limit + 1), self.blocks(pool_bytes) - 1, key=self.request_blocks
        )


def arrange(layers: Sequence[CacheLayer], shape: Shape) -> CachePlan:
    """Group the layers of one GPU (one pipeline stage) as vLLM does."""
    alone = not shape.hybrid_manager or shape.accounting.v0
    if alone and any(layer.kind == "full" for layer in layers):  # windows then keep every token
        layers = [
            replace(la, kind="full", window=None) if la.kind in {"sliding", "chunked"} else la
            for la in layers
        ]
    attention = [layer for layer in layers if layer.kind != "state"]
    usual = 16
    if shape.backend == "cpu":
        latent = any(layer.mla for layer in attention)
        if not latent or shape.processor.has_amx_tile:
            usual = 128
    block, kinds = shape.block_tokens or usual, {(layer.kind, layer.window) for layer in layers}
    if not layers:
        return CachePlan((), 0, shape)
    if len(kinds) == 1 and layers[0].kind != "state":
        page = sum(layer.token_bytes for layer in layers) * block
        return CachePlan(
            (CacheGroup(layers[0], len(layers), block, page),), page, shape, tuple(layers)
        )
    return _mixed(layers, attention, block, shape)


def _mixed(
    layers: Sequence[CacheLayer], attention: Sequence[CacheLayer], block: int, shape: Shape
) -> CachePlan:
    """Several kinds of layers: one page size for all, groups of equal size, one pool."""
    states = [layer for layer in layers if layer.kind == "state"]
    if states and attention:
        block = _hybrid_block(
            max(s.state_bytes for s in states), max(a.token_bytes for a in attention), block
        )
    page = max([a.token_bytes * block for a in attention] + [s.state_bytes for s in states])
    buckets: dict[tuple[str, int | None, int], list[CacheLayer]] = {}
    for layer in layers:
        if layer.token_bytes and page % layer.token_bytes == 0:
            own = page // layer.token_bytes
        else:
            own = block
        buckets.setdefault((layer.kind, layer.window, own), []).append(layer)
    counts = [len(b) for b in buckets.values()]
    if max(counts) < 1.5 * min(counts):
        width = max(counts)
    else:
        width = min(counts)
    groups = [
        CacheGroup(bucket[0], width, own, width * page)
        for (_, _, own), bucket in buckets.items()
        for _ in range(_up(len(bucket), width))
    ]
    return CachePlan(tuple(groups), width * page, shape, tuple(layers))


def _hybrid_block(state: int, token_bytes: int, block: int) -> int:
    """The attention block that is as large as a state, in steps of the kernel's block.

    >>> _hybrid_block(3227648, 2048, 16)  # Qwen3.6-27B, fp8 cache, one draft token
    1584
    """
    return max(block, block * _up(state, max(1, block * token_bytes)))


def _up(value: int, step: int) -> int:
    """Steps that cover a value."""
    return -(-value // step)
