"""Whether the group engine can draw from a model as it is asked to: decided by looking, never by trying."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from grpo_trainer.generation.sampling import OCCURRENCE, SCORES_ONLY, SEQUENCE
from grpo_trainer.loading import base_model

_OWN_LOOP = (
    *("generate", "_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"),
    *("_prepare_cache_for_generation", "_get_logits_processor", "_get_stopping_criteria"),
)
"""Parts of ``generate`` that a model may have written anew; the group engine would not call them."""

_HARMLESS = {("Phi3ForCausalLM", "prepare_inputs_for_generation")}
"""Parts written anew for what is looked at here anyway: Phi-3's begins afresh where longrope changes its tables."""

_OTHER_WAYS = {
    "cache_implementation": (None, "dynamic"),
    "use_cache": (None, True),
    "prefill_chunk_size": (None,),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "watermarking_config": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
}
"""Fields of GenerationConfig that ask for another way of computing, and the values that do not."""


def cache_argument(model: nn.Module) -> str | None:
    """What the forward pass calls its cache: transformers has renamed it.

    Args:
        model: without a wrapper.

    Returns:
        The argument's name, None if there is none.
    """
    known = inspect.signature(type(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in known), None)


def text_config(model: Any) -> Any:
    """The configuration of the part that writes text.

    Args:
        model: without a wrapper.

    Returns:
        The configuration.
    """
    return model.config.get_text_config(decoder=True)


def why_not_group(policy: Any, config: GenerationConfig, longest: int) -> str | None:
    """Why ``generate`` has to be used.

    Args:
        policy: the policy, unwrapped from data parallelism.
        config: what is asked for.
        longest: tokens that the longest row may come to have.

    Returns:
        The reason, the end of a sentence that begins with "because"; None if the group engine can draw.
    """
    model = base_model(policy)
    return _adapter(policy) or _model(model) or _layers(model) or _positions(model, longest) or _request(config)


def why_not_batches(policy: Any) -> str | None:
    """Why continuous batching of transformers cannot draw from a model: it packs rows and brings its own attention.

    Args:
        policy: the policy, unwrapped from data parallelism.

    Returns:
        As in ``why_not_group``.
    """
    model = base_model(policy)
    reason = _adapter(policy) or _model(model) or _layers(model)
    if reason is None and not model._supports_attention_backend:
        reason = f"the attention of {type(model).__name__} cannot be exchanged"
    return reason


def why_not_rules(processors: Any, criteria: Any) -> str | None:
    """Why these processors and criteria cannot be applied to rows that come and go.

    Args:
        processors: of scores.
        criteria: for stopping, besides end and limit.

    Returns:
        As in ``why_not_group``.
    """
    known = {*SCORES_ONLY, *OCCURRENCE, *SEQUENCE}
    strange = [type(p).__name__ for p in processors if type(p) not in known]
    strange += [type(c).__name__ for c in criteria if type(c) not in (MaxTimeCriteria, StopStringCriteria)]
    return f"{', '.join(strange)} may remember rows by their place in the batch" if strange else None


def _adapter(policy: Any) -> str | None:
    for name in getattr(policy, "active_adapters", None) or [] if hasattr(policy, "peft_config") else []:
        config = policy.peft_config.get(name)
        if getattr(config, "is_prompt_learning", False):
            return f"adapter {name!r} puts learned tokens in front of the prompt"
        if getattr(config, "alora_invocation_tokens", None):
            return f"adapter {name!r} is switched on by tokens of the prompt"
    return None


def _model(model: Any) -> str | None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        return f"{kind} is not a model of transformers that generates"
    if model.config.is_encoder_decoder:
        return f"{kind} has an encoder"
    if model.is_remote_code():
        return f"the code of {kind} came with its checkpoint"
    if model._is_stateful or not model._supports_default_dynamic_cache():
        return f"{kind} keeps a state that is not a list of keys and values"
    for name in _OWN_LOOP:
        if (
            getattr(type(model), name, None) is not getattr(GenerationMixin, name, None)
            and (kind, name) not in _HARMLESS
        ):
            return f"{kind} has a {name} of its own"
    known = inspect.signature(type(model).forward).parameters
    missing = [name for name in ("input_ids", "attention_mask", "position_ids") if name not in known]
    if missing or cache_argument(model) is None:
        return f"the forward pass of {kind} takes no {(missing or ['cache'])[0]}"
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        return f"{kind} is spread over {len(places)} devices"
    if any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters()):
        return f"the parameters of {kind} are sharded"
    return None


def _layers(model: Any) -> str | None:
    config = text_config(model)
    if "chunked_attention" in (getattr(config, "layer_types", None) or []):
        return f"{type(model).__name__} attends in chunks"
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        return f"{type(model).__name__} has layers with a {kinds.pop().__name__}"
    return None


def _positions(model: Any, longest: int) -> str | None:
    """Rotary tables that depend on the longest row of the batch would tie each row to the others."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for table in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = table.get("rope_type", table.get("type", "default"))
        if kind == "longrope" or "dynamic" in str(kind):
            room = table.get("original_max_position_embeddings")
            room = room or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            if longest > room:
                return (
                    f"its {kind} positions depend on the longest row of a batch beyond {room} tokens ({longest} here)"
                )
    return None


def _request(config: GenerationConfig) -> str | None:
    for name, values in _OTHER_WAYS.items():
        if getattr(config, name, None) not in values:
            return f"{name}={getattr(config, name)!r} asks for it"
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"the arguments ask for {mode.value.replace('_', ' ')}"
    return None
