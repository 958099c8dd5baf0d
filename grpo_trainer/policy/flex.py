"""Attention over a packed stream on a GPU: PyTorch's FlexAttention, with the tree of rows as its mask.

The stream lists a tree of segments, each followed by those that continue it, so that what continues a token stands in
one piece, from the token to where its subtree ends. A query sees a key exactly if it stands in that piece::

    key k is seen by query q   <=>   k <= q < end[k]

and, with a sliding window of w, if their positions in the row are less than w apart. Which blocks of the mask are
empty, full or mixed is worked out on the host, from the segments; no mask over all pairs is made, and nothing waits for
the device. The compiled kernel takes any length, and the stream is filled up to whole blocks (``packing.pack``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from grpo_trainer.policy.packing import Segment

BLOCK = 128
"""Tokens of a block; the length of a stream is a multiple of it."""


class FlexPlan(NamedTuple):
    """The mask of a stream for one kind of layer; what a layer is handed as its attention mask."""

    mask: BlockMask


def flex_plan(
    segments: Sequence[Segment], *, window: int | None = None, device: torch.device | str = "cpu"
) -> FlexPlan:
    """The mask of a stream.

    Args:
        segments: what the stream is made of, from end to end, a multiple of ``BLOCK`` tokens.
        window: a token sees those less than this many positions before it, and itself; None: no limit.
        device: where the mask is to be.

    Returns:
        The plan.

    Raises:
        ValueError: if the stream is not whole blocks.

    Example:
        >>> rows = [Segment(0, 2, 0, -1), Segment(2, 60, 2, 0), Segment(62, 66, 2, 0), Segment(128, 128, 0, -1)]
        >>> mask = flex_plan(rows).mask
        >>> mask.shape, mask.kv_num_blocks.tolist()
        ((1, 1, 256, 256), [[[1, 1]]])
    """
    length = segments[-1].end
    if length % BLOCK:
        raise ValueError(f"a stream of {length} tokens is not a multiple of {BLOCK}")
    ends, positions = _ends(segments), _positions(segments)
    seen, full = _blocks(ends, positions, window)
    there = torch.from_numpy(np.stack([ends, positions]).astype(np.int32)).to(device, non_blocking=True)
    mask_mod = _visible(there[0], there[1], window)
    part = torch.from_numpy(seen & ~full).to(device, non_blocking=True)
    whole = torch.from_numpy(full).to(device, non_blocking=True)
    return FlexPlan(
        BlockMask.from_kv_blocks(
            *_ordered(part),
            *_ordered(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(length, length),
        )
    )


def _ends(segments: Sequence[Segment]) -> np.ndarray:
    """(L,) for each token one past the last that continues it."""
    last = [segment.end for segment in segments]
    for index in range(len(segments) - 1, -1, -1):  # children come after their parents
        parent = segments[index].parent
        if parent >= 0:
            last[parent] = max(last[parent], last[index])
    return np.repeat(last, [segment.tokens for segment in segments])


def _positions(segments: Sequence[Segment]) -> np.ndarray:
    """(L,) each token's place in its rows."""
    return np.concatenate([np.arange(s.depth, s.depth + s.tokens) for s in segments])


def _visible(ends: Tensor, positions: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Whether a query sees a key, as FlexAttention asks it."""

    def tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[k])

    if window is None:
        return tree
    limit = window

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[k]) & (positions[q] - positions[k] < limit)

    return near


def _blocks(ends: np.ndarray, positions: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(n, n) bool, by block of queries and of keys: whether anything may be seen, and whether everything is."""
    n = len(ends) // BLOCK
    ends, positions = ends.reshape(n, BLOCK), positions.reshape(n, BLOCK)
    first = np.arange(n)[:, None] * BLOCK  # of the queries
    before = np.arange(n)[:, None] > np.arange(n)
    seen = (before & (ends.max(axis=1) > first)) | np.eye(n, dtype=bool)
    full = before & (ends.min(axis=1) >= first + BLOCK)
    if window is not None:  # positions grow along a row, but a block may hold several
        seen &= positions.min(axis=1)[:, None] - positions.max(axis=1) < window
        full &= positions.max(axis=1)[:, None] - positions.min(axis=1) < window
    return seen, full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries how many blocks of keys, and their indices, those that count first."""
    count = blocks.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None].contiguous()


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: FlexPlan,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of a packed stream; compiled, except on a CPU.

    Args:
        q: (1, H, L, D).
        k: (1, K, L, D), H a multiple of K: query head h reads key head ``h // (H / K)``.
        v: (1, K, L, E).
        plan: the mask.
        scaling: factor of the scores; None takes ``1 / sqrt(D)``.
        softcap: scores are ``softcap · tanh(score / softcap)``; None leaves them.
        sink: (H,) a score for each head that takes its share of the softmax and has no value.

    Returns:
        (1, L, H, E), in the dtype of autocast where it is on.
    """
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    run: Any = flex_attention if device == "cpu" else _compiled()
    with torch.autocast(device, enabled=False):
        out = run(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            score_mod=None if softcap is None else _cap(softcap),
            block_mask=plan.mask,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=None if sink is None else AuxRequest(lse=True),
        )
        if sink is not None:  # its score joins the sum that the weights are divided by
            out, aux = out
            out = (out * torch.sigmoid(aux.lse - sink[:, None].to(aux.lse.dtype))[..., None]).to(dtype)
    return out.transpose(1, 2).contiguous()


@functools.cache
def _cap(softcap: float) -> Callable[..., Tensor]:
    """The softcap as FlexAttention asks it; one function each, so that the kernel is compiled once."""

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.cache
def why_not(device: str) -> str | None:
    """Why FlexAttention cannot be had on a device: found out once, on a small tree, values and gradients.

    Args:
        device: its type.

    Returns:
        The reason, or None if it works there.
    """
    try:
        error = _error(device)
    except Exception as trouble:  # whatever a compiler may have to say
        return f"FlexAttention does not work on this {device} device ({type(trouble).__name__}: {str(trouble)[:200]})"
    return None if error <= 0.02 else f"FlexAttention is off by {error:.2g} on this {device} device"


def _error(device: str) -> float:
    """Greatest difference, of what it should be, of the attention of a small tree and of its gradients in bfloat16."""
    from grpo_trainer.policy.attention import make_plan, tiled_attention

    segments = [Segment(0, 40, 0, -1), Segment(40, 60, 40, 0), Segment(100, 70, 40, 0), Segment(170, 86, 0, -1)]
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, 256, 64, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4)]

    def run(attention: Callable[..., Tensor], plan: Any, where: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, weight = (x.to(where, dtype).requires_grad_() for x in given)
        out = attention(q, k, v, plan)
        return [out, *torch.autograd.grad(out, [q, k, v], weight.transpose(1, 2))]

    right = run(tiled_attention, make_plan(segments), "cpu", torch.float64)
    found = run(attend, flex_plan(segments, device=device), device, torch.bfloat16)
    return max(
        ((got.detach().cpu().double() - own.detach()).norm() / own.detach().norm()).item()
        for own, got in zip(right, found, strict=True)
    )
