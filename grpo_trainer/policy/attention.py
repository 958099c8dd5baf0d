"""Attention over a packed stream: each token sees the tokens of its own row before it, and itself.

The stream is cut into tiles of queries. The keys of a tile are the segments that lie before its queries in their rows,
one after the other, so a tile is a few ordinary matrix products and a mask over the keys that not all of it sees. Of a
prompt ``P`` and the completions ``a`` and ``b``::

                     keys   P P P P  a a a  b b
     tile            P      x
                     P      x x
                     P      x x x
                     P      x x x x
     tile            a      x x x x  x
                     a      x x x x  x x
                     a      x x x x  x x x
                     b      x x x x         x
                     b      x x x x         x x

Neighbouring segments share a tile where that computes less than a tile of their own would cost.

Scores and softmax are float32.

The model's own code runs unchanged: it finds this function, under the name ``grpo_packed``, where it finds every other
attention, and what it passes around as its attention mask is the plan of the tiles.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from grpo_trainer.policy.flex import FlexPlan, attend, flex_plan
from grpo_trainer.policy.packing import Segment

NAME = "grpo_packed"
TILE = 128
"""Most queries of a tile. Larger ones compute more scores that the mask hides; smaller ones are more calls."""
CALL = 8192
"""What a tile costs beyond its scores, in pairs of a query and a key; measured on a CPU."""
KEEP = 4
"""A layer's attention weights are kept for the backward pass if they are at most so many times its queries, a small
part of what it keeps anyway. Else they are computed again, which makes the attention's backward pass a third longer."""


Span = tuple[int, int]
"""First position in the stream, and one past the last."""


class Tile(NamedTuple):
    """Queries that are computed together.

    Attributes:
        first: position in the stream of the first query.
        end: one past the last query.
        keys: the spans of the stream that hold its keys, ascending and apart.
        free: how many of the leading keys every query sees.
        mask: (end - first, keys - free) float32, what is added to the scores: -inf where a query does not see a key.
    """

    first: int
    end: int
    keys: tuple[Span, ...]
    free: int
    mask: Tensor

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that are computed."""
        return (self.end - self.first) * _size(self.keys)


@dataclass(frozen=True)
class Plan:
    """The tiles of a stream for one kind of layer; what a layer is handed as its attention mask."""

    tiles: tuple[Tile, ...]

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that are computed."""
        return sum(tile.pairs for tile in self.tiles)


def make_plan(segments: Sequence[Segment], *, window: int | None = None, device: torch.device | str = "cpu") -> Plan:
    """The tiles of a stream.

    Args:
        segments: what the stream is made of, from end to end.
        window: a token sees those less than this many positions before it, and itself; None: no limit.
        device: where the masks are to be.

    Returns:
        The plan.

    Example:
        >>> rows = [Segment(0, 2, 0, -1), Segment(2, 1, 2, 0), Segment(3, 2, 2, 0)]
        >>> (tile,) = make_plan(rows).tiles
        >>> tile.keys, tile.free, (tile.mask == 0).int().tolist()
        (((0, 5),), 1, [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]])
    """
    lines: list[tuple[int, ...]] = []  # of each segment its ancestors' indices and its own
    for index, segment in enumerate(segments):
        lines.append((*(lines[segment.parent] if segment.parent >= 0 else ()), index))
    where = _Where(segments, lines, window)
    return Plan(tuple(where.tile(queries, device) for queries in where.cut()))


Piece = tuple[int, int, int]
"""Part of a segment: the segment's index, first position in the stream, and one past the last."""


