"""Whether a model can take a packed stream, and what it does with its vocabulary head: decided by looking at the model,
never by trying and catching what goes wrong.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_trainer.loading.head import Float32Linear
from grpo_trainer.policy.flex import why_not
from grpo_trainer.policy.head import Transform
from grpo_trainer.policy.modes import eval_mode, set_for_now

_KNOWN_ATTENTION = (
    None,
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
"""Ways to compute one and the same attention, which a packed stream may therefore compute in its own way."""

_MIXES_TOKENS = re.compile("Mamba|SSM|Rwkv|RWKV|Recurrent|LinearAttention|Delta|Retention|Hyena|ShortConv|Indexer")
"""Names of layers through which a token sees others other than by attention."""


def innermost(model: Any) -> Any:
    """The model inside adapters, compilation and data parallelism.

    Args:
        model: possibly wrapped, several times over.

    Returns:
        The model.
    """
    return _unwrap(model)[-1]


def forward_parameters(model: Any) -> frozenset[str]:
    """Names that the innermost model's forward takes: wrappers hide them behind ``*args, **kwargs``.

    Args:
        model: possibly wrapped.

    Returns:
        The names; ``position_ids`` is among them where any keyword is taken.
    """
    parameters = inspect.signature(type(innermost(model)).forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters) | (frozenset(["position_ids"]) if takes_any else frozenset())


def why_padded(model: Any) -> str | None:
    """Why a model's rows cannot be packed.

    Args:
        model: possibly wrapped. One whose attribute ``never_pack`` is True is not packed in any case.

    Returns:
        The reason, the end of a sentence that begins with "because"; None if they can.
    """
    layers = _unwrap(model)
    if getattr(layers[-1], "never_pack", False):
        return "its attribute never_pack says so"
    return _wrappers(layers) or _model(layers[-1]) or _attention(layers[-1]) or _configuration(layers[-1])


def needs_last_token(model: Any) -> bool:
    """Whether the model's positions depend on the longest row of a batch, so that none may be cut short.

    Args:
        model: possibly wrapped.

    Returns:
        True for rotary tables of the kinds ``dynamic`` and ``longrope``.
    """
    config = innermost(model).config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [str(t.get("rope_type", t.get("type"))) for t in [rope, *rope.values()] if isinstance(t, dict)]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def _unwrap(model: Any) -> list[Any]:
    """The model and what it wraps, outermost first."""
    layers = [model]
    while True:
        inner = layers[-1]
        if hasattr(inner, "get_base_model"):  # an adapter
            layers.append(inner.get_base_model())
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # a compiled model
            layers.append(inner._orig_mod)
        elif isinstance(getattr(inner, "module", None), nn.Module):  # data parallel
            layers.append(inner.module)
        else:
            return layers


def _wrappers(layers: list[Any]) -> str | None:
    for layer in layers:
        if hasattr(layer, "_orig_mod") or getattr(layer, "_compiled_call_impl", None) is not None:
            return "it is compiled, and would be compiled anew for each arrangement of rows"
        if isinstance(layer, nn.DataParallel):
            return "torch.nn.DataParallel cuts a batch along its rows"
        adapters = layer.peft_config.items() if isinstance(getattr(layer, "peft_config", None), dict) else ()
        for name, config in adapters:
            if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
                return f"adapter {name!r} adds learned tokens to each row"
            if getattr(config, "alora_invocation_tokens", None):
                return f"adapter {name!r} is switched on by tokens of a row"
    return None


def _model(model: Any) -> str | None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.is_remote_code():
        return f"{kind} is not a model of the transformers library"
    if model.config.is_encoder_decoder:
        return f"{kind} has an encoder"
    if model.config.get_text_config() is not model.config:
        return f"{kind} reads more than text"
    parameters = inspect.signature(type(model).forward).parameters
    missing = [name for name in ("attention_mask", "position_ids", "logits_to_keep") if name not in parameters]
    if missing:
        return f"the forward pass of {kind} takes no {missing[0]}"
    device = next(model.parameters()).device.type
    if device not in ("cpu", "cuda"):
        return f"it is on {device}, and there is a packed attention for the CPU and for CUDA only"
    return None if device == "cpu" else why_not(device)


def _attention(model: Any) -> str | None:
    kind = type(model).__name__
    # a model that flash attention can serve says all there is to know about its attention when it calls it
    if not model._supports_attention_backend or not model._supports_flash_attn:
        return f"{kind} computes its attention in a way of its own"
    masks = sys.modules[type(model.base_model).__module__]
    if not hasattr(masks, "create_causal_mask") or hasattr(masks, "create_chunked_causal_mask"):
        return f"{kind} makes attention masks of its own"
    if model.config._attn_implementation not in _KNOWN_ATTENTION:
        return f"nothing is known of its attention {model.config._attn_implementation!r}"
    if model.config._attn_implementation == "sdpa" and getattr(model.config, "attn_logit_softcapping", None):
        return f"the attention of {kind} has a softcap, which sdpa leaves out: attn_implementation='eager' has it"
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, nn.Conv1d) or _MIXES_TOKENS.search(name):
            return f"{name} carries something from token to token"
        if getattr(module, "is_causal", True) is False:
            return f"{name} lets tokens see those after them"
        if name == "CheckpointWrapper":
            return "its layers are wrapped for checkpointing by torch, which would compute them again as if padded"
        if "attention" in name.lower() and _attention_dropout(module):
            return f"{name} has dropout: disable_dropout=True takes it out"
    return None


def _attention_dropout(module: nn.Module) -> bool:
    values = [value for name, value in vars(module).items() if re.match("att.*dropout", name)]
    values += [
        child.p for name, child in module.named_children() if re.match("att.*drop", name) and hasattr(child, "p")
    ]
    return any(isinstance(value, float) and value > 0 for value in values)


def _configuration(model: Any) -> str | None:
    config, kind = model.config, type(model).__name__
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return f"{kind} lets tokens see those after them"
    if model._is_stateful or not model._supports_default_dynamic_cache():
        return f"{kind} keeps a state that is not a list of keys and values"
    if getattr(config, "_heterogeneity_spec", None) is not None:
        return f"the layers of {kind} differ from each other in a way of their own"
    strange = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if strange:
        return f"{kind} has layers of the kind {sorted(strange)[0]}"
    layers = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    return f"{kind} has layers with a {layers.pop().__name__}" if layers else None


# --- the vocabulary head ----------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """A vocabulary head that is one matrix product.

    Attributes:
        layer: the product.
        transform: what the model does with the logits before it gives them away.
        config: the model's configuration.
        neutral: what to set in it so that the model does nothing with them.
    """

    layer: nn.Linear
    transform: Transform
    config: Any
    neutral: Mapping[str, Any]


_heads: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module, Head | None]] = weakref.WeakKeyDictionary()


def plain_head(model: Any) -> Head | None:
    """The model's vocabulary head, if it is one matrix product and all that comes after it is known.

    Asked once per model: the head is made to give known numbers for a single token, and what the model returns shows
    what it does with them.

    Args:
        model: one that can be packed, possibly wrapped.

    Returns:
        The head, None if the model has to compute its logits itself.
    """
    model = innermost(model)
    layer: Any = model.get_output_embeddings()
    known = _heads.get(model)
    if known is None or known[0] is not layer:
        known = _heads[model] = (layer, _find_head(model, layer))
    return known[1]


def _find_head(model: Any, layer: Any) -> Head | None:
    plain = type(layer) in (nn.Linear, Float32Linear) and type(layer.weight) is nn.Parameter
    if not plain or not layer.weight.is_floating_point() or "forward" in vars(layer) or layer._forward_hooks:
        return None
    given = torch.linspace(-60, 60, layer.out_features, device=layer.weight.device)[None, None]
    if torch.equal(_echo(model, layer, given), given):
        return Head(layer, Transform(), model.config, {})
    softcap = getattr(model.config, "final_logit_softcapping", None)
    divisor = getattr(model.config, "logits_scaling", None)
    for transform, neutral in (
        (Transform(softcap=softcap), {"final_logit_softcapping": None}),
        (Transform(scale=1 / (divisor or 1.0)), {"logits_scaling": 1.0}),
    ):
        if torch.allclose(_echo(model, layer, given), transform(given)[0], rtol=1e-5, atol=1e-5):
            with set_for_now(model.config, neutral):
                if torch.equal(_echo(model, layer, given), given):
                    return Head(layer, transform, model.config, neutral)
    return None


@torch.no_grad()
def _echo(model: Any, layer: nn.Module, given: Tensor) -> Tensor:
    """The logits of one token, (1, 1, V), where the head gives those that are given."""
    token = torch.zeros(1, 1, dtype=torch.long, device=given.device)
    with eval_mode(model), set_for_now(layer, {"forward": lambda hidden: given}):
        # not model(...): hooks of others are for real passes
        return model.forward(input_ids=token, attention_mask=token + 1, position_ids=token, use_cache=False).logits
