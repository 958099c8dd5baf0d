"""Weights made ready for many small multiplications: cast once per rollout, not once per token.

Under mixed precision every matrix product casts its weight. ``torch.autocast`` remembers the casts of trainable leaves
while its outermost context lasts, but not those of frozen weights, which is what an adapter's base consists of. On a
CPU a second thing costs as much: the kernel rearranges the weight of every product, which for a handful of rows takes
longer than the product.

``ready_weights`` does both once. The parameters stay as they are, in dtype, data and place; only the ``forward`` of
each linear layer is another one inside the context, which multiplies by a temporary copy. The dtypes are those that
autocast computes with: input and weight cast to its dtype, result in its dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Multiply = Callable[[Tensor], Tensor]

_PACK_FROM = 8
"""Passes from which on rearranging pays: it takes about as long as it saves in five."""


@contextlib.contextmanager
def ready_weights(model: nn.Module, passes: int) -> Iterator[None]:
    """Linear layers multiply by copies that are cast, and on a CPU rearranged, once; enter it inside autocast.

    Layers of other kinds (quantised, sharded, parametrised, mixtures of experts in one tensor) are left alone, as are
    layers whose weight needs neither.

    Args:
        model: the policy. Its parameters must not change inside.
        passes: most forward passes that one row will need.
    """
    packs = passes >= _PACK_FROM and _can_pack()
    replaced: list[nn.Module] = []
    try:
        for module in model.modules():
            multiply = _multiply(module, packs)
            if multiply is not None:
                replaced.append(module)
                module.forward = multiply
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)


def _multiply(module: nn.Module, packs: bool) -> Multiply | None:
    """What this layer computes, with its weight ready; None where there is nothing to gain."""
    if type(module) not in (nn.Linear, Conv1D) or "forward" in vars(module):  # the latter: someone else's forward
        return None
    weight: Any = module.weight
    if type(weight) is not nn.Parameter or weight.device.type == "meta":
        return None
    device = weight.device.type
    dtype = weight.dtype
    if torch.is_autocast_enabled(device) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(device)
    packs = packs and device == "cpu" and dtype == torch.bfloat16
    if not packs and (dtype == weight.dtype or weight.requires_grad):  # autocast remembers its casts of trainable ones
        return None
    rows: Any = weight.detach() if type(module) is nn.Linear else weight.detach().t()  # (out, in)
    bias: Any = None if module.bias is None else module.bias.detach().to(dtype)  # type: ignore[operator]
    return _packed(rows.to(dtype).contiguous(), bias) if packs else _cast(rows.to(dtype), bias)


def _cast(weight: Tensor, bias: Tensor | None) -> Multiply:
    return lambda x: nn.functional.linear(x.to(weight.dtype), weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The weight in the order in which oneDNN reads it, which otherwise each product finds anew."""
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, None)
    dtype = weight.dtype
    return lambda x: ops._linear_pointwise(x.to(dtype), packed, bias, "none", [], "")


def _can_pack() -> bool:
    """Whether this build has the operations, which are not public, this CPU the instructions, and oneDNN is on."""
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not (torch.backends.mkldnn.enabled and all(hasattr(torch.ops.mkldnn, name) for name in names)):
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
