"""Models and tokenizers, loaded and made ready: the one door to peft and bitsandbytes.

Nothing that the user hands in is changed, but for a model that is trained: tokenizers and dictionaries are copied.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_trainer.builtin import is_builtin, resolve_builtin

_DROPOUT_ATTRIBUTES = (
    "attention_dropout",
    "attn_dropout",
    "dropout",
    "dropout_p",
    "resid_dropout",
    "activation_dropout",
)


def load_policy(
    model: str | nn.Module,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    peft_config: Any = None,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """The model that is trained.

    Args:
        model: a hub name, a folder, ``builtin:…``, a model, or a model with an adapter.
        model_init_kwargs: of ``from_pretrained``, for a name; ``dtype`` is float32 unless it says otherwise.
        trust_remote_code: run code that the repository brings.
        quantization_config: loads a name in 4 or 8 bits; an adapter has to train on top.
        peft_config: wraps the model in a new adapter.
        gradient_checkpointing: whether activations will be recomputed; an adapter's inputs then need gradients.

    Returns:
        The model, its trainable adapter weights in float32.

    Raises:
        ValueError: if arguments contradict each other, or the model is of a kind that cannot be trained here.
    """
    if not isinstance(model, str):
        for name, value in (("model_init_kwargs", model_init_kwargs), ("quantization_config", quantization_config)):
            if value is not None:
                raise ValueError(f"{name} is for a model given by name, but model is a {type(model).__name__}")
    if is_peft(model) and peft_config is not None:
        raise ValueError(
            "model has an adapter already and peft_config asks for another. Give one of them: "
            "model.merge_and_unload() merges the first, or leave out peft_config to go on training it"
        )
    policy: nn.Module = (
        _load_by_name(model, model_init_kwargs, trust_remote_code, quantization_config)
        if isinstance(model, str)
        else model
    )
    config = getattr(base_model(policy), "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(policy).__name__} is an encoder-decoder; GRPO here trains decoder-only language models"
        )
    quantized = _is_quantized(policy)
    if peft_config is not None:
        policy = _wrap(policy, peft_config, quantized, gradient_checkpointing)
    elif quantized and not is_peft(policy):
        raise ValueError(
            "a model in 4 or 8 bits cannot be trained itself: give peft_config=LoraConfig(...) so that an adapter is "
            "trained on top of it, or load it without quantization"
        )
    if quantized:
        _keep_differentiable(policy)
    if is_peft(policy):
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # in bf16, 1 + 1e-6 is 1: small steps would be lost
        if gradient_checkpointing:
            base_model(policy).enable_input_require_grads()
    if not any(p.requires_grad for p in policy.parameters()):
        raise ValueError("no parameter of the model requires a gradient, so there is nothing to train")
    return policy


def load_tokenizer(processing_class: Any, model: str | nn.Module, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer that pads on the left and has a padding token.

    Args:
        processing_class: the user's, which is copied; None loads the model's.
        model: a name, or a model that knows the name it came from.
        trust_remote_code: run code that the repository brings.

    Returns:
        The copy. Its padding token is the end-of-sequence token if it had none.

    Raises:
        ValueError: if there is none to be had, it is a processor of images or sound, or has no token to pad with.
    """
    from transformers import AutoTokenizer, ProcessorMixin

    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            "processing_class is a processor of several modalities; only text is supported: give its tokenizer"
        )
    if processing_class is None:
        name = (
            model
            if isinstance(model, str)
            else getattr(getattr(base_model(model), "config", None), "_name_or_path", "")
        )
        if not name:
            raise ValueError("the model does not say where its tokenizer is: give processing_class=tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(_folder_of(name), trust_remote_code=trust_remote_code)
    else:
        tokenizer = copy.deepcopy(processing_class)
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a padding nor an end-of-sequence token: set tokenizer.pad_token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_reward_model(
    model: str | nn.Module, tokenizer: Any = None, *, trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """A sequence classifier with one label, and a tokenizer that pads on the right for it.

    Args:
        model: a name or the module.
        tokenizer: the user's, which is copied; None loads the model's.
        trust_remote_code: run code that the repository brings.

    Returns:
        The model, frozen and in eval mode, and the tokenizer.

    Raises:
        ValueError: if there is no tokenizer to be had.
    """
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(tokenizer, model, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    classifier: Any = model
    if isinstance(model, str):
        classifier = AutoModelForSequenceClassification.from_pretrained(
            _folder_of(model), num_labels=1, trust_remote_code=trust_remote_code
        )
    classifier.config.pad_token_id = tokenizer.pad_token_id  # where the classifier finds the last token
    return classifier.eval().requires_grad_(False), tokenizer


def lora_config(**settings: Any) -> Any:
    """A ``peft.LoraConfig`` for a causal language model.

    Args:
        **settings: its fields; those that are None keep peft's default.

    Returns:
        The configuration.
    """
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", **{k: v for k, v in settings.items() if v is not None})


def end_of_sequence_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: those of the model's generation config and the tokenizer's.

    Args:
        model: the policy.
        tokenizer: its tokenizer.

    Returns:
        Ids, each once, the model's first.

    Raises:
        ValueError: if there is none.
    """
    config = getattr(base_model(model), "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = [*(named if isinstance(named, (list, tuple)) else [named]), tokenizer.eos_token_id]
    found = tuple(dict.fromkeys(int(i) for i in ids if i is not None))
    if not found:
        raise ValueError(
            "neither model.generation_config nor the tokenizer names an end-of-sequence token, so no completion could "
            "ever end: set tokenizer.eos_token"
        )
    return found


def max_context(model: nn.Module) -> int | None:
    """Most tokens that the model's positions allow; None if its configuration does not say."""
    config: Any = getattr(base_model(model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of a model to 0, an adapter's included, and those that are plain numbers of a module."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _DROPOUT_ATTRIBUTES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def is_peft(model: Any) -> bool:
    """Whether a model is wrapped in an adapter."""
    if not hasattr(model, "get_base_model"):
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model(model: Any) -> Any:
    """The model inside an adapter's wrapper, or the model itself."""
    return model.get_base_model() if is_peft(model) else model


def _load_by_name(name: str, kwargs: dict[str, Any] | None, trust_remote_code: bool, quantization_config: Any) -> Any:
    import transformers

    settings = {"dtype": "float32", "trust_remote_code": trust_remote_code, **(kwargs or {})}
    if "torch_dtype" in settings:
        settings["dtype"] = settings.pop("torch_dtype")
    if quantization_config is not None:
        settings["quantization_config"] = quantization_config
    if settings["dtype"] not in ("auto", None) and isinstance(settings["dtype"], str):
        settings["dtype"] = _dtype(settings["dtype"])
    return transformers.AutoModelForCausalLM.from_pretrained(_folder_of(name), **settings)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r} is unknown; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return dtype


def _folder_of(name: str) -> str:
    """Where a name's files are: a folder, or the hub's name."""
    if is_builtin(name):
        return resolve_builtin(name)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_like_path and not path.is_dir():
        raise ValueError(
            f"model {name!r}: there is no such folder. Give a folder, a hub name (owner/name) or builtin:…"
        )
    return str(path) if path.is_dir() else name


def _is_quantized(model: Any) -> bool:
    inner = base_model(model)
    return bool(getattr(inner, "is_loaded_in_4bit", False) or getattr(inner, "is_loaded_in_8bit", False))


def _keep_differentiable(model: nn.Module) -> None:
    """Keeps 4-bit layers on the path that has a gradient.

    On a CPU with bf16 instructions, bitsandbytes repacks a layer's weights for inference at its first forward pass in
    eval mode, which generation is, and the repacked layer passes no gradient on: an adapter below it would never
    train.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _wrap(model: nn.Module, peft_config: Any, quantized: bool, gradient_checkpointing: bool) -> nn.Module:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if quantized:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)
    return get_peft_model(model, peft_config)
