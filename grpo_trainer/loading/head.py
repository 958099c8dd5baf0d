"""The vocabulary head in float32, over a model in any dtype and under any autocast."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grpo_trainer.loading.model import base_model


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32, also under autocast.

    A layer becomes one by its class alone: its names, its weight and whoever shares that stay as they are, and a copy
    of the model computes with the copy's own weight.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``x W^T + b``.

        Args:
            input: (..., H), in any dtype.

        Returns:
            (..., V) float32.
        """
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(input.float(), self.weight.float(), bias)


def cast_head_to_float32(model: nn.Module) -> None:
    """Keeps the vocabulary head in float32 and computes it so, whatever the rest of the model does.

    A weight that the head shares with the embedding is raised for both; the embedding's output keeps its dtype.

    Args:
        model: a causal language model, with or without an adapter; changed in place.

    Raises:
        ValueError: if the model has no such layer, or one that is not a plain product, as in 4 or 8 bits.
    """
    inner: Any = base_model(model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    # several where an adapter trains the head as a whole: the layer of before and its trained copy
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear)] if head is not None else []
    plain = [type(layer) in (nn.Linear, Float32Linear) and layer.weight.is_floating_point() for layer in layers]
    if not layers or not all(plain):
        kind = type(layers[plain.index(False)]).__name__ if layers else type(head).__name__
        raise ValueError(
            f"cast_lm_head_to_fp32=True needs a vocabulary head that is a torch.nn.Linear, but that of "
            f"{type(inner).__name__} is a {kind}: leave cast_lm_head_to_fp32 out, or, if the head was quantized, load "
            "the model without quantizing it (llm_int8_skip_modules=['lm_head'] in BitsAndBytesConfig)"
        )
    shared = {id(parameter) for parameter in embedding.parameters()}
    for layer in layers:
        dtype = layer.weight.dtype
        if dtype != torch.float32 and id(layer.weight) in shared:
            embedding.register_forward_hook(functools.partial(_in_dtype, dtype))
        layer.__class__ = Float32Linear
        for parameter in layer.parameters():
            parameter.data = parameter.data.float()  # the parameter itself stays, and with it what is tied


def _in_dtype(dtype: torch.dtype, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(dtype)