class _Where(NamedTuple):
    """Who sees whom."""

    segments: Sequence[Segment]
    lines: list[tuple[int, ...]]
    window: int | None

    def cut(self) -> list[list[Piece]]:
        """The queries of each tile: pieces of segments that are neighbours, together where that is cheaper."""
        tiles: list[list[Piece]] = []
        spans: tuple[Span, ...] = ()
        for piece in self._pieces():
            alone = self.keys([piece])
            if tiles and piece[2] - tiles[-1][0][1] <= TILE:
                both = _merge([*spans, *alone])
                before, more = piece[1] - tiles[-1][0][1], piece[2] - piece[1]
                if (before + more) * _size(both) <= before * _size(spans) + more * _size(alone) + CALL:
                    tiles[-1].append(piece)
                    spans = both
                    continue
            tiles.append([piece])
            spans = alone
        return tiles

    def _pieces(self) -> Iterator[Piece]:
        """Segments cut evenly into pieces of at most ``TILE`` tokens."""
        for index, segment in enumerate(self.segments):
            count = math.ceil(segment.tokens / TILE)
            cuts = [segment.start + segment.tokens * i // count for i in range(count + 1)] if count else []
            for first, end in itertools.pairwise(cuts):
                yield index, first, end

    def keys(self, pieces: Sequence[Piece]) -> tuple[Span, ...]:
        """The spans of the stream that some query of the pieces sees."""
        spans = []
        for index, first, end in pieces:
            segment = self.segments[index]
            # the depth from which on the first query sees; the others see less far back
            far = 0 if self.window is None else segment.depth + first - segment.start - self.window + 1
            for ancestor in self.lines[index]:
                start, tokens, depth, _ = self.segments[ancestor]
                last = end if ancestor == index else start + tokens
                spans.append((start + max(far - depth, 0), last))
        return _merge([(a, b) for a, b in spans if a < b])

    def tile(self, pieces: Sequence[Piece], device: torch.device | str) -> Tile:
        """The tile of some queries."""
        spans = self.keys(pieces)
        first, end = pieces[0][1], pieces[-1][2]
        starts = torch.tensor([s.start for s in self.segments])
        ahead = starts - torch.tensor([s.depth for s in self.segments])  # of a place in the stream to its depth
        key = torch.cat([torch.arange(*span) for span in spans])
        query = torch.arange(first, end)
        key_segment = torch.bucketize(key, starts, right=True) - 1
        query_segment = torch.bucketize(query, starts, right=True) - 1
        gap = (query - ahead[query_segment])[:, None] - (key - ahead[key_segment])
        seen = torch.zeros(len(query), len(key), dtype=torch.bool)
        for index in {index for index, _, _ in pieces}:
            seen[query_segment == index] = torch.isin(key_segment, torch.tensor(self.lines[index]))
        seen &= gap >= 0
        if self.window is not None:
            seen &= gap < self.window
        free = int(seen.all(dim=0).long().cumprod(dim=0).sum())
        mask = torch.zeros(len(query), len(key) - free).masked_fill_(~seen[:, free:], -torch.inf)
        return Tile(first, end, spans, free, mask.to(device))


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same places, in spans that are ascending and apart.

    >>> _merge([(4, 6), (0, 2), (2, 3), (5, 9)])
    ((0, 3), (4, 9))
    """
    merged: list[Span] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return tuple(merged)


def _size(spans: Sequence[Span]) -> int:
    return sum(b - a for a, b in spans)


# --- the function -----------------------------------------------------------------------------------------------------


class _TiledAttention(torch.autograd.Function):
    """Attention of a stream of L tokens, H heads of D numbers, K of them for keys and values, R = H / K.

    ``p = softmax([cap(scaling · q kᵀ), sink])``; ``out = p v``, the sink's share dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (K, L, R, D)
        k: Tensor,  # (K, L, D)
        v: Tensor,  # (K, L, E)
        sink: Tensor | None,  # (K, R)
        plan: Plan,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        weights = _Weights(q, k, sink, scaling, softcap)
        keep = softcap is None and sink is None and plan.pairs * q.shape[2] <= KEEP * q[0].numel()
        kept = []
        out = v.new_empty(*q.shape[:-1], v.shape[-1])  # (K, L, R, E)
        for tile in plan.tiles:
            p = weights(tile)[0].to(v.dtype)
            torch.bmm(p, _keys(v, tile), out=_rows(out, tile))
            if keep:
                kept.append(p)
        ctx.save_for_backward(q, k, v, sink, *kept)
        ctx.plan, ctx.scaling, ctx.softcap = plan, scaling, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, *kept = ctx.saved_tensors
        heads, _, ratio, _ = q.shape
        grad = grads[0].to(v.dtype).contiguous()  # (K, L, R, E)
        weights = None if kept else _Weights(q, k, sink, ctx.scaling, ctx.softcap)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dsink = None if sink is None else torch.zeros_like(sink)
        for i, tile in enumerate(ctx.plan.tiles):
            p, slope, psink = weights(tile) if weights is not None else (kept[i], None, None)
            p, g = p.to(v.dtype), _rows(grad, tile)
            _add(dv, tile, torch.bmm(p.transpose(1, 2), g))
            dp = torch.bmm(g, _keys(v, tile).transpose(1, 2))  # (K, n R, keys)
            if dsink is not None:
                assert psink is not None  # where there is a sink, the weights are computed again
                share = (dp * p).sum(dim=-1) * psink  # (K, n R)
                dsink -= share.view(heads, -1, ratio).sum(dim=1)
            ds = torch._softmax_backward_data(dp, p, -1, v.dtype)
            if slope is not None:
                ds = ds.mul_(slope)
            torch.bmm(ds, _keys(k, tile), out=_rows(dq, tile))
            _add(dk, tile, torch.bmm(ds.transpose(1, 2), _rows(q, tile)))
        return dq.mul_(ctx.scaling), dk.mul_(ctx.scaling), dv, dsink, None, None, None


class _Weights:
    """What each query gives to each key, tile by tile, in float32 or wider."""

    def __init__(self, q: Tensor, k: Tensor, sink: Tensor | None, scaling: float, softcap: float | None) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self._q, self._k, self._softcap = q.to(wide) * scaling, k.to(wide), softcap
        self._sink = None if sink is None else sink.to(wide)

    def __call__(self, tile: Tile) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(K, n R, keys); the slope of the softcap at each score; the sink's share (K, n R)."""
        scores = torch.bmm(_rows(self._q, tile), _keys(self._k, tile).transpose(1, 2))
        slope = None
        if self._softcap is not None:
            tanh = scores.div_(self._softcap).tanh_()
            slope = 1 - tanh * tanh
            scores = tanh.mul_(self._softcap)
        heads, _, ratio, _ = self._q.shape
        by_query = scores.view(heads, -1, ratio, scores.shape[-1])
        by_query[..., tile.free :].add_(tile.mask[:, None])
        if self._sink is None:
            return torch.softmax(scores, dim=-1), slope, None
        sink = self._sink[:, None].expand(heads, tile.end - tile.first, ratio).reshape(heads, -1, 1)
        p = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)
        return p[..., :-1], slope, p[..., -1]


