"""Log-probs straight from hidden states: the vocabulary head and the softmax in one pass, a part of the vocabulary at a
time, so that the logits of all tokens are never written out in float32.

With ``x = h Wᵀ + b``, the logits of one position, and ``z = cap(x · scale)``:

    log p(y) = z_y − lse(z),    H = lse(z) − Σ_v p_v z_v

and, for a gradient g on log p(y),

    ∂/∂h = g (W_y − Σ_v p_v W_v),    ∂/∂W_v = g (1[v = y] − p_v) h.

The sum over the vocabulary is a matrix product of the probabilities. Where the head is frozen it is taken in the
forward pass already, and the backward pass has nothing left to do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KEEP_BYTES = 256 << 20
"""Most bytes of logits that are kept for the backward pass; beyond that they are computed again."""
BLOCK = 1 << 20
"""About how many logits are held at a time: few enough for the cache, enough for a matrix product."""


class Transform(NamedTuple):
    """What happens to a logit before the softmax: ``softcap · tanh(x · scale / softcap)``, then the temperature.

    Attributes:
        scale: factor of the logits.
        softcap: bound of the logits; None leaves them.
        temperature: divisor, > 0.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The transformed logits, in float32 or wider, and d(transformed) / d(capped); the input may be overwritten.

        Args:
            x: logits as the head gives them.

        Returns:
            The logits and the slope of the cap, None without one.
        """
        z = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        slope = None
        if self.softcap is not None:
            z = z.mul_(self.scale / self.softcap).tanh_()
            slope = 1 - z * z
            z.mul_(self.softcap / self.temperature)
        elif self.scale != self.temperature:
            z.mul_(self.scale / self.temperature)
        return z, slope


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    targets: Tensor,
    *,
    transform: Transform | None = None,
    dtype: torch.dtype | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(transform(hidden Wᵀ + b))`` at the targets.

    Args:
        hidden: (M, D).
        weight: (V, D).
        bias: (V,) or None.
        places: (N,) for each target the row of ``hidden`` that predicts it.
        targets: (N,) ids.
        transform: from logits to what the softmax sees; None leaves them.
        dtype: of the matrix products; None takes the weight's.
        with_entropy: also the entropy of each predicted distribution.

    Returns:
        (N,) log-probs in nats, float32 or wider, and (N,) entropies without gradient, or None.

    Example:
        >>> hidden, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> logprobs, _ = head_logprobs(hidden, weight, None, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
        >>> [round(x, 4) for x in logprobs.tolist()]
        [-0.1269, -2.1269, -0.6931]
    """
    how = _How(transform or Transform(), dtype or weight.dtype, with_entropy, torch.is_grad_enabled())
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _HeadLogprobs.apply(hidden, weight, bias, places, targets, how)
    return logprobs, entropy if with_entropy else None


class _How(NamedTuple):
    transform: Transform
    dtype: torch.dtype
    with_entropy: bool
    with_gradient: bool


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        places: Tensor,
        targets: Tensor,
        how: _How,
    ) -> tuple[Tensor, Tensor]:
        transform, dtype, with_entropy, with_gradient = how
        need_hidden, need_weight, need_bias = (with_gradient and need for need in ctx.needs_input_grad[:3])
        ahead = need_hidden and not need_weight and not need_bias
        keep = (need_weight or need_bias) and len(hidden) * len(weight) * dtype.itemsize <= KEEP_BYTES
        h = hidden.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        top = h.new_full((len(h), 1), -torch.inf, dtype=wide)
        total, mean = torch.zeros_like(top), torch.zeros_like(top)  # Σ exp(z − top), Σ exp(z − top) z
        pull = h.new_zeros(h.shape, dtype=wide) if ahead else None  # Σ exp(z − top) slope W
        chosen, bend = h.new_zeros(len(targets), dtype=wide), h.new_ones(len(targets), dtype=wide)
        kept = []
        for first, w, b in _blocks(len(h), weight, bias, dtype):
            logits = _linear(h, w, b)
            if keep:
                kept.append(logits)
            z, slope = transform(logits)
            _look_up(chosen, z, places, targets - first)
            if slope is not None:
                _look_up(bend, slope, places, targets - first)
            higher = torch.maximum(top, z.amax(dim=1, keepdim=True))
            shrink = (top - higher).exp_()
            e = (z - higher).exp_()
            total = total.mul_(shrink).add_(e.sum(dim=1, keepdim=True))
            if with_entropy:
                mean = mean.mul_(shrink).add_(z.mul_(e).sum(dim=1, keepdim=True))
            if pull is not None:
                e = e if slope is None else e.mul_(slope)
                pull.mul_(shrink).add_(e.to(dtype) @ w)
            top = higher
        lse = top + total.log()
        if pull is not None:
            pull /= total
        ctx.save_for_backward(hidden, weight, bias, places, targets, lse, pull, bend, *kept)
        ctx.how = how
        entropy = (lse - mean / total).squeeze(1)[places] if with_entropy else lse.new_zeros(0)
        ctx.mark_non_differentiable(entropy)
        return chosen - lse.squeeze(1)[places], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, places, targets, lse, pull, bend, *kept = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        factor = ctx.how.transform.scale / ctx.how.transform.temperature
        g = grads[0] * factor  # (N,)
        share = lse.new_zeros(len(hidden)).index_add_(0, places, g)[:, None]  # (M, 1)
        g = (g * bend)[:, None]  # (N, 1)
        dh = lse.new_zeros(hidden.shape) if need_hidden else None
        dw = torch.empty_like(weight) if need_weight else None
        db = torch.empty_like(bias) if need_bias else None
        if need_weight or need_bias:
            h = hidden.to(ctx.how.dtype)
            for i, (first, w, b) in enumerate(_blocks(len(h), weight, bias, ctx.how.dtype)):
                z, slope = ctx.how.transform(kept[i] if kept else _linear(h, w, b))
                d = z.sub_(lse).exp_().mul_(-share)
                d = (d if slope is None else d.mul_(slope)).to(ctx.how.dtype)  # (M, block)
                part = slice(first, first + len(w))
                if dh is not None:
                    dh += d @ w
                if dw is not None:
                    dw[part] = d.t() @ h
                if db is not None:
                    db[part] = d.sum(dim=0)
        elif dh is not None:
            dh -= share * pull
        if dh is not None:
            dh.index_add_(0, places, g * weight[targets])
        if dw is not None:
            dw.index_add_(0, targets, (g * hidden[places]).to(dw.dtype))
        if db is not None:
            db.index_add_(0, targets, g.squeeze(1).to(db.dtype))
        return (None if dh is None else dh.to(hidden.dtype)), dw, db, None, None, None


def _blocks(rows: int, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Any:
    """Consecutive parts of the vocabulary: first id, weight, bias."""
    size = max(256, BLOCK // max(rows, 1) // 64 * 64)
    for first in range(0, len(weight), size):
        part = slice(first, first + size)
        yield first, weight[part].to(dtype), None if bias is None else bias[part].to(dtype)


def _linear(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return h @ w.t() if b is None else torch.addmm(b, h, w.t())


def _look_up(out: Tensor, z: Tensor, places: Tensor, local: Tensor) -> None:
    """Puts ``z[places, local]`` into (N,) where ``local`` lies in this block."""
    inside = (local >= 0) & (local < z.shape[1])
    found = z[places, local.clamp(0, z.shape[1] - 1)]
    torch.where(inside, found, out, out=out)