def _rows(x: Tensor, tile: Tile) -> Tensor:
    """The tile's part of (K, L, R, D) as a view (K, n R, D)."""
    return x[:, tile.first : tile.end].flatten(1, 2)


def _keys(x: Tensor, tile: Tile) -> Tensor:
    """The tile's part of (K, L, D), without a copy where it is of one piece."""
    parts = [x[:, a:b] for a, b in tile.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _add(total: Tensor, tile: Tile, part: Tensor) -> None:
    """The reverse of ``_keys``: adds (K, keys, D) to (K, L, D)."""
    for (a, b), piece in zip(tile.keys, part.split([b - a for a, b in tile.keys], dim=1), strict=True):
        total[:, a:b] += piece


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of a packed stream.

    Args:
        q: (1, H, L, D).
        k: (1, K, L, D), H a multiple of K: query head h reads key head ``h // (H / K)``.
        v: (1, K, L, E).
        plan: the tiles.
        scaling: factor of the scores; None takes ``1 / sqrt(D)``.
        softcap: scores are ``softcap · tanh(score / softcap)``; None leaves them.
        sink: (H,) a score for each head that takes its share of the softmax and has no value.

    Returns:
        (1, L, H, E), in the dtype of autocast where it is on.
    """
    _, heads, length, size = q.shape
    groups = k.shape[1]
    device = q.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    scaling = size**-0.5 if scaling is None else scaling
    with torch.autocast(device, enabled=False):
        out = _TiledAttention.apply(
            _compact(q[0].view(groups, heads // groups, length, size).transpose(1, 2), low),
            _compact(k[0], low),
            _compact(v[0], low),
            None if sink is None else sink.view(groups, -1),
            plan,
            scaling,
            softcap,
        )
    return out.transpose(0, 1).reshape(1, length, heads, v.shape[-1]).contiguous()


def _compact(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype`` and contiguous, in one pass."""
    return x.to(dtype, memory_format=torch.contiguous_format) if x.dtype != dtype else x.contiguous()


# --- what the model calls ---------------------------------------------------------------------------------------------

_segments: ContextVar[Sequence[Segment]] = ContextVar("segments of the packed stream")


def _layer_plan(*, device: torch.device, local_size: int | None = None, **_: Any) -> Plan | FlexPlan:
    """What transformers calls for the attention mask of a kind of layer; ``local_size`` is its sliding window."""
    plan = make_plan if torch.device(device).type == "cpu" else flex_plan
    return plan(_segments.get(), window=local_size, device=device)


def _layer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Plan | FlexPlan,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a layer calls for its attention."""
    if not isinstance(attention_mask, (Plan, FlexPlan)) or dropout or position_bias is not None:
        raise RuntimeError(
            f"{type(module).__name__} asks for an attention that the packed pass does not have (mask: "
            f"{type(attention_mask).__name__}, dropout: {dropout}, position bias: {position_bias is not None})"
        )
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sink": s_aux}
    if isinstance(attention_mask, FlexPlan):
        return attend(query, key, value, attention_mask, **options), None
    return tiled_attention(query, key, value, attention_mask, **options), None


AttentionInterface.register(NAME, _layer_attention)
AttentionMaskInterface.register(NAME, _layer_plan)


@contextlib.contextmanager
def packed_attention(model: nn.Module, segments: Sequence[Segment]) -> Iterator[None]:
    """Inside, the model's attention is that of a packed stream; afterwards it is as before, also after an exception.

    What gradient checkpointing computes again, in the backward pass and so outside, is packed too.

    Args:
        model: the model, with its wrappers.
        segments: what the stream is made of.
    """
    configs = list({id(c): c for m in model.modules() if (c := _config_with_attention(m)) is not None}.values())
    checkpointed = [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
    functions = [vars(m)["_gradient_checkpointing_func"] for m in checkpointed]
    token = _segments.set(segments)
    try:
        for module, function in zip(checkpointed, functions, strict=True):
            vars(module)["_gradient_checkpointing_func"] = _checkpoint(function, configs)
        with _implementation(configs):
            yield
    finally:
        for module, function in zip(checkpointed, functions, strict=True):
            vars(module)["_gradient_checkpointing_func"] = function
        _segments.reset(token)


def _config_with_attention(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, "_attn_implementation") else None


@contextlib.contextmanager
def _implementation(configs: Sequence[Any]) -> Iterator[None]:
    """Our name for the attention, in every configuration."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _checkpoint(checkpoint: Callable, configs: Sequence[Any]) -> Callable:
    """A checkpointing function whose recomputation finds our attention."""

    def run_packed(run: Callable, *args: Any, **kwargs: Any) -> Any:
        def inside(*a: Any, **k: Any) -> Any:
            with _implementation(configs):
                return run(*a, **k)

        return checkpoint(inside, *args, **kwargs)

    return run_packed
